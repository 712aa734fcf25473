"""`int4_matmul` through Triton: interpreted against the oracle, refusals, lowering for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.triton import _e4m3
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.int4_helpers import (
    assert_equals_oracle,
    random_epilogue,
    random_tokens,
    random_weight,
    specification,
    stored_bias,
    wide,
)
from tests.oracles import int4 as oracle
from turbojax._device import interpret_kernels
from turbojax.matmul.int4 import matmul, triton
from turbojax.matmul.int4 import weight as int4
from turbojax.matmul.int4.api import MATMUL
from turbojax.quantizers import Fp8Tokens


def run(x, weight, bias=None, residual=None, activation=None, **launch):
    """The kernel, interpreted, with other launch settings if any are given."""
    settings = triton._launch(x.codes.shape[0], weight, activation)
    settings = dataclasses.replace(settings, interpret=True, **launch)
    return triton._matmul(x, weight, stored_bias(bias, weight), residual, launch=settings)


def operands(shape, scale_dtype, activation, dtype=jnp.bfloat16, seed=0):
    count, out_size, in_size = shape
    rng = np.random.default_rng(seed)
    weight = random_weight(
        rng, out_size, in_size, scale_dtype, gated=activation in ("swiglu", "geglu")
    )
    tokens = random_tokens(rng, count, in_size, dtype)
    return tokens, weight, *random_epilogue(rng, count, weight, dtype)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("dtype", "has_bias"), [(jnp.float16, False), (jnp.float32, True)])
def test_dtypes_without_a_part_of_the_epilogue(dtype, has_bias):
    tokens, weight, bias, residual = operands((9, 40, 200), "e4m3", None, dtype)
    arrays = (tokens, weight, bias, None) if has_bias else (tokens, weight, None, residual)
    assert_equals_oracle(run(*arrays), *arrays, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "scale_dtype", "activation"),
    [(2, "e4m3", "geglu"), (3, "bf16", "gelu")],
)
def test_programs_that_share_a_tile(splits, scale_dtype, activation):
    """Of 5 groups the last program gets one, or two."""
    arrays = operands((20, 70, 600), scale_dtype, activation, jnp.float32)
    got = run(*arrays, activation, splits=splits)
    assert_equals_oracle(got, *arrays, activation)


@pytest.mark.slow
def test_tiles_in_bands():
    """More tiles of tokens than stand next to each other: each is computed, and once."""
    arrays = operands((170, 130, 128), "e4m3", None)
    got = run(*arrays, tokens=16, outputs=32)  # 11 times 5 tiles, bands of 8 and of 3
    assert_equals_oracle(got, *arrays, None)
    np.testing.assert_array_equal(wide(got), wide(run(*arrays)))


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize(
    ("scale_dtype", "activation", "splits"),
    [("e4m3", None, 1), ("bf16", "swiglu", 2)],
)
def test_nan_reaches_its_token_and_its_output(scale_dtype, activation, splits):
    tokens, weight, *_ = operands((6, 20, 300), scale_dtype, activation, jnp.float32)
    tokens = dataclasses.replace(tokens, scale=tokens.scale.at[2].set(jnp.nan))
    weight = dataclasses.replace(weight, scales=weight.scales.at[0, 1, 9].set(jnp.nan))
    got = np.isnan(run(tokens, weight, activation=activation, splits=splits))
    want = np.zeros_like(got)
    want[2], want[:, 1 if activation else 9] = True, True  # row 9 is the second row of `up`
    np.testing.assert_array_equal(got, want)


def test_a_code_that_is_nan_reaches_its_token():
    tokens, weight, *_ = operands((4, 20, 300), "e4m3", None)
    tokens = dataclasses.replace(tokens, codes=tokens.codes.at[1, 299].set(jnp.nan))
    got = np.isnan(wide(run(tokens, weight)))
    assert got[1].all()
    assert not got[[0, 2, 3]].any()


def test_the_largest_values_saturate():
    """Scales beyond the quantizer's: -8 and 7 times 64, and times 448, are 448 in size."""
    tokens, weight, *_ = operands((3, 64, 128), "e4m3", None, jnp.float32)
    scales = jnp.full_like(weight.scales, 64).at[..., 1::2].set(448)
    weight = dataclasses.replace(weight, scales=scales)
    assert_equals_oracle(run(tokens, weight), tokens, weight, None, None, None)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_outputs_are_those_of_each_input(scale_dtype):
    """One hot tokens pick the weights out one by one: the order of inputs, and every value."""
    rng = np.random.default_rng(1)
    weight = random_weight(rng, 64, 250, scale_dtype)
    ones = jnp.eye(250, dtype=jnp.float32)
    tokens = Fp8Tokens(
        ones.astype(jnp.float8_e4m3fn), jnp.ones(250, jnp.bfloat16), np.dtype(np.float32)
    )
    np.testing.assert_array_equal(run(tokens, weight).T, int4.dequantize(weight))


@pytest.mark.slow
def test_the_public_function_runs_it():
    """By name, with leading axes, under `jit`; and it is not chosen silently."""
    rng, activation = np.random.default_rng(2), "swiglu"
    weight = random_weight(rng, 40, 200, "e4m3", gated=True)
    x = jnp.asarray(rng.normal(size=(2, 3, 200)), jnp.bfloat16)
    bias, residual = random_epilogue(rng, 6, weight, x.dtype)
    residual = residual.reshape(2, 3, -1)
    options = {"bias": bias, "residual": residual, "activation": activation}
    call = jax.jit(functools.partial(matmul, activation=activation, implementation="triton"))
    with interpret_kernels():
        got = call(x, weight, bias=bias, residual=residual)
    want = matmul(x, weight, implementation="xla", **options)
    # Both round once to bfloat16.
    np.testing.assert_allclose(wide(got), wide(want), rtol=2**-7, atol=1e-4)
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="triton: needs an NVIDIA GPU"):
            matmul(x, weight, implementation="triton", **options)
        np.testing.assert_array_equal(wide(matmul(x, weight, **options)), wide(want))


@pytest.mark.slow
def test_twice_the_same_bits():
    arrays = operands((33, 70, 600), "e4m3", "swiglu")
    first, second = (wide(run(*arrays, "swiglu", splits=2)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# What is refused, and how it is launched --------------------------------------------------------


def refusal(tokens, weight):
    with interpret_kernels():
        return triton.unsupported(
            tokens=tokens, weight=weight, bias=None, residual=None, activation=None
        )


def test_refusals():
    assert refusal(*specification(5, 64, 128, "e4m3")) is None
    assert refusal(*specification(5, 64, 128, "e4m3", group_size=64)) is None
    # Tokens of between 2 and 4 GiB in float16.
    assert "cannot be indexed" in refusal(*specification(2**17, 64, 12288, "e4m3"))
    assert [i.name for i in MATMUL.implementations] == ["mosaic_gpu", "triton", "xla"]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("out_size", [64, 4096, 28672])
@pytest.mark.parametrize("in_size", [100, 4096, 14336])
def test_launches_cover_what_there_is(out_size, in_size, gated):
    for count in (1, 16, 17, 64, 200, 4096):
        _, weight = specification(count, out_size, in_size, "e4m3", gated=gated)
        launch = triton._launch(count, weight, None)
        groups = weight.scales.shape[1]
        each = -(-groups // launch.splits)
        assert each * (launch.splits - 1) < groups, "a program without groups"
        assert launch.splits == 1 or count * launch.splits * 16 <= in_size
        assert launch.num_warps == launch.outputs // 16


LOWERED = [
    (1, 4096, 4096, "e4m3", None),
    (16, 14336, 4096, "e4m3", "swiglu"),
    (16, 75, 300, "bf16", "swiglu"),
    (300, 75, 300, "bf16", "gelu"),
    (3000, 1000, 520, "e4m3", "silu"),
]


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("case", "has_e4m3"),
    [(c, flag) for c in LOWERED[1:] + LOWERED[:1] for flag in (True, False)],
)
def test_it_lowers(case, has_e4m3):
    *shape, scale_dtype, activation = case
    tokens, weight = specification(*shape, scale_dtype, gated=activation in ("swiglu", "geglu"))
    launch = triton._launch(shape[0], weight, activation)
    launch = dataclasses.replace(launch, has_e4m3=has_e4m3)
    residual = jax.ShapeDtypeStruct((shape[0], weight.result_size), jnp.bfloat16)
    call = functools.partial(triton._matmul, launch=launch)
    text = lower_for_cuda(call, tokens, weight, weight.output_scale, residual)
    assert "turbojax_int4_matmul" in text
    # Only conversions of its own round to e4m3, and only where there are such instructions.
    assert ("cvt.rn.satfinite.e4m3x2" in text) == (has_e4m3 and scale_dtype == "e4m3")


@pytest.mark.quick(1)
@pytest.mark.parametrize("rows", [16, 2000])
def test_it_lowers_with_64_bits(rows):
    """Where plain numbers are 64 bits wide; with few tiles of tokens and with many."""
    tokens, weight = specification(rows, 300, 520, "e4m3")
    with jax.enable_x64(True):
        launch = triton._launch(rows, weight, None)
        call = functools.partial(triton._matmul, launch=launch)
        assert "turbojax_int4_matmul" in lower_for_cuda(call, tokens, weight, None, None)


# e4m3 by integers ---------------------------------------------------------------------------------


@pytest.mark.optimized
@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rounding_to_bits(call):
    """Every bfloat16 number, and what lies next to the middles of e4m3 values."""
    every = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    middles = ((oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate([every, middles, -middles, *near])
    got = np.asarray(call(_e4m3.to_bits)(jnp.asarray(x)))
    with np.errstate(invalid="ignore"):  # signalling NaN
        want = oracle.e4m3_bits(x.astype(np.float64)).astype(np.int64)
    np.testing.assert_array_equal(got & 0x7F, want & 0x7F)
    real = ~np.isnan(x)
    np.testing.assert_array_equal(got[real] >> 7, np.signbit(x[real]))


@pytest.mark.optimized
def test_values_of_bits():
    bits = np.arange(256)
    want = bits.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(_e4m3.from_bits)(jnp.asarray(bits, jnp.int32)), want)


def test_every_table():
    """All scales times all codes, rounded: the 16 values of every group there can be."""
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    products = scales[:, None] * np.arange(-8, 8, dtype=np.float32)
    want = oracle.e4m3(products.astype(np.float64))
    np.testing.assert_array_equal(_e4m3.round_normal(jnp.asarray(products)), want)
    exact = jnp.asarray(products, jnp.float16)
    np.testing.assert_array_equal(np.asarray(exact, np.float32), products)
    got = _e4m3.round_float16(exact, has_e4m3=True, interpret=True)
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)


def test_nibbles():
    x = jnp.arange(-128, 128, dtype=jnp.int32).astype(jnp.int8)
    low, high = (np.asarray(_e4m3.nibble(x, h, interpret=True), np.int64) for h in (False, True))
    np.testing.assert_array_equal(16 * high + (low & 15), np.arange(-128, 128))
    assert low.min() == high.min() == -8
    assert low.max() == high.max() == 7
