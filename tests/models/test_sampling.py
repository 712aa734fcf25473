"""Choosing tokens from logits, against float64 distributions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.sampling_helpers import KINDS, SIZE, distribution, rows
from turbojax.models.generation.sampling import (
    NOTHING,
    Sampling,
    kind_of,
    restrict,
    sample,
    sampling_rows,
)

LOGITS = np.random.default_rng(3).normal(scale=1.5, size=SIZE).astype(np.float32)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (1.7, 4, 1.0, 0.0),
        (2.0, 5, 0.7, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.7, 6, 0.9, 0.2),
    ],
)
@pytest.mark.parametrize("by", ["seed", "index"])
def test_tokens_follow_the_distribution(temperature, top_k, top_p, min_p, by):
    count = 20_000
    numbers = np.arange(count)
    options = {"seed": numbers, "index": 3} if by == "seed" else {"seed": 5, "index": numbers}
    logits = jnp.broadcast_to(jnp.asarray(LOGITS)[None], (count, SIZE))
    drawn = sample(logits, rows(count, temperature, top_k, top_p, min_p, **options), "restrict")
    drawn = np.asarray(drawn)
    wanted = distribution(LOGITS, temperature, top_k, top_p, min_p)
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
    min_p = np.where(rng.random(count) < 0.3, 0.0, rng.uniform(0.0, 1.0, count))
    floats = (jnp.asarray(x, jnp.float32) for x in (top_p, min_p))
    options = jnp.asarray(top_k, jnp.int32), *floats
    kept = np.asarray(jax.jit(restrict)(jnp.asarray(logits), *options))
    for row in range(count):
        shares = (float(np.float32(x[row])) for x in (top_p, min_p))
        wanted = distribution(logits[row], 1.0, int(top_k[row]), *shares) > 0
        assert np.array_equal(np.isfinite(kept[row]), wanted), row
        assert np.array_equal(kept[row][wanted], logits[row][wanted])


def test_ties_with_the_last_are_kept():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 0.0]])
    zero, one = jnp.zeros(1), jnp.ones(1)
    k2 = restrict(logits, jnp.asarray([2]), one, zero)
    assert np.isfinite(np.asarray(k2)[0]).tolist() == [False, True, True, True, False]
    p = restrict(logits, jnp.asarray([0]), jnp.asarray([0.6], jnp.float32), zero)
    assert np.isfinite(np.asarray(p)[0]).tolist() == [False, True, True, True, False]
    # exp(-1) is between the two.
    for min_p, kept in (
        (0.3, [False, True, True, True, False]),
        (0.4, [False, True] + 3 * [False]),
    ):
        m = restrict(logits, jnp.asarray([0]), one, jnp.asarray([min_p], jnp.float32))
        assert np.isfinite(np.asarray(m)[0]).tolist() == kept


def test_min_p_of_one_keeps_the_most_likely_and_of_zero_everything():
    logits = jnp.asarray([[1.0, 3.0, 3.0, -jnp.inf, 0.0]])
    for min_p, kept in ((1.0, [1, 2]), (0.0, [0, 1, 2, 4])):
        m = restrict(logits, jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.full(1, min_p))
        assert np.flatnonzero(np.isfinite(np.asarray(m)[0])).tolist() == kept


@pytest.mark.slow
def test_min_p_looks_at_what_temperature_makes_of_the_logits():
    logits = jnp.broadcast_to(jnp.asarray([0.0, -1.0]), (500, 2))
    for temperature, kept in ((0.5, {0}), (2.0, {0, 1})):
        # exp(-1 / T) is 0.14 and 0.61.
        drawn = sample(logits, rows(500, temperature, min_p=0.3), "restrict")
        assert set(np.asarray(drawn).tolist()) == kept


def test_a_tiny_top_p_keeps_the_first():
    tiny = jnp.asarray([1e-45], jnp.float32)
    kept = restrict(jnp.asarray(LOGITS)[None], jnp.asarray([0]), tiny, jnp.zeros(1))
    assert np.isfinite(np.asarray(kept)[0]).sum() == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_largest_logit_whatever_the_others_do(kind):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(6, SIZE)), jnp.float32)
    temperature = np.array([0, 1, 0, 1, 0, 0])
    mixed = np.asarray(sample(logits, rows(6, temperature), kind))
    largest = np.argmax(np.asarray(logits), axis=-1)
    assert np.array_equal(mixed[temperature == 0], largest[temperature == 0])
    assert np.array_equal(np.asarray(sample(logits, rows(6, 0.0), kind)), largest)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "greedy"),
        ([Sampling(), Sampling(seed=3)], "greedy"),
        ([Sampling(), Sampling(temperature=0.5)], "draw"),
        ([Sampling(temperature=0.5), Sampling(temperature=0.5, top_k=4)], "restrict"),
        ([Sampling(temperature=0.5, top_p=0.9), Sampling()], "restrict"),
        ([Sampling(temperature=0.5, min_p=0.1)], "restrict"),
    ],
)
def test_the_kind_is_what_the_rows_need(options, wanted):
    assert kind_of(options) == wanted


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
    min_p, index = rng.choice([0.0, 0.1], count), rng.integers(0, 50, count)
    run = jax.jit(functools.partial(sample, kind="restrict"))
    together = np.asarray(run(logits, rows(count, temperature, top_k, top_p, min_p, None, index)))
    for row in range(count):
        every = temperature, top_k, top_p, min_p, np.arange(count), index
        options = (x[row : row + 1] for x in every)
        assert np.asarray(run(logits[row : row + 1], rows(1, *options)))[0] == together[row]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_nothing_but_minus_infinity_give_no_token(temperature, kind):
    logits = np.zeros((4, SIZE), np.float32)
    logits[1, 5] = np.nan
    logits[2, 5] = -np.inf
    logits[3] = -np.inf
    drawn = np.asarray(sample(jnp.asarray(logits), rows(4, temperature), kind))
    assert drawn[[1, 3]].tolist() == [NOTHING] * 2
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
        ({"temperature": 1.0, "min_p": -0.1}, ValueError, "min_p=-0.1 must be within 0..1"),
        ({"temperature": 1.0, "min_p": 1.5}, ValueError, "min_p=1.5 must be within 0..1"),
        ({"temperature": 1.0, "min_p": float("nan")}, ValueError, "min_p=nan must be within 0..1"),
        ({"temperature": 1.0, "min_p": "a"}, TypeError, "min_p='a' must be a number"),
        ({"min_p": 0.1}, ValueError, "min_p=0.1 needs a temperature above 0"),
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


def test_rows_hold_what_the_options_say():
    options = [Sampling(), Sampling(0.5, 3, 0.9, 0.1, 7), Sampling(2.0, 10**12)]
    made = sampling_rows(options, index=4)
    assert made.temperature.tolist() == [0.0, 0.5, 2.0]
    assert made.top_k.tolist() == [0, 3, 2**31 - 1]
    np.testing.assert_allclose(made.top_p, [1.0, 0.9, 1.0], rtol=1e-7)
    np.testing.assert_allclose(made.min_p, [0.0, 0.1, 0.0], rtol=1e-7)
    assert made.seed.tolist() == [0, 7, 0]
    assert made.index.tolist() == [4, 4, 4]
    dtypes = [x.dtype.name for x in jax.tree.leaves(made)]
    assert dtypes == ["float32", "int32", "float32", "float32", "uint32", "int32"]


def test_numbers_of_numpy_become_those_of_python():
    given = Sampling(
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        top_p=np.float64(0.5),
        min_p=np.float16(0.25),
        seed=np.int32(5),
    )
    assert given == Sampling(0.5, 3, 0.5, 0.25, 5)
    kinds = [type(getattr(given, x)) for x in ("temperature", "top_k", "top_p", "min_p", "seed")]
    assert kinds == [float, int, float, float, int]
    assert (given.seed + 1) % 2**32 == 6  # int32 does not hold 2 ** 32


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_logit_of_infinity_is_the_token(options):
    logits = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    logits[:, 17] = np.inf
    for temperature in (0.0, 1.0):
        chosen = Sampling(temperature, **(options if temperature else {}))
        held = sampling_rows([dataclasses.replace(chosen, seed=i) for i in range(8)])
        got = sample(jnp.asarray(logits), held, kind_of([chosen]))
        np.testing.assert_array_equal(got, np.full(8, 17))
