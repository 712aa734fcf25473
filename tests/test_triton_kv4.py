"""The Triton kernel of `fireq.decode`, interpreted, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import lower_for_cuda
from test_kv4_decode import (
    OPTIONS,
    SHAPES,
    assert_matches_oracle,
    check_beyond_the_length,
    check_nan,
    decode,
    filled,
    normal,
    options_of,
)

from turbojax._device import interpret_kernels
from turbojax.cache import kv4
from turbojax.ops.kv4_attention import api, triton
from turbojax.ops.turbo_attention.masking import Visibility

# Weights are rounded to bfloat16, to the nearest.
WEIGHT_UNIT = 2.0**-8
run = functools.partial(decode, implementation="triton")
matches = functools.partial(assert_matches_oracle, weight_unit=WEIGHT_UNIT, call=run)


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_oracle(name):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    query = normal(3, (len(lengths), count, heads, dim))
    matches(query, filled(kv_heads, dim, lengths))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    query, cache, options = options_of(name)
    matches(query, cache, **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision(dtype):
    matches(normal(5, (2, 2, 4, 64), dtype), filled(2, 64, (90, 20), dtype))


@pytest.mark.parametrize("count", [1, 4])
def test_edges(count):
    """Nothing, one token, exactly one tile, one more, the allocation, many query heads."""
    cache = filled(1, 16, (0, 1, 64, 65, 128))
    query = normal(10, (5, count, 16, 16))
    matches(query, cache)


def test_what_is_not_finite_reaches_what_attends_to_it():
    check_nan(run)


def test_what_stands_beyond_the_length_is_not_seen():
    check_beyond_the_length(run)


def test_splits_do_not_matter(monkeypatch):
    """A program's tiles, few or many: weights are rounded relative to other maxima."""
    query, cache = normal(11, (2, 1, 4, 32)), filled(2, 32, (200, 90))
    for programs in (1, 8, 1000):
        monkeypatch.setattr(triton, "_ENOUGH_PROGRAMS", programs)
        triton._decode.clear_cache()
        matches(query, cache, call=functools.partial(api.decode, implementation="triton"))
    triton._decode.clear_cache()


def test_transforms():
    """Twice the same bits; vmap over layers and scan."""
    caches = [filled(2, 16, lengths, room=8) for lengths in ((20, 4), (20, 9))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    query = normal(9, (2, 2, 1, 4, 16))
    one = functools.partial(api.decode, implementation="triton")
    want = [one(q, c) for q, c in zip(query, caches, strict=True)]
    np.testing.assert_array_equal(one(query[0], caches[0]), want[0])
    want = jnp.stack(want)
    np.testing.assert_allclose(jax.vmap(one)(query, stacked), want, atol=1e-6)
    _, scanned = jax.lax.scan(lambda c, x: (c, one(*x)), None, (query, stacked))
    np.testing.assert_allclose(scanned, want, atol=1e-6)


REFUSED = {
    "rows": ((1, 5, 13, 8), "5 query tokens times 13 heads per KV head must be at most 64"),
    "head dim": ((1, 1, 1, 264), "head_dim=264 must be at most 256"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_in_words(name):
    """And what is asked for without a name runs in plain JAX."""
    shape, message = REFUSED[name]
    cache = kv4.init_cache(1, 10, 1, shape[3], dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=message):
        api.decode(jnp.zeros(shape), cache, implementation="triton")
    assert api.decode(jnp.zeros(shape), cache).shape == shape


LOWERED = {
    "Llama-3-8B": ((16, 1, 32, 128), {}),
    "several, window": ((2, 3, 8, 64), {"window": (100, 0)}),
    "head dim 96, soft cap": ((2, 2, 4, 96), {"cap": 5.0}),
    "head dim 256": ((1, 1, 16, 256), {}),
    "head dim 8": ((3, 8, 16, 8), {"window": (5, 5)}),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name):
    (batch, tokens, heads, dim), given = LOWERED[name]
    cache = jax.eval_shape(lambda: kv4.init_cache(batch, 4000, 2, dim))
    call = functools.partial(
        triton._decode,
        scale=0.1,
        visibility=Visibility(True, given.get("window")),
        logits_soft_cap=given.get("cap"),
        interpret=False,
    )
    query = jax.ShapeDtypeStruct((batch, tokens, heads, dim), jnp.bfloat16)
    text = lower_for_cuda(call, query, cache, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert "turbojax_kv4_decode" in text
    assert "turbojax_decode_merge" in text
