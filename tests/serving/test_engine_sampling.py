"""Choosing tokens after the engine's step, and what a request takes."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.sampling_helpers import KINDS, SIZE, rows
from turbojax.models import Request, Sampling
from turbojax.models.engine.sampler import Wanted, choose, no_extras


def chosen(logits, sampling, wanted):
    """Tokens of rows that are a slot each, without a history."""
    count = len(logits)
    history, counts = jnp.zeros((count, 2), jnp.int32), np.zeros(count, np.int32)
    extras = no_extras(count, logits.shape[1], wanted)
    slots = np.arange(count, dtype=np.int32)
    after, found = choose(logits, history, counts, counts, slots, sampling, extras, wanted=wanted)
    assert np.array_equal(after[:, 0], found.tokens)
    assert not np.any(after[:, 1])
    return np.asarray(found.tokens)


def test_a_draw_from_all_tokens_is_the_same_whatever_the_others_ask_for():
    rng = np.random.default_rng(4)
    count, size = 200, 500
    logits = jnp.asarray(rng.normal(scale=3.0, size=(count, size)), jnp.float32)
    temperature = rng.choice([0.0, 0.3, 1.0], count)
    restricted = rng.random(count) < 0.5
    options = (
        temperature,
        *(np.where(restricted, x, y) for x, y in ((3, 0), (0.9, 1.0), (0.2, 0.0))),
    )
    draw, mixed = (
        chosen(logits, rows(count, *x), Wanted(kind))
        for kind, x in (("draw", options[:1]), ("restrict", options))
    )
    assert np.array_equal(draw[~restricted], mixed[~restricted])
    assert not np.array_equal(draw[restricted], mixed[restricted])


def test_no_kind_has_a_branch_on_the_device():
    """The host would have to read the predicate before it could go on."""
    logits, history = jnp.zeros((4, SIZE), jnp.float32), jnp.zeros((4, 3), jnp.int32)
    counts, slots = np.ones(4, np.int32), np.arange(4, dtype=np.int32)
    for kind in KINDS:
        wanted = Wanted(kind, penalties=True, bias=16, mask=True, logprobs=True)
        extras = no_extras(4, SIZE, wanted)
        arguments = logits, history, counts, counts, slots, rows(4), extras
        program = choose.lower(*arguments, wanted=wanted).as_text()
        assert "argmax" in program or "reduce" in program
        assert "stablehlo.case" not in program
        assert "stablehlo.if" not in program
    assert "sort" in program


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": []}, ValueError, "must be at least one"),
        ({"tokens": [1.5]}, TypeError, "a member of tokens=1.5 must be an integer"),
        ({"tokens": [1], "max_new_tokens": 0}, ValueError, "max_new_tokens=0 must be at least 1"),
        ({"tokens": [1], "stop_tokens": ["a"]}, TypeError, "a member of stop_tokens='a' must"),
        ({"tokens": [1], "sampling": 0.7}, TypeError, "sampling=0.7 must be a Sampling"),
    ],
)
def test_a_request_refuses(options, error, message):
    with pytest.raises(error, match=message):
        Request(**options)


def test_a_request_takes_arrays_and_can_be_compared():
    made = Request(np.array([1, 2]), stop_tokens=np.array([7]))
    assert made == Request((1, 2), stop_tokens=(7,))
    assert made.tokens == (1, 2)
    assert made.total == 130


def test_requests_are_keys():
    """Equal ones are the same key, also with a bias, which is a mapping."""
    made = [Request([1], logit_bias={2: x}, sampling=Sampling(seed=3)) for x in (0.5, 0.5, 1.0)]
    assert len(set(made)) == 2
    assert made[0] in {made[1]: None}
