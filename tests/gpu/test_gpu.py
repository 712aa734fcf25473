"""On a GPU the stored bits are those of a CPU: division there is approximate, and XLA fuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.caches.cache_helpers import (
    CONFIGS,
    append_jit,
    assert_holds,
    new,
    oracle_for,
    prefill,
    tokens,
)
from turbojax import quantizers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_stage_1_equals_the_oracle(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(500, 64, 64)), dtype)
    codes, scale = jax.jit(quantizers.quantize_int8, static_argnames="axis")(x, axis=(1, 2))
    want_codes, want_scale = oracles.quantize_int8(np.asarray(x), (1, 2))
    np.testing.assert_array_equal(scale, want_scale)
    np.testing.assert_array_equal(codes, want_codes)


def test_e4m3_is_rounded_although_it_is_converted_back():
    x = jnp.asarray(np.random.default_rng(1).uniform(-448, 448, 10_000), jnp.float32)
    back = jax.jit(lambda x: quantizers.round_to_e4m3(x).astype(jnp.float32))(x)
    np.testing.assert_array_equal(back, oracles.e4m3(np.asarray(x)).astype(np.float32))


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_holds_what_the_oracle_holds_in_any_split(name):
    key, value = tokens(70, seed=3)
    new_key, new_value = tokens(25, seed=4)
    start = prefill(new(CONFIGS[name]), key, value, (70, 33, 5))
    at_once = append_jit(start, new_key, new_value)
    oracle = oracle_for(start)
    oracle.prefill(key, value, (70, 33, 5))
    oracle.append(new_key, new_value)
    assert_holds(at_once, oracle)
    one_by_one = start
    for t in range(25):
        one_by_one = append_jit(one_by_one, new_key[:, t : t + 1], new_value[:, t : t + 1])
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(one_by_one), strict=True):
        np.testing.assert_array_equal(a, b)
