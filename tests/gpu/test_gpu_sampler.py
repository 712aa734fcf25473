"""The engine's choosing program on a GPU, with a vocabulary of real size."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests.benchmarks.sampler_helpers import Row, everything, run
from turbojax.models import Penalties, Request, Sampling
from turbojax.models.engine.sampler import Wanted

pytestmark = pytest.mark.gpu

VOCABULARY, ROWS, LENGTH = 128_256 + 5, 64, 300
ALL = Wanted("restrict", penalties=True, bias=16, mask=True, logprobs=True)


@pytest.fixture(scope="module")
def case() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3.0, size=(ROWS, VOCABULARY)).astype(np.float32)
    return logits, rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_do_not_depend_on_what_others_want(case, temperature):
    """Of rows that want log-probabilities alone, in programs that can do more or less."""
    logits, history = case
    kind = "draw" if temperature else "greedy"
    sampling = [Sampling(temperature=temperature, seed=i) for i in range(ROWS)]
    rows = [Row(Request([1], sampling=s, logprobs=20), i, 200, 50) for i, s in enumerate(sampling)]
    after, chosen = run(logits, history, rows, Wanted(kind, logprobs=True))
    everyone = [
        row
        if i % 2
        else dataclasses.replace(
            row,
            request=dataclasses.replace(
                row.request,
                penalties=Penalties(1.5, 0.5, 0.5),
                logit_bias={3: 2.0, int(np.argmax(logits[i])): -math.inf},
                constraint=everything(VOCABULARY),
            ),
            allowed=np.arange(VOCABULARY) % 2 == 0,
        )
        for i, row in enumerate(rows)
    ]
    for wanted, others in ((ALL, rows), (ALL, everyone)):
        again, found = run(logits, history, others, wanted)
        np.testing.assert_array_equal(again[1::2], after[1::2])
        for one, other in zip(jax.tree.leaves(chosen), jax.tree.leaves(found), strict=True):
            assert one[1::2].tobytes() == other[1::2].tobytes()
    # Those that want more: no forbidden token, not even at the edge of the vocabulary.
    assert np.all(found.tokens[::2] % 2 == 0)
    assert np.all(found.tokens[::2] >= 0)
    assert np.all(found.tokens[::2] != np.argmax(logits[::2], axis=-1))


def test_logprobs_are_those_of_float64(case):
    logits, history = case
    rows = [Row(Request([1], logprobs=20), i, 200, 50) for i in range(ROWS)]
    _, chosen = run(logits, history, rows)
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(chosen.top_tokens, order)
    wanted = np.take_along_axis(wide - total, order, -1)
    # Roundings of numbers below 32, and of a sum of positive terms.
    np.testing.assert_allclose(chosen.top_logprobs, wanted, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(chosen.logprobs, chosen.top_logprobs[:, 0])


def test_penalties_and_bias_count_every_token_of_a_text(case):
    """Greedy, against a loop over the tokens; scatters are the part that a GPU does differently."""
    logits, history = case
    history = np.where(np.arange(LENGTH) % 2 == 0, np.argmax(logits, -1)[:, None], history)
    wish = {"penalties": Penalties(1.5, 0.25, 0.5), "logit_bias": {9: 12.0}}
    rows = [Row(Request([1], **wish), i, 20 + i, 10 + i % 7) for i in range(ROWS)]
    after, chosen = run(logits, history.astype(np.int32), rows)
    for i, row in enumerate(rows):
        values = logits[i].astype(np.float64)
        values[9] += 12.0
        text = history[i, : row.length]
        there = np.unique(text)
        values[there] = np.where(values[there] > 0, values[there] / 1.5, values[there] * 1.5)
        counts = np.bincount(text[row.prompt :], minlength=VOCABULARY)
        values -= 0.5 * counts + 0.25 * (counts > 0)
        # The largest up to rounding: several of 128,261 may be that close.
        assert values[chosen.tokens[i]] >= values.max() - 1e-4
        assert after[i, row.length] == chosen.tokens[i]
