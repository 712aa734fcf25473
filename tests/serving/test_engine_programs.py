"""Sizes of an engine's steps, and that all their programs can be compiled ahead."""

import dataclasses
import itertools
import logging

import jax
import pytest

from tests.serving.engine_helpers import make
from turbojax.models import Request, Sampling
from turbojax.models.engine import Draft, NGram, programs
from turbojax.models.engine.programs import PromptProgram


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 100, 128, 200, 256, 300, 1000])
def test_rows_of_decoding(slots):
    """No more than twice as many rows as sequences, of many half as many again."""
    sizes = programs.decode_sizes(slots)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == slots
    for count in range(1, slots + 1):
        size = next(x for x in sizes if x >= count)
        assert size < 2 * count
        if count > 256:
            assert size <= count * 3 / 2
    assert len(sizes) <= 2 * slots.bit_length()
    made = programs.decode_program(slots)
    assert (made.tokens, made.rows, made.prompt_tokens) == (slots, slots, 0)


@pytest.mark.parametrize("kinds", [{"turbo4"}, {"auto"}, {"auto", "turbo4"}])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("step_tokens", [1, 24, 64, 100, 512, 2048, 8192])
@pytest.mark.parametrize("max_length", [128, 131072])
def test_programs_with_prompts(step_tokens, kinds, is_dense, max_length):
    slots = 8
    found = programs.prompt_programs(slots, step_tokens, max_length, kinds=kinds, is_dense=is_dense)
    assert [x.tokens for x in found] == sorted(x.tokens for x in found)
    assert found[-1].prompt_tokens == step_tokens
    assert {x.rows for x in found} == {slots}
    for made in found:
        size = made.prompt_tokens
        # The whole step for one prompt, and room for several.
        assert made.fits([size])
        assert not made.fits([size + 1])
        assert made.pieces >= 4
        assert not made.fits([1] * (made.pieces + 1))
        if made.parts:
            assert made.parts * made.part >= size
            assert not made.fits([made.part + 1] * (made.parts // 2 + 1))
        else:
            assert made.is_dense
            assert "auto" not in kinds
    dense = [x for x in found if x.is_dense]
    assert [x.prompt_tokens for x in dense] == [x.prompt_tokens for x in found if not x.is_dense][
        : len(dense)
    ]
    assert bool(dense) == is_dense
    # Where a dense program and another one of a size both fit, the dense one comes first.
    for before, after in itertools.pairwise(found):
        assert before.tokens < after.tokens or before.is_dense > after.is_dense


def test_the_one_program_of_a_reproducible_engine():
    made = programs.reproducible_program(8, 64)
    assert made == PromptProgram(72, 8, 1, 1, 64, is_dense=False)
    assert made.fits([64])
    assert made.fits([])
    assert not made.fits([1, 1])


# Compiled ahead -----------------------------------------------------------------------------------


def mixes():
    """Requests that come in twos and threes, begin alike, and outgrow the smallest steps."""
    shared = [1, 2, 3, 4] * 9
    yield [Request([5] * 7, 12)]
    yield [Request([6] * 70, 3), Request(shared, 20), Request([7], 9)]
    yield [Request([*shared, i], 10 + i, stop_tokens=(96,), priority=i) for i in range(3)]
    yield [Request([8] * 30, 40, timeout=500.0), Request([9, 10] * 9, 2)]


def drawn(request: Request, number: int) -> Request:
    kinds = Sampling(0.7, seed=number), Sampling(0.9, top_p=0.8), Sampling()
    logprobs = 3 if number % 3 == 0 else None
    return dataclasses.replace(request, sampling=kinds[number % 3], logprobs=logprobs)


# Of each kind of guesses, and with steps of two sizes.
OPTIONS = {
    "plain": {},
    "ngram": {"speculation": NGram(3)},
    "together": {"tokens_together": 4},
    "reproducible": {"reproducible": True},
    "draft": {"speculation": 3},
}


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    "name",
    ["plain", "ngram", "together", "reproducible", pytest.param("draft", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("only_greedy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_step_compiles_after_compile(model, name, only_greedy, caplog):
    options = {"num_pages": 30, "step_tokens": 100, "max_sequences": 3, **OPTIONS[name]}
    if name == "draft":
        options["speculation"] = Draft(model, 3)
    made = make(model, **options)
    told = []
    made.compile(lambda done, total: told.append((done, total)), only_greedy=only_greedy)
    total = len(told)
    assert told == [(i + 1, total) for i in range(total)]
    assert made.statistics().programs_compiled == total
    before = programs.count_traced()
    with caplog.at_level(logging.WARNING), jax.log_compiles(True):
        for i, wanted in enumerate(mixes()):
            for request in wanted:
                made.add(request if only_greedy else drawn(request, i))
            made.run()
        compiled = [x for x in caplog.messages if "Finished XLA compilation" in x]
        assert compiled == []
        jax.jit(lambda x: x + len(caplog.messages))(1)
        assert any("Finished XLA compilation" in x for x in caplog.messages)
    assert programs.count_traced() == before
    after = made.statistics()
    assert (after.programs_compiled, after.first_step_seconds) == (total, 0.0)
    assert after.finished == 9
    assert after.prefix_hits > 0
    assert after.preemptions == 0
    # Another engine like this one compiles nothing.
    again = make(model, **options)
    again.compile(only_greedy=only_greedy)
    assert programs.count_traced() == before
