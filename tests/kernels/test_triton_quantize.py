"""The kernels that quantize attention's operands: the bits of plain JAX, and lowering for a GPU."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.triton import _quantize
from pallas_kernels.triton.quantize import absolute_maxima, quantize
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import _device
from turbojax._device import interpret_kernels
from turbojax.attention.options import Options
from turbojax.attention.turbo import operands, triton
from turbojax.caches.progressive import append_triton
from turbojax.numerics import rounding

MODES = ("int8", "int8_fp8", "fp8")
# Batch, queries, keys, query heads, KV heads, head dim, block_q, block_kv, dtype.
CASES = {
    "one block": ((1, 16, 16, 1, 1, 64), 16, 16, jnp.float32),
    "head dim 80": ((2, 70, 45, 4, 2, 80), 32, 16, jnp.bfloat16),
    "head dim 96": ((3, 33, 130, 3, 3, 96), 64, 64, jnp.float16),
    "head dim 128": ((2, 130, 257, 4, 1, 128), 64, 128, jnp.bfloat16),
    "head dim 256": ((2, 20, 65, 2, 2, 256), 8, 32, jnp.bfloat16),
}


@contextlib.contextmanager
def kernels():
    """Interpreted on a CPU, compiled on a GPU."""
    with interpret_kernels() if jax.default_backend() != "gpu" else contextlib.nullcontext():
        yield


def tensors(case, seed=0):
    """Loud heads and channels, ragged lengths, the last of which may be 0."""
    (batch, t, s, heads, kv_heads, dim), *_, dtype = CASES[case]
    rng = np.random.default_rng(seed)

    def one(size, heads):
        loud = np.where(rng.random((heads, dim)) < 0.1, 5.0, 1.0)
        loud = loud * np.exp(rng.normal(size=(heads, 1)))
        return (rng.normal(size=(batch, size, heads, dim)) * loud).astype(dtype)

    lengths = [np.linspace(size, 0 if batch > 2 else 1, batch).astype(np.int32) for size in (t, s)]
    return one(t, heads), one(s, kv_heads), one(s, kv_heads), *lengths


def config_of(case, mode):
    _, block_q, block_kv, _ = CASES[case]
    return tj.TurboConfig(mode=mode, block_q=block_q, block_kv=block_kv, buffer_size=block_kv)


def expected(query, key, value, query_length, key_length, config, permuted=False):
    """By the definition's own functions, block by block."""

    def cut(x, length, block):
        valid = jnp.arange(x.shape[1])[None] < length[:, None]
        x = jnp.where(valid[..., None, None], x, jnp.zeros((), x.dtype)).swapaxes(1, 2)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))
        return x.reshape(*x.shape[:2], -1, block, x.shape[3])

    q = cut(query, query_length, config.block_q)
    k, v = (cut(x, key_length, config.block_kv) for x in (key, value))
    q, q_scale = rounding.quantize_scores_operand(q, config.mode, axis=(3, 4))
    k, k_scale = rounding.quantize_scores_operand(k, config.mode, axis=(3, 4))
    v, v_scale = rounding.quantize_values(v, config.mode)
    q, k, v = (x.reshape(*x.shape[:2], -1, x.shape[4]) for x in (q, k, v))
    if permuted:
        row = np.arange(k.shape[2])
        i, h, t, r = row // 16, row // 8 % 2, row // 2 % 4, row % 2
        k = k[:, :, 16 * i + 4 * t + 2 * h + r]
    return operands.Operands(q, q_scale, k, k_scale, v.mT, v_scale)


# As one program: one by one its operations take many times longer to compile.
definition = jax.jit(expected, static_argnums=(5, 6))


def assert_same(got, want):
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        np.testing.assert_array_equal(
            np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=name
        )


def run(arrays, config, **options):
    call = jax.jit(functools.partial(operands.quantize_operands, config=config, **options))
    with kernels():
        return call(*arrays)


# Bits; the same tests run compiled on a GPU ------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("head dim 80", "int8"),
        ("one block", "int8_fp8"),
        ("head dim 96", "fp8"),
        ("head dim 128", "int8"),
        ("head dim 256", "int8_fp8"),
        ("head dim 80", "fp8"),
    ],
)
def test_bits(case, mode):
    arrays, config = tensors(case), config_of(case, mode)
    permuted = mode != "int8_fp8"
    got = run(arrays, config, permuted=permuted)
    assert_same(got, definition(*arrays, config, permuted))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("mode", "bad"), [("int8", jnp.nan), ("int8_fp8", jnp.inf), ("fp8", -jnp.inf)], ids=str
)
def test_values_that_are_not_finite(mode, bad):
    """They reach their block's scale (in e4m3 values, their head's), and not from padding."""
    query, key, value, query_length, key_length = tensors("head dim 80")
    query[0, 3, 1, 79] = query[1, 60:] = bad
    key[0, 44, 1, 0] = bad
    value[0, 17, 0, 5] = value[1, 40:] = bad
    arrays = query, key, value, query_length, key_length
    config = config_of("head dim 80", mode)
    got = run(arrays, config)
    assert_same(got, definition(*arrays, config))
    assert np.isnan(got.q_scale).sum() == 1
    assert np.isnan(got.k_scale).sum() == 1
    assert np.isnan(got.v_scale).sum() == (1 if mode == "int8" else got.v_scale.shape[2])


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODES)
def test_numbers_at_the_ends_of_the_range(mode):
    """Zeros, subnormal numbers, the largest ones, each in a head of its own."""
    config = tj.TurboConfig(mode=mode, block_q=16, block_kv=16, buffer_size=16)
    rng = np.random.default_rng(1)
    factor = np.array([0.0, 1e-40, 1e-36, 3e38])[:, None]
    query, key, value = (
        (np.clip(rng.normal(size=(1, 40, 4, 64)), -1, 1) * factor).astype(np.float32)
        for _ in range(3)
    )
    lengths = jnp.array([37], jnp.int32)
    arrays = query, key, value, lengths, lengths
    assert_same(run(arrays, config), definition(*arrays, config))


@pytest.mark.slow
def test_maxima_of_many_blocks_are_reduced_first():
    """More maxima than every program may read, one of them NaN in one head."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 16 * 150, 2, 8)), jnp.float32)
    x = x.at[0, 1111, 1, 3].set(jnp.nan)
    lengths = jnp.array([2390], jnp.int32)
    with kernels():
        interpret = _device.interpreting()
        parts = absolute_maxima(x, lengths, interpret=interpret)
        finer = np.abs(x[:, :2390]).reshape(1, 239, 10, 2, 8).max(axis=(2, 4)).swapaxes(1, 2)
        assert parts.shape[2] <= 128 < finer.shape[2]
        options = {"block": 16, "dtype": jnp.float8_e4m3fn, "interpret": interpret}
        got, want = (quantize(x, lengths, jnp.asarray(m), **options) for m in (parts, finer))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))
    assert np.isnan(got[1][0, 1]).all()
    np.testing.assert_array_equal(parts[0, 0].max(), jnp.abs(x[0, :2390, 0]).max())


def test_the_kernels_permute_like_plain_jax():
    """Row ``16i + 8h + 2t + r`` is token ``16i + 4t + 2h + r``."""
    tokens = jnp.arange(48, dtype=jnp.int32)
    want = operands.permute_tokens(tokens[None, None, :, None])[0, 0, :, 0]
    assert want[:16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    rows = _quantize.permuted_positions(jnp.int32(0), 48)
    np.testing.assert_array_equal(jnp.zeros_like(tokens).at[rows].set(tokens), want)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("mode", "permuted"),
    [("int8", True), ("fp8", True), ("int8_fp8", False)],
)
def test_a_prompt_that_is_stored_gives_the_same_operands(mode, permuted):
    """From the pass that compresses, for blocks that the cache has no room for too."""
    _, key, value, _, lengths = tensors("head dim 80")
    value[1, 0, 1, 0] = np.inf
    config = config_of("head dim 80", mode)
    cache = tj.init_cache(2, 20, 2, 80, config=config)
    with kernels():
        _, got = append_triton.store_prompt_with_operands(
            cache, key, value, lengths, with_operands=True, permuted=permuted
        )
    want = definition(key, key, value, lengths, lengths, config, permuted)
    assert_same(operands.Operands(*want[:2], *got), want)


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("mode", MODES)
def test_more_padding_changes_nothing(mode):
    """An odd number of blocks rounded up to an even one, by kernels and in plain JAX."""
    _, key, value, _, length = tensors("head dim 80")
    config = tj.TurboConfig(mode=mode, block_kv=16, buffer_size=16)
    key, value = key[:, :40], value[:, :40]
    length = jnp.minimum(length, 40)
    quantized = functools.partial(
        operands.quantize_keys_and_values, key, value, length, config, permuted=True
    )
    with kernels():
        want, got = quantized(), quantized(multiple=32)
    for plain in (got, quantized(multiple=32)):
        for axis, a, b in zip((2, 2, 3, 2), plain, want, strict=True):
            size = b.shape[axis]
            assert a.shape[axis] == {48: 64, 3: 4}[size]
            start, rest = (
                np.asarray(x, np.float32) for x in jnp.split(a.astype(jnp.float32), [size], axis)
            )
            np.testing.assert_array_equal(start, np.asarray(b, np.float32))
            # Zeros; and scales: 1, or in e4m3 the head's.
            assert (rest == 0).all() or a.ndim == 3


@pytest.mark.slow
@pytest.mark.optimized
def test_bits_under_vmap():
    arrays = [np.stack([x, x[::-1]]) for x in tensors("head dim 80")]
    config = config_of("head dim 80", "int8_fp8")
    call = functools.partial(operands.quantize_operands, config=config)
    with kernels():
        got = jax.jit(jax.vmap(call))(*arrays)
    for i in range(2):
        part = [x[i] for x in arrays]
        assert_same(operands.Operands(*(x[i] for x in got)), definition(*part, config))


# The choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({"mode": "float"}, (1, 64, 2, 64), "rounds nothing"),
        ({"block_kv": 24, "buffer_size": 24}, (1, 64, 2, 64), "block=24 must be a power of two"),
        ({"block_kv": 512, "buffer_size": 512}, (1, 64, 2, 64), "power of two up to 256"),
        ({}, (1, 64, 2, 264), "head_dim=264 must be at most 256"),
        ({}, (1, 64 * 2**16, 1, 8), "65536 blocks must be at most 65535"),
        ({}, (64, 2**18 + 64, 1, 128), "cannot be indexed"),
    ],
)
def test_what_kernels_leave_to_plain_jax(options, shape, words):
    config = tj.TurboConfig(**options)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with interpret_kernels():
        assert words in operands._kernels_unsupported(x, config.block_kv, config)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about a machine without a GPU")
def test_without_a_gpu_plain_jax_gives_the_same():
    arrays = tensors("head dim 80")
    for mode in MODES:
        config = config_of("head dim 80", mode)
        call = functools.partial(operands.quantize_operands, config=config, permuted=True)
        got = jax.jit(call)(*arrays)
        assert_same(got, definition(*arrays, config, True))


# Lowering ----------------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("dim", "mode"), [(128, "int8"), (8, "fp8"), (80, "int8_fp8"), (256, "fp8")]
)
def test_attention_lowers_with_its_quantization(monkeypatch, mode, dim):
    """The whole call as a GPU gets it, of another kind than Hopper."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 8.9)
    call = functools.partial(
        triton.attention.__wrapped__,
        config=tj.TurboConfig(mode=mode),
        options=Options(True, scale=0.1),
    )
    query, key = (jax.ShapeDtypeStruct((2, 200, n, dim), jnp.bfloat16) for n in (4, 2))
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(call, query, key, key, length, length)
    assert text.count("turbojax_quantize") >= 3
    assert ("turbojax_maxima" in text) == (mode != "int8")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("dim", "mode"), [(96, "int8"), (128, "int8_fp8"), (96, "fp8")])
def test_a_permuted_prompt_lowers(mode, dim):
    config = tj.TurboConfig(mode=mode, first_tokens=0)  # whose codes are attention's, too
    cache = jax.eval_shape(lambda: tj.init_cache(2, 1024, 4, dim, config=config))
    x = jax.ShapeDtypeStruct((2, 300, 4, dim), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    options = {"with_operands": True, "permuted": True}
    store = functools.partial(append_triton.store_prompt_with_operands, **options)
    text = lower_for_cuda(store, cache, x, x, lengths)
    assert "turbojax_compress" in text
    assert ("turbojax_quantize" in text) == (mode != "int8")
