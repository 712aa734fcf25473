"""Choosing tokens after the engine's step, against float64 distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax.models import Request, Sampling
from turbojax.models.engine.sampling import (
    NOTHING,
    SamplingRows,
    choose,
    kind_of,
    restrict,
    sample,
)

SIZE = 12
KINDS = ("greedy", "draw", "restrict")


def rows(count, temperature=1.0, top_k=0, top_p=1.0, seed=None, index=0) -> SamplingRows:
    def full(x, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(x), (count,)).astype(dtype))

    return SamplingRows(
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        seed=full(np.arange(count) if seed is None else seed, np.uint32),
        index=full(index, np.int32),
    )


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What is to be drawn from, float64: an independent definition."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[p < p[order[min(top_k, len(p)) - 1]]] = 0
    p /= p.sum()
    total, smallest = 0.0, 0.0
    for token in order:
        if total >= top_p:
            break
        total, smallest = total + p[token], p[token]
    p[p < smallest] = 0
    return p / p.sum()


LOGITS = np.random.default_rng(3).normal(scale=1.5, size=SIZE).astype(np.float32)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.7, 4, 1.0), (1.0, 0, 0.6), (2.0, 5, 0.7), (1.0, 1, 1.0)],
)
@pytest.mark.parametrize("by", ["seed", "index"])
def test_tokens_follow_the_distribution(temperature, top_k, top_p, by):
    count = 20_000
    numbers = np.arange(count)
    options = {"seed": numbers, "index": 3} if by == "seed" else {"seed": 5, "index": numbers}
    logits = jnp.broadcast_to(jnp.asarray(LOGITS)[None], (count, SIZE))
    drawn = sample(logits, rows(count, temperature, top_k, top_p, **options), "restrict")
    drawn = np.asarray(drawn)
    wanted = distribution(LOGITS, temperature, top_k, top_p)
    counts = np.bincount(drawn, minlength=SIZE)
    assert not np.any(counts[wanted == 0])
    used = wanted > 0
    freedom = used.sum() - 1
    squares = np.sum((counts[used] - count * wanted[used]) ** 2 / (count * wanted[used]))
    # Chi-square: mean k, standard deviation sqrt(2 k); the seeds are fixed.
    assert squares < freedom + 5 * np.sqrt(2 * freedom) + 1e-9


def test_restrict_keeps_what_the_definition_keeps():
    rng = np.random.default_rng(0)
    count = 400
    logits = rng.normal(scale=3.0, size=(count, SIZE)).astype(np.float32)
    top_k = rng.integers(0, SIZE + 3, count)
    top_p = np.where(rng.random(count) < 0.2, 1.0, rng.uniform(0.01, 0.99, count))
    options = jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32)
    kept = np.asarray(jax.jit(restrict)(jnp.asarray(logits), *options))
    for row in range(count):
        wanted = distribution(logits[row], 1.0, int(top_k[row]), float(np.float32(top_p[row]))) > 0
        assert np.array_equal(np.isfinite(kept[row]), wanted), row
        assert np.array_equal(kept[row][wanted], logits[row][wanted])


def test_ties_with_the_last_are_kept():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 0.0]])
    k2 = restrict(logits, jnp.asarray([2]), jnp.asarray([1.0], jnp.float32))
    assert np.isfinite(np.asarray(k2)[0]).tolist() == [False, True, True, True, False]
    p = restrict(logits, jnp.asarray([0]), jnp.asarray([0.6], jnp.float32))
    assert np.isfinite(np.asarray(p)[0]).tolist() == [False, True, True, True, False]


def test_a_tiny_top_p_keeps_the_first():
    kept = restrict(jnp.asarray(LOGITS)[None], jnp.asarray([0]), jnp.asarray([1e-45], jnp.float32))
    assert np.isfinite(np.asarray(kept)[0]).sum() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_largest_logit_whatever_the_others_do(kind):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(6, SIZE)), jnp.float32)
    temperature = np.array([0, 1, 0, 1, 0, 0])
    mixed = np.asarray(sample(logits, rows(6, temperature), kind))
    largest = np.argmax(np.asarray(logits), axis=-1)
    assert np.array_equal(mixed[temperature == 0], largest[temperature == 0])
    assert np.array_equal(np.asarray(sample(logits, rows(6, 0.0), kind)), largest)


def test_a_draw_from_all_tokens_is_the_same_whatever_the_others_ask_for():
    rng = np.random.default_rng(4)
    count, size = 200, 500
    logits = jnp.asarray(rng.normal(scale=3.0, size=(count, size)), jnp.float32)
    temperature = rng.choice([0.0, 0.3, 1.0], count)
    restricted = rng.random(count) < 0.5
    options = temperature, np.where(restricted, 3, 0), np.where(restricted, 0.9, 1.0)
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


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "greedy"),
        ([Sampling(), Sampling(seed=3)], "greedy"),
        ([Sampling(), Sampling(temperature=0.5)], "draw"),
        ([Sampling(temperature=0.5), Sampling(temperature=0.5, top_k=4)], "restrict"),
        ([Sampling(temperature=0.5, top_p=0.9), Sampling()], "restrict"),
    ],
)
def test_the_kind_is_what_the_rows_need(options, wanted):
    assert kind_of(options) == wanted


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


def test_a_tiny_temperature_is_greedy():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, SIZE)), jnp.float32)
    tiny = float(np.finfo(np.float32).tiny)
    drawn = sample(logits, rows(64, tiny), "draw")
    assert np.array_equal(np.asarray(drawn), np.argmax(np.asarray(logits), axis=-1))


def test_a_row_depends_on_itself_alone():
    rng = np.random.default_rng(2)
    count = 16
    logits = jnp.asarray(rng.normal(size=(count, SIZE)), jnp.float32)
    temperature = rng.choice([0.0, 0.7, 1.3], count)
    top_k, top_p = rng.choice([0, 3], count), rng.choice([1.0, 0.8], count)
    index = rng.integers(0, 50, count)
    run = jax.jit(functools.partial(sample, kind="restrict"))
    together = np.asarray(run(logits, rows(count, temperature, top_k, top_p, None, index)))
    for row in range(count):
        options = (x[row : row + 1] for x in (temperature, top_k, top_p, np.arange(count), index))
        assert np.asarray(run(logits[row : row + 1], rows(1, *options)))[0] == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_gives_no_token(temperature, kind):
    logits = np.zeros((3, SIZE), np.float32)
    logits[1, 5] = np.nan
    logits[2, 5] = -np.inf
    drawn = np.asarray(sample(jnp.asarray(logits), rows(3, temperature), kind))
    assert drawn[1] == NOTHING
    assert np.all(drawn[[0, 2]] >= 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature=-1.0 must be 0, or positive"),
        ({"temperature": float("nan")}, ValueError, "temperature=nan must be 0, or positive"),
        ({"temperature": float("inf")}, ValueError, "temperature=inf must be 0, or positive"),
        ({"temperature": 1e39}, ValueError, "temperature=1e.39 must be 0, or positive"),
        ({"temperature": 1e-42}, ValueError, "temperature=1e-42 must be 0, or positive"),
        ({"temperature": "hot"}, TypeError, "temperature='hot' must be a number"),
        ({"temperature": None}, TypeError, "temperature=None must be a number"),
        ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k=0 must be at least 1"),
        ({"temperature": 1.0, "top_k": 1.5}, TypeError, "top_k=1.5 must be an integer"),
        ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p=0.0 must be above 0"),
        ({"temperature": 1.0, "top_p": 1.1}, ValueError, "top_p=1.1 must be above 0"),
        ({"temperature": 1.0, "top_p": True}, TypeError, "top_p=True must be a number"),
        ({"top_k": 3}, ValueError, "top_k=3 needs a temperature above 0"),
        ({"top_p": 0.5}, ValueError, "top_p=0.5 needs a temperature above 0"),
        ({"seed": -1}, ValueError, "seed=-1 must be within 0..2"),
        ({"seed": 2**32}, ValueError, "seed=4294967296 must be within 0..2"),
        ({"seed": 0.5}, TypeError, "seed=0.5 must be an integer"),
    ],
)
def test_sampling_refuses(options, error, message):
    with pytest.raises(error, match=message):
        Sampling(**options)


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
