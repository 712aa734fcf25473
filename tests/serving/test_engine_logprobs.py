"""Log-probabilities that the engine's choosing program gives, against float64 in numpy."""

import math

import jax
import numpy as np
import pytest

from tests.benchmarks.choosing_helpers import Row, V, log_softmax, run
from turbojax.models import Penalties, Request, Sampling
from turbojax.models.engine.requests import MOST_LOGPROBS
from turbojax.models.engine.sampler import Chosen, most_likely


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("size", [5, 20, 64, 77])
def test_logprobs_are_of_the_raw_logits(size):
    rng = np.random.default_rng(size)
    logits = rng.normal(scale=4.0, size=(3, size)).astype(np.float32)
    logits[2, 3] = -np.inf
    history = rng.integers(0, size, (3, 8)).astype(np.int32)
    request = Request(
        [1],
        sampling=Sampling(temperature=2.0),
        logprobs=20,
        penalties=Penalties(3.0),
        logit_bias={2: 5.0, int(np.argmax(logits[0])): -math.inf},
    )
    _, chosen = run(logits, history, [Row(request, i, 5, 2) for i in range(3)])
    count = min(size, MOST_LOGPROBS)
    for i in range(3):
        wanted = log_softmax(logits[i])
        order = np.argsort(-wanted, kind="stable")[:count]
        # The sum of `size` float32 exponentials, and differences up to some 20.
        close = {"rtol": 1e-6, "atol": 1e-5}
        np.testing.assert_allclose(chosen.logprobs[i], wanted[chosen.tokens[i]], **close)
        np.testing.assert_array_equal(chosen.top_tokens[i, :count], order)
        np.testing.assert_allclose(chosen.top_logprobs[i, :count], wanted[order], **close)
        assert np.all(chosen.top_tokens[i, count:] == -1)
        assert np.all(chosen.top_logprobs[i, count:] == -np.inf)
        entry = chosen.logprobs_of(i, 4)
        assert entry.logprob == float(chosen.logprobs[i])
        assert [token for token, _ in entry.top] == order[:4].tolist()
        assert len(chosen.logprobs_of(i, 20).top) == count
        assert chosen.logprobs_of(i, 0).top == ()
    assert chosen.tokens[0] != np.argmax(logits[0])


def test_top_logprobs_of_equal_tokens_begin_with_the_smaller():
    logits = np.zeros((1, V), np.float32)
    _, chosen = run(logits, np.zeros((1, 4), np.int32), [Row(Request([1], logprobs=20), 0, 1, 1)])
    assert chosen.top_tokens[0].tolist() == list(range(20))
    np.testing.assert_allclose(chosen.logprobs, [-np.log(V)], rtol=1e-6)


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize(("size", "count"), [(20, 20), (21, 20), (1000, 20), (5001, 20), (77, 3)])
def test_the_most_likely_are_those_of_top_k_also_of_equal_ones(size, count):
    rng = np.random.default_rng(size)
    # The largest are few, and many are equal, in parts of a row that others lead.
    logits = rng.geometric(0.5, (40, size)).astype(np.float32)
    logits[10:20] = rng.normal(size=(10, size))
    logits[20:30, rng.integers(0, size, size // 2)] = -np.inf
    logits[30] = -np.inf
    logits[31, 1:] = -np.inf
    values, tokens = (np.asarray(x) for x in jax.jit(most_likely, static_argnums=1)(logits, count))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, -1))


def test_a_logit_of_infinity_is_certain():
    logits = np.zeros((1, V), np.float32)
    logits[0, 30] = np.inf
    _, chosen = run(logits, np.zeros((1, 4), np.int32), [Row(Request([1], logprobs=2), 0, 1, 1)])
    assert chosen.logprobs_of(0, 2).top == ((30, 0.0), (0, -math.inf))


def test_logprobs_that_nobody_wanted_are_refused():
    with pytest.raises(ValueError, match="logprobs of these tokens are None"):
        Chosen(np.zeros(1, np.int32)).logprobs_of(0, 1)
