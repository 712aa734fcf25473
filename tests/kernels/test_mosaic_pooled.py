"""`implementation="mosaic_gpu"` of `pooled_attention` without a GPU: refusals, order, lowering.

What it computes is checked on a GPU, in `test_gpu_pooled.py`, and with products replaced, by
Pallas' interpreter, in `test_mosaic_interpreted.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic.hopper.pooled import pool as kernel
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes
from turbojax import _device
from turbojax.attention.pooled import api, mosaic_gpu, pooling
from turbojax.attention.pooled.operands import Backward
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.numerics import rows


def shapes(head_dim=128, dtype=jnp.bfloat16, tokens=1000, size=1003, block_q=128, block_kv=128):
    query = jax.ShapeDtypeStruct((2, tokens, 4, head_dim), dtype)
    key = jax.ShapeDtypeStruct((2, size, 2, head_dim), dtype)
    levels = (2, 4, -(-tokens // block_q), -(-size // block_kv))
    return query, key, key, jax.ShapeDtypeStruct(levels, jnp.int8)


def refusal(block_q=128, block_kv=128, **options):
    query, key, value, levels = shapes(block_q=block_q, block_kv=block_kv, **options)
    static = PooledOptions(True, scale=0.1, block_q=block_q, block_kv=block_kv)
    return mosaic_gpu.unsupported(query=query, key=key, value=value, levels=levels, options=static)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize(("block_q", "block_kv"), [(128, 128), (256, 64), (384, 128)])
def test_hopper_runs_it(dtype, head_dim, block_q, block_kv):
    assert refusal(block_q, block_kv, head_dim=head_dim, dtype=dtype) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": jnp.float32}, "query.dtype=float32 must be bfloat16 or float16"),
        ({"head_dim": 136}, "head_dim=136 must be at most 128"),
        ({"block_q": 64}, "block_q=64 must be a multiple of 128, its query tile"),
        ({"block_kv": 256}, "block_kv=256 must be one of (64, 128)"),
        ({"tokens": 2**22 + 1}, "32769 blocks of queries must be at most 32768"),
    ],
)
def test_refusals_in_words(options, words):
    assert refusal(**options) == words


def test_needs_hopper():
    assert "needs an NVIDIA GPU of compute capability 9.0" in refusal()
    with _device.interpret_kernels():
        assert refusal() == "its kernel cannot be interpreted"
    query, key, value, levels = (jnp.zeros(x.shape, x.dtype) for x in shapes())
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: needs an NVIDIA GPU"):
        tj.pooled_attention(query, key, value, levels, implementation="mosaic_gpu")


@pytest.mark.usefixtures("hopper")
def test_is_the_first_choice_on_hopper():
    query, key, value, levels = shapes()
    static = PooledOptions(False, scale=0.1, block_q=128, block_kv=128)
    arguments = {"query": query, "key": key, "value": value, "levels": levels, "options": static}
    for registry in (api.FORWARD, api.GRADIENT):
        assert registry.select(None, **arguments).name == "mosaic_gpu"
        wide = {**arguments, "query": jax.ShapeDtypeStruct((2, 1000, 4, 128), jnp.float32)}
        assert registry.select(None, **wide).name == "triton"


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("tokens", "block_q", "padded"),
    [(100, 256, 256), (300, 256, 512), (300, 128, 384), (5, 128, 128)],
)
def test_rows_of_the_gradient_fill_whole_blocks(tokens, block_q, padded, monkeypatch):
    """Keys' programs copy whole blocks of rows: beyond the end they would get the next head's."""
    asked, make = [], rows.gradient_rows

    def recorded(*arrays):
        asked.append(arrays[-1])
        return make(*arrays)

    monkeypatch.setattr(rows, "gradient_rows", recorded)
    query, key, value, levels = shapes(tokens=tokens, block_q=block_q)
    residual = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    static = PooledOptions(False, scale=0.1, block_q=block_q, block_kv=128)
    call = functools.partial(mosaic_gpu.gradient.__wrapped__, options=static)
    arrays = (query, key, value, levels, None, None, query, residual, query, residual)
    jax.eval_shape(call, Backward(*arrays))
    assert asked == [padded]


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("head_dim", "block_q", "block_kv", "scale", "is_causal", "with_lengths"),
    [
        (128, 256, 64, 0.1, True, True),
        (96, 128, 128, -0.1, False, False),
    ],
)
def test_lowers_for_cuda(head_dim, block_q, block_kv, scale, is_causal, with_lengths):
    """What lowers also fits into shared memory: the lowering counts it."""
    query, key, value, levels = shapes(head_dim=head_dim, block_q=block_q, block_kv=block_kv)
    length = jax.ShapeDtypeStruct((2,), jnp.int32) if with_lengths else None
    residual = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    static = PooledOptions(is_causal, scale=scale, block_q=block_q, block_kv=block_kv)
    arrays = (query, key, value, levels, length, length)
    forward = lower_for_cuda(mosaic_gpu.attention, *arrays, options=static)
    cotangents = (query, residual, query, residual)
    backward = lower_for_cuda(mosaic_gpu.gradient, Backward(*arrays, *cotangents), options=static)
    assert "turbojax_pooled_attention_hopper" in forward
    for name in ("query", "key"):
        assert f"turbojax_pooled_{name}_gradient_hopper" in backward


@pytest.mark.fuzz
@pytest.mark.parametrize(("block_kv", "out_dtype"), [(64, "float32"), (128, None)])
def test_modifiers_lower_for_cuda(block_kv, out_dtype):
    query, key, value, levels = shapes(block_kv=block_kv)
    modifiers = ScoreModifiers(
        query_offset=jax.ShapeDtypeStruct((2,), jnp.int32),
        query_segment_ids=jax.ShapeDtypeStruct(query.shape[:2], jnp.int32),
        key_value_segment_ids=jax.ShapeDtypeStruct(key.shape[:2], jnp.int32),
    )
    options = PooledOptions(True, scale=0.1, block_q=128, block_kv=block_kv, out_dtype=out_dtype)
    out = jax.ShapeDtypeStruct(query.shape, options.dtype_of_output(query))
    residual = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)

    def forward(*arrays):
        *arrays, modifiers = arrays
        return mosaic_gpu.attention(*arrays, None, None, modifiers=modifiers, options=options)

    def backward(*arrays):
        *arrays, modifiers = arrays
        given = Backward(*arrays[:4], None, None, *arrays[4:])
        return mosaic_gpu.gradient(given, modifiers=modifiers, options=options)

    arrays = (query, key, value, levels)
    assert "pooled_attention_hopper" in lower_for_cuda(forward, *arrays, modifiers)
    cotangents = (out, residual, out, residual)
    assert "key_gradient_hopper" in lower_for_cuda(backward, *arrays, *cotangents, modifiers)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["mosaic_gpu", "triton"])
def test_modifiers_that_no_kernel_has_are_refused_in_words(name):
    query, key, value, levels = shapes()
    static = PooledOptions(False, scale=0.1, block_q=128, block_kv=128)
    arguments = {"query": query, "key": key, "value": value, "levels": levels, "options": static}
    slopes = ScoreModifiers(alibi_slopes=jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(NotImplementedError, match=f"{name}: it has no alibi_slopes"):
        api.FORWARD.select(name, **arguments, modifiers=slopes)


EPS = float(np.finfo(np.float32).eps)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "size"), [(jnp.bfloat16, 64, 104), (jnp.float16, 128, 48)]
)
def test_means(monkeypatch, dtype, head_dim, size):
    """Sums of at most eight numbers, whatever the order, rounded once to the dtype."""
    lanes.patch(monkeypatch, kernel)
    length = jnp.array([size - 3, 45, 0], jnp.int32)
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(3, size, 2, head_dim)), dtype) for _ in range(2))
    there = (jnp.arange(size)[None] < length[:, None])[..., None, None]
    spoiled = (jnp.where(there, x, jnp.nan) for x in (key, value))
    sides = jax.jit(functools.partial(kernel.pool, multiple=64))(*spoiled, length)
    eps, tokens = float(jnp.finfo(dtype).eps), -(-size // 64) * 64
    for x, side in zip((key, value), sides, strict=True):
        for level, pooled in zip(LEVELS[1:], side, strict=True):
            want = np.asarray(jnp.swapaxes(pooling.pool(x, length, level), 1, 2), np.float32)
            assert pooled.shape == (3, 2, tokens // level, head_dim)
            got, groups = np.asarray(pooled, np.float32), want.shape[2]
            assert np.abs(got[:, :, :groups] - want).max() <= 8 * EPS + eps * np.abs(want).max()
            # Two tokens add up exactly, or round once.
            if level == 2:
                np.testing.assert_array_equal(got[:, :, :groups], want)
            assert not got[:, :, groups:].any()


def test_means_lower():
    x = jax.ShapeDtypeStruct((2, 1000, 3, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert kernel.NAME in lower_for_cuda(kernel.pool, x, x, lengths)
