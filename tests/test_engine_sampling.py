"""Choosing tokens after the engine's step, and what a request takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_helpers import KINDS, SIZE, rows

from turbojax.models import Request
from turbojax.models.engine.sampling import choose


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
    last = np.zeros(count - 1, np.int32)
    counts, slot = np.ones(count, np.int32), np.int32(0)
    draw, mixed = (
        np.asarray(choose(logits, jnp.asarray(last), counts, slot, rows(count, *x), kind=kind)[0])
        for kind, x in (("draw", options[:1]), ("restrict", options))
    )
    assert np.array_equal(draw[~restricted], mixed[~restricted])
    assert not np.array_equal(draw[restricted], mixed[restricted])


def test_no_kind_has_a_branch_on_the_device():
    """The host would have to read the predicate before it could go on."""
    logits = jnp.zeros((4, SIZE), jnp.float32)
    arguments = logits, jnp.zeros(3, jnp.int32), np.ones(4, np.int32), np.int32(0), rows(4)
    for kind in KINDS:
        program = choose.lower(*arguments, kind=kind).as_text()
        assert "argmax" in program or "reduce" in program
        assert "stablehlo.case" not in program
        assert "stablehlo.if" not in program
    assert "sort" in program


def test_slots_go_on_with_what_was_chosen():
    logits = jax.nn.one_hot(jnp.asarray([3, 4, 5, 6]), SIZE)
    last = np.array([7, 8, 9], np.int32)
    counts = np.array([1, 0, 0, 5], np.int32)
    for slot, wanted in ((1, [3, 6, 9]), (3, [3, 8, 9])):
        chosen, after = choose(
            logits, jnp.asarray(last), counts, np.int32(slot), rows(4, 0.0), kind="greedy"
        )
        assert chosen.tolist() == [3, 4, 5, 6]
        assert after.tolist() == wanted


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
