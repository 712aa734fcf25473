"""Several tokens at a time on real models: texts are those of one, whatever pages hold."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.serving.engine_helpers import TINY, logits_without_a_cache, make
from tests.serving.engine_watching import check_belief
from turbojax import models
from turbojax.models import Request, Sampling
from turbojax.models.config import LatentConfig
from turbojax.models.engine import Draft, NGram, engine, programs, speculation, statistics, step

FORMATS = (
    "turbo4",
    "auto",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "k8v4",
    "turbo_k4v3",
    "turbo_k3v2",
    "turbo_k2v2",
)
# Of a text that repeats itself, of one that does not, and of one token.
PROMPTS = [1, 2, 3, 4] * 5, [7, 3, 9, 1, 8, 8, 40, 96, 2, 5, 11], [5]
WARM = Sampling(0.6, seed=3)
WANTED = [
    *(Request(prompt, 24) for prompt in PROMPTS),
    *(Request(prompt, 24, sampling=WARM) for prompt in PROMPTS[:2]),
    Request(PROMPTS[0], 24, sampling=Sampling(0.8, top_k=5, seed=1)),
]


@functools.cache
def model(seed: int = 0) -> models.Decoder:
    """One layer whose greedy texts soon repeat themselves, as real ones do now and then."""
    config = dataclasses.replace(TINY, num_layers=1)
    return models.random_decoder(config, seed=seed, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def one_size():
    """Programs of one size, as each takes a second to compile; guesses whatever they cost."""
    with (
        mock.patch.object(engine, "decode_sizes", side_effect=lambda slots: (slots,)),
        mock.patch.object(statistics.Costs, "several_pay", return_value=True),
    ):
        yield


def texts(made, wanted=WANTED) -> list[tuple[int, ...]]:
    """What these requests get, that come together; the device holds what the host believes."""
    numbers = [made.add(request) for request in wanted]
    results = {}
    while not made.idle:
        for event in made.step():
            if not hasattr(event, "token"):
                results[event.request_id] = event.result
        check_belief(made, jax.device_get(made._device._state))
    assert all(results[number].finish_reason == "length" for number in numbers)
    return [results[number].tokens for number in numbers]


SIZES = {"max_sequences": 3, "max_length": 64, "num_pages": 12}
GUESSING = {
    "ngram": lambda: NGram(3, longest=3, shortest=1),
    "itself": lambda: Draft(model(), 3),
    "another": lambda: Draft(model(1), 3),
}


@functools.cache
def without(kv_dtype: str) -> list[tuple[int, ...]]:
    return texts(make(model(), kv_dtype=kv_dtype, **SIZES))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("how", GUESSING)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_texts_are_those_without_guesses(kv_dtype, how):
    made = make(model(), kv_dtype=kv_dtype, speculation=GUESSING[how](), **SIZES)
    assert texts(made) == without(kv_dtype)
    after = made.statistics()
    assert after.steps_of_speculation > 0
    assert after.accepted_tokens > 0
    if how == "itself":
        # Drawn with the same numbers.
        assert after.acceptance_rate == 1
        assert after.steps < after.new_tokens / 6
    else:
        assert after.acceptance_rate < 0.8


@pytest.mark.quick(2)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_texts_are_those_of_launches_of_one_token(kv_dtype):
    """Also of requests that end within a launch, and that come while one runs."""
    made = make(model(), kv_dtype=kv_dtype, tokens_together=4, **SIZES)
    assert texts(made) == without(kv_dtype)
    after = made.statistics()
    # Others wait at first, then all but the last tokens of three come in fours.
    assert 5 <= after.steps_of_several < after.steps < after.new_tokens / 3
    assert (after.steps_of_speculation, after.proposed_tokens) == (0, 0)
    ends = without(kv_dtype)[0][5]
    stopped = dataclasses.replace(WANTED[0], stop_tokens=(ends,))
    number = made.add(stopped)
    result = made.run()[number]
    assert result.finish_reason == "stop"
    assert result.tokens == without(kv_dtype)[0][: without(kv_dtype)[0].index(ends) + 1]


def test_launches_of_several_tokens_are_refused_beside_what_excludes_them():
    with pytest.raises(ValueError, match="tokens_together=2 must be 1 with reproducible=True"):
        make(model(), tokens_together=2, reproducible=True, **SIZES)
    with pytest.raises(ValueError, match="tokens_together=2 must be 1 with speculation"):
        make(model(), tokens_together=2, speculation=NGram(2), **SIZES)
    with pytest.raises(ValueError, match="tokens_together=0"):
        make(model(), tokens_together=0, **SIZES)


@pytest.mark.fuzz
@pytest.mark.parametrize("how", ["ngram", "itself", "together"])
@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ((24, None), {}),
        ((None, None), {"num_pages": 6}),
        ((None,) * 3, {"uncompressed_layers": 1}),
    ],
    ids=["windows", "swaps", "edges"],
)
def test_texts_of_other_pools_are_those_without_guesses(windows, options, how):
    """Of layers with windows, in a pool that is too small, and with pages of two kinds."""
    config = dataclasses.replace(TINY, num_layers=len(windows), local_windows=windows)
    decoder = models.random_decoder(config, dtype=jnp.float32)
    options = {"kv_dtype": "turbo4", **SIZES, **options}
    guesses = {"ngram": NGram(3, shortest=1), "itself": Draft(decoder, 3), "together": None}[how]
    together = 4 if how == "together" else None
    made = make(decoder, speculation=guesses, tokens_together=together, **options)
    wanted = [dataclasses.replace(request, max_new_tokens=36) for request in WANTED[:4]]
    assert texts(made, wanted) == texts(make(decoder, **options), wanted)
    after = made.statistics()
    assert after.accepted_tokens + after.steps_of_several > 0
    assert (after.preemptions > 0) == (made.statistics().pages == 6)


def latent_model(seed: int) -> models.Decoder:
    latent = LatentConfig(rank=64, nope_dim=16, rope_dim=8, value_dim=12)
    config = dataclasses.replace(TINY, num_layers=1, num_kv_heads=4, head_dim=24, latent=latent)
    return models.random_decoder(config, seed=seed, dtype=jnp.float32)


@pytest.mark.fuzz
@pytest.mark.parametrize("how", ["ngram", "draft"])
@pytest.mark.parametrize("kv_dtype", ["turbo4", "auto"])
def test_texts_of_latents_are_those_without_guesses(kv_dtype, how):
    decoder = latent_model(0)
    guesses = NGram(3, shortest=1) if how == "ngram" else Draft(model(), 3)
    options = {"kv_dtype": kv_dtype, **SIZES}
    made = make(decoder, speculation=guesses, **options)
    assert texts(made) == texts(make(decoder, **options))
    assert made.statistics().steps_of_speculation > 0


# What is drawn -----------------------------------------------------------------------------------


SMALL = dataclasses.replace(TINY, vocab_size=4, num_layers=1)
FIRST, DRAWS = [1, 2, 1, 2, 1, 2], 2000


def distribution(decoder, temperature: float, length: int) -> np.ndarray:
    """Of every continuation its probability, float64 ``[4] * length``, without a cache."""
    begins = list(itertools.product(range(4), repeat=length - 1))
    texts = [[*FIRST, *begin] for begin in begins]
    logits = logits_without_a_cache(decoder, texts, len(texts[0]))[:, len(FIRST) - 1 :]
    logits = np.asarray(logits, np.float64) / temperature
    each = np.exp(logits - logits.max(axis=-1, keepdims=True))
    each /= each.sum(axis=-1, keepdims=True)
    found = np.zeros((4,) * length)
    for begin, rows in zip(begins, each, strict=True):
        found[begin] = rows[-1] * np.prod(rows[np.arange(length - 1), list(begin)])
    assert np.isclose(found.sum(), 1)
    return found


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("how", ["ngram", pytest.param("draft", marks=pytest.mark.slow)])
def test_what_is_drawn_has_the_models_distribution(how, monkeypatch):
    """Of four tokens, of which two are guessed; the draft model is another one."""
    monkeypatch.setattr(programs, "_TOKENS_OF_A_PIECE", 16)  # many short prompts in a step
    decoder = models.random_decoder(SMALL, dtype=jnp.float32)
    other = models.random_decoder(SMALL, seed=1, dtype=jnp.float32)
    guesses = NGram(2, shortest=1) if how == "ngram" else Draft(other, 2)
    sizes = {"num_pages": 16, "max_sequences": 16, "max_length": 16, "step_tokens": 256}
    made = make(decoder, speculation=guesses, **sizes)
    made.add_samples(Request(FIRST, 4, sampling=Sampling(0.4)), DRAWS)
    counts = np.zeros((4,) * 4)
    for result in made.run().values():
        counts[result.tokens] += 1
    after = made.statistics()
    assert 0.05 < after.acceptance_rate < 0.9
    exact = DRAWS * distribution(decoder, 0.4, 4)
    is_likely = exact >= 5
    squares = np.sum((counts - exact)[is_likely] ** 2 / exact[is_likely])
    rest = exact[~is_likely].sum()
    squares += (counts[~is_likely].sum() - rest) ** 2 / rest
    # Six standard deviations above what chance gives.
    degrees = is_likely.sum()
    assert degrees > 30
    assert squares < degrees + 6 * np.sqrt(2 * degrees)
    # The test would notice another temperature.
    wrong = DRAWS * distribution(decoder, 0.5, 4)[is_likely]
    assert np.sum((counts[is_likely] - wrong) ** 2 / wrong) > degrees + 6 * np.sqrt(2 * degrees)


# Prompt lookup ------------------------------------------------------------------------------------


def look_up(text: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """What followed the longest match of the last tokens: that with most after it, the latest."""
    best, found = (), []
    for end in range(1, len(text)):
        run = 0
        while run < min(longest, end) and text[end - 1 - run] == text[-1 - run]:
            run += 1
        follow = text[end : end + count]
        if run >= shortest and (run, len(follow), end) > best:
            best, found = (run, len(follow), end), follow
    return found


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("how", [NGram(4), NGram(1, longest=1, shortest=1), NGram(15, 9, 3)])
def test_guesses_are_what_followed_the_same_tokens(how):
    rng = np.random.default_rng(how.tokens)
    slots, size, found_some, cut = 64, 40, 0, 0
    for _ in range(6):
        # What stands after a text means nothing: here it would match.
        history = rng.integers(0, 3, (slots, size)).astype(np.int32)
        history[::2] %= 2
        lengths = rng.integers(0, size - 1, slots).astype(np.int32)
        numbers = dict.fromkeys(("prompts", "left"), lengths)
        tables = np.zeros((1, slots, 3), np.int32)
        there = step.State(tables=tables, lengths=lengths, history=history, **numbers)
        rows = rng.permutation(slots + 1)[: slots - 4].astype(np.int32)  # one is nobody's
        guesses, counts = speculation.look_up(
            jax.tree.map(jnp.asarray, there), rows, count=how.tokens, longest=how.longest,
            shortest=how.shortest,
        )  # fmt: skip
        for row, slot in enumerate(rows):
            if slot == slots:
                continue
            text = history[slot, : lengths[slot] + 1].tolist()
            wanted = look_up(text, how.tokens, how.longest, how.shortest)
            assert guesses[row, : counts[row]].tolist() == wanted
            found_some += bool(wanted)
            cut += 0 < len(wanted) < how.tokens
    assert found_some > 200
    assert (cut > 0) == (how.tokens > 1)
