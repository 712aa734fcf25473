"""Prompts that attend among themselves, as they do on a GPU where pages are compressed."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.serving.engine_helpers import TINY, held, make
from turbojax import TurboConfig, models
from turbojax.attention.options import PLAIN
from turbojax.models import Request, Result, causal_attention
from turbojax.models.engine import engine

NEW = 8
SIZES = {"num_pages": 24, "max_sequences": 4, "max_length": 96, "step_tokens": 128}


@functools.cache
def model(windows=(None, None)) -> models.Decoder:
    config = dataclasses.replace(TINY, num_layers=len(windows), local_windows=windows)
    return models.random_decoder(config, dtype=jnp.float32)


def prompts_of(sizes=(40, 3, 17, 60, 33, 1)) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 97, size).tolist() for size in sizes]


class Run:
    """Requests through an engine whose prompts attend among themselves, and which of them did.

    Args:
      decoder: the model.
      prompts: of requests that come together, in this order.
      mode: of `TurboConfig`; ``"float"`` rounds nothing.
      options: of the engine.

    Attributes:
      results: of the requests.
      alone: of each request bool ``[length]``, tokens that attended to their own prompt.
    """

    def __init__(self, decoder, prompts, mode="float", **options) -> None:
        config = TurboConfig(mode=mode)
        with (
            mock.patch.object(engine, "needs_gpu", return_value=None),
            mock.patch.object(engine.TurboConfig, "for_device", return_value=config),
        ):
            self.made = make(decoder, **{**SIZES, **options})
        self.plain, self.made._device.run = self.made._device.run, self._run
        self.prompts, self.alone = [], []
        self.results = self.follow(prompts)

    def follow(self, prompts, late=()) -> list[Result]:
        """Runs more; the late ones come while the others decode."""
        self.prompts += [*prompts, *late]
        self.alone += [np.zeros(SIZES["max_length"], bool) for _ in (*prompts, *late)]
        numbers = [self.made.add(Request(prompt, NEW, logprobs=0)) for prompt in prompts]
        for _ in range(3 if late else 0):
            assert self.made.step() or not self.made.idle
        numbers += [self.made.add(Request(prompt, NEW, logprobs=0)) for prompt in late]
        results = self.made.run()
        return [results[number] for number in numbers]

    def _run(self, plan, changes):
        if plan.pieces and self.made._device.programs.of(plan).is_dense:
            for piece in plan.pieces:
                self.alone[piece.sequence.request_id][piece.begin : piece.begin + piece.count] = (
                    True
                )
        return self.plain(plan, changes)

    def errors(self, kv_dtype, results, *, skipped=0, is_dense=True) -> np.ndarray:
        """How far log-probabilities are from the oracle's, of all tokens of the results."""
        rows = slice(skipped, skipped + len(results))
        alone = self.alone[rows] if is_dense else [np.zeros_like(x) for x in self.alone[rows]]
        prompts, tokens = self.prompts[rows], [result.tokens for result in results]
        wanted = oracle(self.made, prompts, tokens, kv_dtype, alone)
        found = [[x.logprob for x in result.logprobs] for result in results]
        return np.abs(np.concatenate(found) - np.concatenate(wanted))


def oracle(made, prompts, results, kv_dtype, alone) -> list[np.ndarray]:
    """Log-probabilities of the results' tokens, from one pass over all tokens.

    Tokens of prompts that are `alone` attend to keys and values as they are, all others to those
    that pages hold.
    """
    size = max(len(p) + len(r) for p, r in zip(prompts, results, strict=True))
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, prompt, result in zip(tokens, prompts, results, strict=True):
        row[: len(prompt) + len(result)] = [*prompt, *result]
    positions = np.broadcast_to(np.arange(size), tokens.shape)
    exact = jnp.asarray(np.stack(alone)[:, :size, None, None])

    def attend(query, key, value, cache, options=PLAIN):
        stored = key, value
        if cache is None:
            stored = held(key, kv_dtype, 0), held(value, kv_dtype, 1)
        plain, _ = causal_attention(query, key, value, None, options)
        of_pages, _ = causal_attention(query, *stored, None, options)
        return jnp.where(exact, plain, of_pages), cache

    # Other than None of layers whose pages hold keys and values as they are.
    layers = tuple(() if cache.kv_dtype == "auto" else None for cache in made._device.caches)
    decoder = made._device._decoder
    hidden, _ = decoder.hidden(jnp.asarray(tokens), jnp.asarray(positions), attend, layers)
    logprobs = np.asarray(jax.nn.log_softmax(decoder.logits(hidden), axis=-1))
    return [
        row[np.arange(len(prompt) - 1, len(prompt) + len(result) - 1), list(result)]
        for row, prompt, result in zip(logprobs, prompts, results, strict=True)
    ]


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ((None, None), {}),
        pytest.param((24, None), {}, marks=pytest.mark.slow),
        pytest.param((None,) * 3, {"uncompressed_layers": 1}, marks=pytest.mark.slow),
    ],
    ids=["plain", "windows", "edges"],
)
def test_prompts_attend_to_themselves_as_they_are(windows, options):
    """Codes of 2 bits, so that tokens which attend to pages would be far off."""
    kv_dtype = "turbo_k2v2"
    run = Run(model(windows), prompts_of(), kv_dtype=kv_dtype, **options)
    for alone, prompt in zip(run.alone, run.prompts, strict=True):
        # Where some layers attend to pages, a prompt may be cut up.
        assert alone.sum() == len(prompt) or (options and alone.any())
    assert run.errors(kv_dtype, run.results).max() < 2e-4
    if not options:
        assert run.errors(kv_dtype, run.results, is_dense=False).mean() > 0.1
    # What is in the pool is not computed again: the rest of a prompt attends to it.
    count = len(run.prompts)
    again = run.follow([[*prompt, 5, 6, 7] for prompt in run.prompts[:4]])
    assert [result.reused_tokens > 0 for result in again] == [True, False, True, True]
    alone = [x.sum() for x in run.alone[count:]]
    for row, result in enumerate(again):
        # Which pages hold what came from a prompt that attended to itself, as far as it did.
        reused = result.reused_tokens
        run.alone[count + row][:reused] = run.alone[row][:reused]
    assert alone == [0, 0, 0, 0]
    assert run.errors(kv_dtype, again, skipped=count).max() < 2e-4


@pytest.mark.fuzz
def test_a_prompt_longer_than_a_step_goes_on_from_pages():
    run = Run(model(), prompts_of(), kv_dtype="turbo_k2v2", step_tokens=40)
    counts = [alone.sum() for alone in run.alone]
    assert 0 < counts[3] < 60
    assert run.errors("turbo_k2v2", run.results).max() < 2e-4


@pytest.mark.fuzz
@pytest.mark.parametrize("mode", ["fp8", "int8"])
def test_operands_of_8_bits(mode):
    run = Run(model(), prompts_of(), mode, kv_dtype="turbo4")
    errors = run.errors("turbo4", run.results)
    assert errors.mean() < 0.06
    assert errors.max() < 0.3
    assert errors.mean() < 0.6 * run.errors("turbo4", run.results, is_dense=False).mean()


@pytest.mark.fuzz
@pytest.mark.parametrize("mode", ["float", pytest.param("fp8", marks=pytest.mark.slow)])
def test_nan_does_not_reach_another_prompt_of_the_step(mode):
    plain = model()
    broken = plain.embedding.at[7].set(jnp.nan)
    # Greedy over logits that hold no NaN: the head must not be the broken embedding.
    decoder = dataclasses.replace(plain, embedding=broken, lm_head=plain.embedding)
    good = [[token for token in prompt if token != 7] for prompt in prompts_of((30, 9))]
    mixed = [good[0], [3, 4, 7, 5, 9], good[1], [7]]
    run = Run(decoder, mixed, mode, kv_dtype="turbo4", prefix_caching=False)
    assert run.made.statistics().steps_of_prompts == 1
    # And not those that decode meanwhile.
    results = [*run.results, *run.follow([good[1]], late=[[7, 1], good[0], [2, 7]])]
    reasons = [result.finish_reason for result in results]
    assert reasons == [
        "length",
        "failed",
        "length",
        "failed",
        "length",
        "failed",
        "length",
        "failed",
    ]
    assert run.made.statistics().steps_of_prompts == 3
    if mode != "float":
        return
    kept = [i for i, reason in enumerate(reasons) if reason == "length"]
    run.prompts, run.alone = ([x[i] for i in kept] for x in (run.prompts, run.alone))
    run.made._device._decoder = dataclasses.replace(plain, lm_head=plain.embedding)
    assert run.errors("turbo4", [results[i] for i in kept]).max() < 2e-4
