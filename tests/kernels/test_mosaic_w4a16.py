"""Products of INT4 weights and unrounded tokens on Hopper without a GPU.

The kernel for few tokens is emulated lane by lane. Of that for more tokens the register operand is,
and the whole is lowered; what it computes is checked in `test_gpu_int4.py`.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.matmul import epilogue, w4a16_few
from pallas_kernels.mosaic.products import int4_half
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.int4_helpers import (
    abstract_weight,
    assert_equals_oracle,
    random_epilogue,
    random_floats,
    stored_bias,
    weight_of,
)
from tests.oracles import int4 as oracle
from tests.oracles import lanes as emulated
from tests.oracles import warp
from turbojax.matmul.int4 import mosaic_gpu, w4a16_mosaic
from turbojax.matmul.int4.w4a16_mosaic import FewLaunch, Launch

SHARED_BYTES = 227 * 1024
KINDS = ("e4m3", "bf16", "f16", "zeros")


# Few tokens ---------------------------------------------------------------------------------------


@pytest.fixture
def on_lanes(monkeypatch):
    emulated.patch(monkeypatch, w4a16_few, epilogue, int4_half)


# Tokens, outputs, inputs; scales, or zeros too; activation; dtype; launch.
FEW = [
    ((3, 70, 300), "zeros", None, jnp.bfloat16, (3, 1, 2)),
    ((9, 24, 640), "bf16", "swiglu", jnp.float16, (2, 1, 5)),
    ((1, 130, 130), "e4m3", "silu", jnp.bfloat16, (7, 1, 3)),
    ((8, 64, 1100), "f16", "gelu", jnp.bfloat16, (5, 2, 3)),
    ((2, 24, 256), "e4m3", "swiglu", jnp.float16, (4, 1, 4)),
    ((17, 40, 128), "zeros", None, jnp.float16, (1, 1, 2)),
]


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("case", FEW)
def test_few_tokens(case):
    """Strips that programs do not share evenly, warps without inputs, tokens that do not exist."""
    (count, out_size, in_size), kind, activation, dtype, launch = case
    rng = np.random.default_rng(0)
    weight = weight_of(rng, out_size, in_size, kind, gated=activation == "swiglu")
    x = random_floats(rng, count, in_size, dtype)
    bias, residual = random_epilogue(rng, count, weight, dtype)
    rows = stored_bias(bias, weight)
    call = functools.partial(w4a16_mosaic.matmul.__wrapped__, launch=FewLaunch(*launch))
    got = call(x, weight, rows, residual, activation=activation)
    assert_equals_oracle(got, x, weight, bias, residual, activation)
    alone = call(x[:1], weight, rows, residual[:1], activation=activation)
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(got[:1]))


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_scale_and_code_in_e4m3(dtype):
    """All values of all groups there can be."""
    for bits in range(128):
        byte = warp.integer(bits)
        word, factor = int4_half.e4m3_scale(byte, dtype)
        if bits == 127:
            assert np.isnan(factor.value).all()
            continue
        assert (factor.value == 1).all()
        # Codes 0 to 15 of eight lanes as pairs.
        pairs = warp.Int((np.arange(32) % 16) | ((np.arange(32) % 16) << 16))
        got = int4_half.round_to_e4m3(pairs, word, dtype)
        kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
        numbers = got.value[:16, None].view(kind).astype(np.float64)
        nibbles = np.arange(16)
        want = oracle.e4m3(oracle.E4M3[bits] * np.where(nibbles > 7, nibbles - 16, nibbles))
        np.testing.assert_array_equal(numbers, np.stack([want, want], 1))


# The register operand of more tokens --------------------------------------------------------------


class Memory(warp.Pointer):
    """Shared memory of a reference."""

    @classmethod
    def to(cls, array):
        return warp.Pointer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def fragment(words):
    """The ``[16, 128]`` numbers that a warp's instructions of 16 inputs read from registers.

    Lane ``4 g + t`` has in its four words rows `g` and ``g + 8`` at inputs ``2 t``, then both at
    ``8 + 2 t``, and the one after each (PTX, fragments of ``wgmma.mma_async.m64nNk16``).
    """
    out = np.zeros((16, 128))
    g, t = np.arange(32) // 4, np.arange(32) % 4
    for u, four in enumerate(words):
        for i, pair in enumerate(four):
            for k in range(2):
                out[g + 8 * (i % 2), 16 * u + 8 * (i // 2) + 2 * t + k] = pair[:, k]
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["zeros", "bf16", "e4m3"])
def test_register_operand(kind, dtype, monkeypatch):
    """Inputs in the order in which tokens lie, scales beside them or, in e4m3, within."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (64, 128))
    zeros = rng.integers(-8, 9, 64).astype(np.int8) if kind == "zeros" else None
    scales = rng.normal(size=64).astype(np.float16)
    name, want = "float16", codes - (0 if zeros is None else zeros[:, None].astype(int))
    if kind == "bf16":
        name, scales = "bfloat16", scales.astype(ml_dtypes.bfloat16)
    if kind == "e4m3":
        name, scales = "e4m3", rng.permutation(127)[:64].astype(np.uint8)
        want = oracle.e4m3(oracle.E4M3[scales, None] * codes)
    monkeypatch.setattr(int4_half, "lane", warp)
    monkeypatch.setattr(int4_half, "Pointer", Memory)
    monkeypatch.setattr(warp, "scalar", warp.integer, raising=False)
    view = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    for number in range(4):
        row, t = warp.Int(16 * number + np.arange(32) // 4), warp.Int(np.arange(32) % 4)
        place = (row, t)
        monkeypatch.setattr(int4_half.fragments, "row_and_place", lambda place=place: place)
        words, factors = int4_half.load(oracle.pack(codes), scales, zeros, 0, dtype, name)
        numbers = [[x.value[:, None].view(view).astype(np.float64) for x in four] for four in words]
        rows = slice(16 * number, 16 * number + 16)
        np.testing.assert_array_equal(fragment(numbers), want[rows])
        for half, factor in enumerate(factors):
            own = row.value + 8 * half
            exact = np.ones(32) if kind == "e4m3" else scales[own].astype(np.float32)
            np.testing.assert_array_equal(factor.value, exact)


# Launches and lowering ----------------------------------------------------------------------------


def specification(rows, outputs, inputs, kind="zeros", *, gated=False, dtype=jnp.bfloat16):
    """Tokens and a weight that are shapes alone."""
    scales = {"scales": "f16", "has_zeros": True} if kind == "zeros" else {"scales": kind}
    weight = abstract_weight(outputs, inputs, gated=gated, **scales)
    return jax.ShapeDtypeStruct((rows, inputs), dtype), weight


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_is_taken_on_hopper(kind):
    x, weight = specification(5, 75, 300, kind)
    rest = dict.fromkeys(("bias", "residual", "activation"))
    assert mosaic_gpu.unsupported(tokens=x, weight=weight, **rest) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (70, 520), (4096, 4096), (14336, 4096), (28672, 8192)])
def test_launches(shape, kind):
    """Of every number of tokens: memory suffices, and nobody is without work."""
    for rows in (1, 8, 9, 16, 17, 64, 65, 128, 129, 300, 4097):
        _, weight = specification(rows, *shape, kind)
        launch = w4a16_mosaic.default_launch(rows, weight)
        stored, inputs = weight.padded_shape
        if isinstance(launch, FewLaunch):
            settings = w4a16_few.Settings(*launch, w4a16_few.Epilogue(None, 0, 0, "bfloat16", 0))
            assert settings.shared_bytes(-(-rows // 8)) <= SHARED_BYTES
            assert launch.strips * 16 <= stored + 15 * 7
        else:
            assert launch.stages >= 2
            assert launch.parts == 1 or inputs // 128 >= 4 * launch.parts


# Tokens, outputs, inputs; scales; activation; a word for each of bias, residual, float16.
LOWERED = [
    (1, 4096, 4096, "zeros", None, ""),
    (16, 75, 300, "bf16", "swiglu", "bias residual"),
    (9, 200, 520, "e4m3", "silu", "bias float16"),
    (33, 1030, 1000, "zeros", "gelu", "residual float16"),
    (64, 6144, 4096, "zeros", None, ""),
    (65, 200, 300, "e4m3", "silu", "bias residual float16"),
    (300, 64, 300, "zeros", "swiglu", "bias residual"),
    (4097, 4096, 14336, "f16", None, "residual"),
]


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("case", LOWERED[1::2] + LOWERED[::2])
def test_lowers_for_cuda(case):
    """What lowers also fits into shared memory: the lowering counts it."""
    *shape, kind, activation, words = case
    dtype = jnp.float16 if "float16" in words else jnp.bfloat16
    x, weight = specification(*shape, kind, gated=activation == "swiglu", dtype=dtype)
    bias = weight.output_scale if "bias" in words else None
    residual = jax.ShapeDtypeStruct((shape[0], weight.result_size), dtype)
    residual = residual if "residual" in words else None
    call = functools.partial(mosaic_gpu.matmul, activation=activation, is_precise=False)
    text = lower_for_cuda(call, x, weight, bias, residual)
    is_many = isinstance(w4a16_mosaic.default_launch(shape[0], weight), Launch)
    assert ("turbojax_w4a16_hopper" in text) == is_many
    assert ("turbojax_w4a16_few_hopper" in text) == (not is_many)
