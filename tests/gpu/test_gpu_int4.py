"""`int4_matmul`, `grouped_matmul`, `fp8_tokens` compiled, against the oracle and the definition.

What an implementation refuses is tested on the CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.triton import _e4m3
from tests.matmul.experts_helpers import assert_equals_experts
from tests.matmul.experts_helpers import operands as operands_of_experts
from tests.matmul.int4_helpers import (
    assert_equals_oracle,
    random_epilogue,
    random_floats,
    random_tokens,
    random_weight,
    stored_bias,
    weight_of,
    wide,
)
from turbojax._device import needs_hopper
from turbojax.matmul.fp8_tokens import quantize_activation, rms_norm_quantize
from turbojax.matmul.grouped import mosaic_gpu
from turbojax.matmul.int4 import mosaic_gpu as int4_mosaic
from turbojax.matmul.int4.api import MATMUL, matmul
from turbojax.matmul.int4.weight import BLOCK, in_blocks
from turbojax.quantizers import Fp8Tokens

pytestmark = pytest.mark.gpu

KERNELS = ("triton", "mosaic_gpu")
# The widest results that they have.
DTYPES = {"triton": jnp.float32, "mosaic_gpu": jnp.bfloat16}
# Tokens, outputs, inputs; scales; activation: whole tiles and odd sizes, few tokens and many.
CASES = {
    "one token": ((1, 4096, 4096), "e4m3", None),
    "few tokens, gated": ((16, 1408, 2048), "e4m3", "swiglu"),
    "odd sizes": ((17, 200, 300), "bf16", "gelu"),
    "odd sizes, gated": ((33, 75, 1000), "bf16", "geglu"),
    "one tile": ((64, 512, 4096), "e4m3", "silu"),
    "several tiles": ((300, 1030, 520), "e4m3", "gelu"),
    "many tokens": ((2049, 768, 1024), "e4m3", None),
    "many tokens, gated": ((1024, 704, 640), "e4m3", "swiglu"),
    "many tokens, bf16": ((1000, 640, 1024), "bf16", None),
    # On Hopper one program to a tile: of 8 to 256 tokens, and several to a program.
    "five tokens, gated": ((5, 75, 300), "e4m3", "swiglu"),
    "eight tokens": ((8, 200, 520), "e4m3", None),
    "many outputs, gated": ((16, 9000, 640), "e4m3", "swiglu"),
    "many outputs, bf16, gated": ((64, 9000, 640), "bf16", "swiglu"),
    "few inputs": ((64, 200, 300), "e4m3", "silu"),
    "a tile of 128 tokens": ((100, 1030, 520), "e4m3", "gelu"),
    "a tile of 128 tokens, gated": ((65, 704, 4096), "e4m3", "swiglu"),
    "a tile of 192 tokens": ((129, 200, 300), "e4m3", "gelu"),
    "a tile of 192 tokens, shared": ((190, 200, 1300), "e4m3", "silu"),
    "two tiles and one token, gated": ((257, 75, 130), "e4m3", "geglu"),
    "expanded": ((4099, 200, 640), "e4m3", "gelu"),
    "several tiles to a program": ((1500, 3000, 256), "e4m3", "silu"),
    # As many outputs as one warpgroup has, and one group of inputs; with programs that share it.
    "half a tile": ((3, 64, 96), "e4m3", None),
    "half a tile, gated": ((5, 32, 64), "e4m3", "swiglu"),
    "half a tile, bf16": ((30, 64, 128), "bf16", "silu"),
    "half a tile, many tokens": ((300, 64, 300), "e4m3", None),
    "half a tile, shared": ((7, 64, 4096), "e4m3", "gelu"),
}


@functools.lru_cache(maxsize=4)
def operands(case, dtype=jnp.bfloat16, seed=0):
    (count, out_size, in_size), scale_dtype, activation = case
    rng = np.random.default_rng(seed)
    weight = random_weight(
        rng, out_size, in_size, scale_dtype, gated=activation in ("swiglu", "geglu")
    )
    tokens = random_tokens(rng, count, in_size, dtype)
    return tokens, weight, *random_epilogue(rng, count, weight, dtype)


def run(implementation, tokens, weight, bias, residual, activation, **options):
    """By name; where the GPU is no Hopper perhaps a skip with the refusal."""
    [found] = [x for x in MATMUL.implementations if x.name == implementation]
    blocks = jax.eval_shape(in_blocks, weight)  # which is what implementations are given
    rows, rest = stored_bias(bias, weight), {"residual": residual, "activation": activation}
    refusal = found.unsupported(tokens=tokens, weight=blocks, bias=rows, **rest)
    if refusal is not None:
        assert needs_hopper() is not None, refusal
        pytest.skip(f"{implementation}: {refusal}")
    call = compiled(implementation, activation, **options)
    return call(tokens, weight, bias=bias, residual=residual)


@functools.cache
def compiled(implementation, activation, **options):
    options |= {"implementation": implementation, "activation": activation}
    return jax.jit(functools.partial(matmul, **options))


def summed_together(implementation, tokens, weight, precision=None):
    """How many inputs a matrix unit of 14 bits sums; None if all sums are float32."""
    if implementation != "mosaic_gpu":
        return None
    stays = precision is None and tokens.codes.shape[0] > 128 and weight.scale_dtype == "e4m3"
    return weight.padded_shape[1] if stays else BLOCK


@pytest.mark.quick(15)
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(implementation, name, precision):
    check(implementation, name, precision)


@pytest.mark.quick(4)
@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("shape", [(4288, 4096), (14336, 4096), (200, 1300), (320, 14336)])
def test_bits_of_few_tokens(shape, scale_dtype):
    """Of up to 64 tokens on Hopper: those of each alone; also of tokens that the kernel rounds.

    More than 32 are copied ahead, of the second weight by several warpgroups for each other.
    """
    rng = np.random.default_rng(6)
    weight = random_weight(rng, *shape, scale_dtype)
    x = jnp.asarray(rng.normal(size=(64, shape[1])), jnp.bfloat16)
    tokens = quantize_activation(x)
    want = run("mosaic_gpu", tokens, weight, None, None, None)
    call = compiled("mosaic_gpu", None)
    for count in (1, 5, 16, 17, 33):
        some = Fp8Tokens(tokens.codes[:count], tokens.scale[:count], tokens.dtype)
        for given in (some, x[:count]):
            got = call(given, weight, bias=None, residual=None)
            np.testing.assert_array_equal(wide(got), wide(want)[:count])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("case", "programs"),
    [
        (((700, 300, 640), "e4m3", "gelu"), 4),  # Nine tiles of five groups: sums are there early.
        (((300, 200, 1300), "e4m3", None), 7),  # Four tiles of eleven.
        (((260, 140, 384), "e4m3", "swiglu"), 5),
        (((129, 64, 1100), "e4m3", "silu"), 132),  # One tile, of which each of nine has a group.
        (((128, 300, 1300), "e4m3", "gelu"), 7),  # In two levels.
    ],
)
def test_tiles_that_programs_share(monkeypatch, case, programs):
    """Near the oracle, and the same bits many times, under `vmap`, too."""
    if needs_hopper() is not None:
        pytest.skip(needs_hopper())
    monkeypatch.setattr(int4_mosaic, "multiprocessors", lambda: programs)
    arrays, activation = operands(case), case[2]
    blocks = (arrays[0], in_blocks(arrays[1]), stored_bias(arrays[2], arrays[1]), arrays[3])
    tile = 128 if case[0][0] <= 128 else 256
    launch = int4_mosaic.Launch(tile, 5, 1, 1, False, is_many=True, is_even=True)
    # Not the jitted function, which knows nothing of the programs.
    call = functools.partial(int4_mosaic._matmul.__wrapped__, activation=activation, launch=launch)
    got = jax.jit(call)(*blocks)
    assert_equals_oracle(got, *arrays, activation, arrays[1].padded_shape[1])
    again = jax.jit(call)
    for _ in range(50):
        np.testing.assert_array_equal(wide(again(*blocks)), wide(got))
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), blocks[0])
    both = jax.jit(jax.vmap(call, in_axes=(0, None, None, None)))(stack, *blocks[1:])
    np.testing.assert_array_equal(wide(both), wide(jnp.stack([got, got])))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_precision(implementation, scale_dtype):
    """What sums lose, and nothing else: the bias takes the product away, and float16 has room."""
    rng = np.random.default_rng(4)
    w = jnp.asarray(rng.normal(size=(256, 2048)), jnp.float32)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)
    # All tokens are one, for outputs have the biases. Sums of more than 256 are not shared.
    codes = jnp.asarray(rng.normal(size=2048), jnp.float32).astype(jnp.float8_e4m3fn)
    tokens = Fp8Tokens(jnp.tile(codes, (300, 1)), jnp.ones(300, jnp.bfloat16), np.dtype(np.float16))
    product = wide(tj.fireq.dequantize(weight)) @ wide(codes)
    arrays = (tokens, weight, jnp.asarray(-product, jnp.float32), None)
    loss = []
    for precision in (None, "highest"):
        got = run(implementation, *arrays, None, precision=precision)
        depth = summed_together(implementation, tokens, weight, precision)
        assert_equals_oracle(got, *arrays, None, depth)
        loss.append(np.linalg.norm(wide(got)))
    if implementation == "mosaic_gpu" and scale_dtype == "e4m3":
        # Four additions of each sum in the unit instead of 64.
        assert 0 < 3 * loss[1] < loss[0]
    else:
        assert loss[0] == loss[1]


@pytest.mark.parametrize("name", ["one tile", "odd sizes, gated"])
def test_the_definition_equals_the_oracle(name):
    """In XLA, where a product of e4m3 operands in an 8-bit unit would be too coarse."""
    check("xla", name)


# What sums lose of a result's norm. `oracles.int4.matrix_unit` says 4e-4 at most, of the cases here
# whose sums stay in it longest; float32 loses less.
SUMS = 1e-3


def check(implementation, name, precision=None):
    """Near the oracle, and twice the same bits.

    The oracle rounded to the result's dtype says what rounding costs: typically 1.7e-3 of the norm
    in bfloat16, up to 2**-8 where a few large results hold most of it. What sums lose does not
    depend on that, so that squares add up.
    """
    arrays, activation = operands(CASES[name]), CASES[name][2]
    got = run(implementation, *arrays, activation, precision=precision)
    depth = summed_together(implementation, *arrays[:2], precision)
    want = assert_equals_oracle(got, *arrays, activation, depth)
    rounding = wide(jnp.asarray(want, jnp.float32).astype(got.dtype)) - want
    allowed = np.hypot(np.linalg.norm(rounding), SUMS * np.linalg.norm(want))
    assert np.linalg.norm(wide(got) - want) <= allowed
    again = run(implementation, *arrays, activation, precision=precision)
    np.testing.assert_array_equal(wide(got), wide(again))


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [(jnp.float16, "triton"), (jnp.float16, "mosaic_gpu"), (jnp.float32, "triton")],
)
def test_dtypes(implementation, dtype):
    """Other results show what bfloat16 rounds away: what the sums are."""
    arrays = operands(((70, 320, 4096), "e4m3", None), dtype)
    depth = summed_together(implementation, *arrays[:2])
    assert_equals_oracle(run(implementation, *arrays, None), *arrays, None, depth)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_every_weight_by_itself(implementation, scale_dtype):
    """One hot tokens pick the weights out one by one: the order of inputs, and every value."""
    weight = random_weight(np.random.default_rng(1), 128, 512, scale_dtype)
    codes = jnp.eye(512, dtype=jnp.float32).astype(jnp.float8_e4m3fn)
    dtype = DTYPES[implementation]
    tokens = Fp8Tokens(codes, jnp.ones(512, jnp.bfloat16), np.dtype(dtype))
    got = run(implementation, tokens, weight, None, None, None)
    want = tj.fireq.dequantize(weight).T.astype(dtype)
    np.testing.assert_array_equal(wide(got), wide(want))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("count", "activation"),
    [(1, None), (16, "swiglu"), (64, None), (300, "swiglu"), (2049, None)],
)
def test_rows_of_every_size(implementation, count, activation):
    """From 1e-12 to 1e4, near the oracle relative to their size; in a gated weight one of the two.

    Rows beyond the range of e4m3 scales have a power of two in their `output_scale`: in programs
    that share a tile, and those that do not, and with weights that are expanded first.
    """
    rng = np.random.default_rng(5)
    sizes = np.logspace(-12, 4, 200)

    def one(sizes):
        w = jnp.asarray(rng.normal(size=(200, 1024)) * sizes[:, None], jnp.float32)
        weight = tj.fireq.quantize_weight(w)
        values, w = wide(tj.fireq.dequantize(weight)), wide(w)
        assert (np.linalg.norm(values - w, axis=1) < 0.17 * np.linalg.norm(w, axis=1)).all()
        return weight

    weight = one(sizes)
    assert len(np.unique(weight.output_scale)) > 30
    if activation is not None:
        weight = tj.fireq.gate_and_up(one(np.full(200, 0.05)), weight)
    arrays = (random_tokens(rng, count, 1024), weight, None, None)
    got = run(implementation, *arrays, activation)
    depth = summed_together(implementation, *arrays[:2])
    assert_equals_oracle(got, *arrays, activation, depth)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("count", "activation"), [(5, "swiglu"), (200, None)])
def test_nan_and_saturation(implementation, count, activation):
    """NaN in its token and its output alone; scales of 64, whose codes of -8 saturate."""
    dtype = DTYPES[implementation]
    tokens, weight, *_ = operands(((count, 64, 384), "e4m3", activation), dtype)
    tokens = dataclasses.replace(tokens, scale=tokens.scale.at[2].set(jnp.nan))
    scales = weight.scales.at[..., ::3].set(64).at[0, 1, 9].set(jnp.nan)
    weight = dataclasses.replace(weight, scales=scales)
    arrays = (tokens, weight, None, None)
    depth = summed_together(implementation, tokens, weight)
    assert_equals_oracle(run(implementation, *arrays, activation), *arrays, activation, depth)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_under_vmap(count):
    """Each of several calls as it would be alone."""
    arrays = [operands(((count, 320, 520), "e4m3", None), seed=i)[0] for i in range(3)]
    weight = operands(((count, 320, 520), "e4m3", None))[1]
    many = jax.tree.map(lambda *x: jnp.stack(x), *arrays)
    got = jax.jit(jax.vmap(matmul, in_axes=(0, None)))(many, weight)
    alone = jax.jit(matmul)
    np.testing.assert_array_equal(wide(got), wide(jnp.stack([alone(x, weight) for x in arrays])))


def test_stacks_under_vmap():
    """Each its own weight and tokens that the kernel rounds, by programs in clusters."""
    rng = np.random.default_rng(7)
    weights = [random_weight(rng, 320, 6144, "e4m3") for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(3, 5, 6144)), jnp.bfloat16)
    stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)
    got = jax.jit(jax.vmap(matmul))(x, stack)
    alone = jax.jit(matmul)
    want = [alone(some, weight) for some, weight in zip(x, weights, strict=True)]
    np.testing.assert_array_equal(wide(got), wide(jnp.stack(want)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_public_function(dtype):
    """What None chooses, quantization included, as XLA has it, and its gradient."""
    rng = np.random.default_rng(3)
    weight = random_weight(rng, 320, 520, "e4m3", gated=True)
    x = jnp.asarray(rng.normal(size=(3, 7, 520)), dtype)

    def call(x, implementation):
        y = matmul(x, weight, activation="swiglu", implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    both = jax.value_and_grad(call, has_aux=True)
    (_, got), d_got = jax.jit(both, static_argnums=1)(x, None)
    (_, want), d_want = jax.jit(both, static_argnums=1)(x, "xla")
    for a, b in ((got, want), (d_got, d_want)):
        allowed = 4 * float(jnp.finfo(dtype).eps) + 1e-5
        assert np.linalg.norm(wide(a) - wide(b)) <= allowed * np.linalg.norm(wide(b))


# Activations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(48, jnp.float16), (300, jnp.bfloat16), (4096, jnp.float32), (11008, jnp.bfloat16)],
)
@pytest.mark.parametrize("implementation", KERNELS)
def test_activations(implementation, size, dtype):
    """The bits of XLA on the same GPU; after a norm, whose sums differ, but for a few steps."""
    if implementation == "mosaic_gpu" and (refusal := needs_hopper()):
        pytest.skip(refusal)
    rng = np.random.default_rng(size)
    x = rng.normal(size=(37, size)) * np.exp(3 * rng.normal(size=(37, 1)))
    x[3], x[5, size // 2], x[6, -1] = 0, np.nan, np.inf
    x = jnp.asarray(x, jnp.float32).astype(dtype)
    scale = jnp.asarray(rng.normal(size=size), dtype)
    plain, norm = (
        [
            jax.jit(functools.partial(f, implementation=name))(*args)
            for name in (implementation, "xla")
        ]
        for f, args in (
            (quantize_activation, (x,)),
            (functools.partial(rms_norm_quantize, eps=1e-5), (x, scale)),
        )
    )
    for (got, want), most in ((plain, 0), (norm, 0.002)):
        for a, b in ((got.codes, want.codes), (got.scale, want.scale)):
            missing = np.isnan(wide(b))
            np.testing.assert_array_equal(np.isnan(wide(a)), missing)
            unsigned = jnp.uint8 if b.dtype.itemsize == 1 else jnp.uint16
            a, b = (
                np.asarray(jax.lax.bitcast_convert_type(i, unsigned), np.int64)[~missing]
                for i in (a, b)
            )
            difference = np.abs(a - b)
            assert difference.max() <= (most > 0)
            assert np.count_nonzero(difference) <= most * x.size


def test_integers_round_like_the_gpu():
    """What older GPUs use instead of conversions, on every bfloat16 number."""
    x = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
    x = x.astype(jnp.float32)
    x = x[jnp.abs(x) <= 448]
    want = jax.lax.bitcast_convert_type(jax.jit(tj.quantizers.round_to_e4m3)(x), jnp.uint8)
    got = jax.jit(_e4m3.to_bits)(x)
    np.testing.assert_array_equal(got, want.astype(jnp.int32))


# Tokens, outputs, inputs; scales, or zeros too; activation: around the tiles of both kernels.
W4A16_CASES = {
    "one token": ((1, 4096, 4096), "zeros", None),
    "five tokens, gated": ((5, 75, 300), "zeros", "swiglu"),
    "eight tokens": ((8, 200, 520), "e4m3", None),
    "sixteen tokens, gated": ((16, 1408, 2048), "f16", "swiglu"),
    "half a tile": ((3, 64, 96), "bf16", "silu"),
    "many inputs": ((16, 320, 14336), "zeros", None),
    "many outputs": ((2, 28672, 640), "zeros", "gelu"),
    "seventeen tokens": ((17, 200, 300), "zeros", "gelu"),
    "one tile": ((64, 512, 4096), "e4m3", "silu"),
    "several tiles, gated": ((300, 704, 640), "zeros", "swiglu"),
    "a tile and one token": ((129, 200, 300), "bf16", None),
    "half a tile, many tokens": ((300, 64, 300), "zeros", None),
    "many tokens": ((2049, 768, 1024), "zeros", None),
}


run_w4a16 = functools.partial(run, activations="bf16")


@pytest.mark.quick(14)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", W4A16_CASES)
def test_w4a16_equals_the_oracle(implementation, name, dtype):
    """Near it, and twice the same bits."""
    (count, out_size, in_size), kind, activation = W4A16_CASES[name]
    rng = np.random.default_rng(0)
    weight = weight_of(rng, out_size, in_size, kind, gated=activation == "swiglu")
    x = random_floats(rng, count, in_size, dtype)
    bias, residual = random_epilogue(rng, count, weight, dtype)
    arrays = (x, weight, bias, residual, activation)
    got = run_w4a16(implementation, *arrays)
    assert_equals_oracle(got, *arrays)
    np.testing.assert_array_equal(wide(got), wide(run_w4a16(implementation, *arrays)))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("kind", ["zeros", "e4m3"])
@pytest.mark.parametrize("count", [16, 512])
def test_every_weight_of_w4a16_by_itself(implementation, kind, count):
    """One hot tokens pick the weights out one by one: the order of inputs, and every value."""
    weight = weight_of(np.random.default_rng(1), 128, 512, kind)
    want = wide(tj.fireq.dequantize(weight).T.astype(jnp.float16))
    tokens = jnp.eye(512, dtype=jnp.float16)
    for first in range(0, 512, count):
        some = slice(first, first + count)
        got = run_w4a16(implementation, tokens[some], weight, None, None, None)
        np.testing.assert_array_equal(wide(got), want[some])


@pytest.mark.parametrize(
    ("implementation", "group_size"),
    [("triton", 32), ("triton", 64), ("triton", 256), ("mosaic_gpu", 256)],
)
def test_other_groups(implementation, group_size):
    """Kernels for Hopper take those of 128 and more alone."""
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.normal(size=(200, 1024)), jnp.float32)
    weight = tj.fireq.quantize_weight(w, group_size=group_size, scale_dtype="f16")
    x = random_floats(rng, 9, 1024)
    got = run_w4a16(implementation, x, weight, None, None, None)
    assert_equals_oracle(got, x, weight, None, None, None)


UNEVEN = [1, 0, 200, 33, 0, 8, 7, 64]
# Rows, sizes of groups; outputs, inputs; what else. On Hopper tiles of 8 to 256 tokens.
GROUPED_CASES = {
    "one row": ((1, [0, 1, 0]), (64, 128), {}),
    "few, odd sizes": ((23, [3, 0, 11, 1, 2]), (200, 300), {}),
    "gated": ((61, [5, 0, 30, 9, 0, 16]), (384, 520), {"gated": True}),
    "bf16": ((61, [5, 0, 30, 9, 0, 16]), (192, 520), {"scale_dtype": "bf16"}),
    "float16, gated": ((70, [60, 10]), (75, 130), {"gated": True, "dtype": jnp.float16}),
    "many experts": ((300, [3, 0, 1] * 60), (136, 256), {}),
    "uneven": ((320, UNEVEN), (640, 1024), {}),
    "uneven, gated": ((313, UNEVEN), (200, 640), {"gated": True}),
    "all to one": ((300, [0, 300, 0, 0]), (512, 640), {}),
    "many, gated": ((900, [500, 3, 297]), (320, 640), {"gated": True}),
    "many, bf16": ((900, [500, 3, 297]), (130, 300), {"scale_dtype": "bf16"}),
    "three warpgroups": ((700, [88, 0, 150, 97, 1, 144, 120, 80]), (3200, 256), {}),
    "one expert": ((2049, [2000]), (768, 1024), {}),
    "nobody": ((40, [0, 0]), (128, 256), {}),
}


def run_grouped(implementation, tokens, weight, sizes, bias, activation, precision=None):
    if implementation == "mosaic_gpu" and needs_hopper() is not None:
        pytest.skip(needs_hopper())
    options = {"activation": activation, "precision": precision}
    call = functools.partial(tj.fireq.grouped_matmul, implementation=implementation, **options)
    return jax.jit(call)(tokens, weight, sizes, bias=bias)


@pytest.mark.quick(7)
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", GROUPED_CASES)
def test_each_expert_is_as_the_oracle(implementation, name, precision):
    (rows, sizes), shape, options = GROUPED_CASES[name]
    arrays = operands_of_experts(rows, sizes, *shape, **options)
    weight = arrays[1]
    activation = "swiglu" if weight.gated else "gelu"
    got = run_grouped(implementation, *arrays, activation, precision)
    depth = None
    if implementation == "mosaic_gpu":
        launch = mosaic_gpu.default_launch(rows, weight, is_precise=precision is not None)
        depth = BLOCK if launch.is_two_level else weight.padded_shape[1]
    assert_equals_experts(got, *arrays, activation, depth)
    again = run_grouped(implementation, *arrays, activation, precision)
    np.testing.assert_array_equal(wide(got), wide(again))


@pytest.mark.parametrize("implementation", [*KERNELS, "xla"])
@pytest.mark.parametrize("sizes", [[3, -1, 4], [30, 100, 140]])
def test_sizes_that_are_not_valid(implementation, sizes):
    tokens, weight, _, bias = operands_of_experts(200, [0, 0, 0], 200, 300)
    got = run_grouped(implementation, tokens, weight, jnp.asarray(sizes), bias, None)
    assert jnp.isnan(got).all()


@pytest.mark.parametrize("implementation", KERNELS)
def test_what_is_not_finite_stays_with_its_token(implementation):
    tokens, weight, sizes, _ = operands_of_experts(320, UNEVEN, 640, 1024)
    clean = wide(run_grouped(implementation, tokens, weight, sizes, None, None))
    scale = tokens.scale.at[jnp.array([5, 201, 319])].set(jnp.nan)
    bad = tj.fireq.Fp8Tokens(tokens.codes, scale, tokens.dtype)
    got = wide(run_grouped(implementation, bad, weight, sizes, None, None))
    is_nan = np.isnan(got).all(axis=1)
    assert np.flatnonzero(is_nan).tolist() == [5, 201]
    np.testing.assert_array_equal(got[~is_nan], clean[~is_nan])


def test_grouped_under_vmap():
    """Each of several calls, with its own groups, as it would be alone."""
    tokens, weight, *_ = operands_of_experts(24, [3, 10, 8], 200, 300)
    sizes = jnp.array([[3, 10, 8], [24, 0, 0], [0, 1, 2]])
    got = jax.jit(jax.vmap(tj.fireq.grouped_matmul, in_axes=(None, None, 0)))(tokens, weight, sizes)
    alone = jax.jit(tj.fireq.grouped_matmul)
    for out, size in zip(got, sizes, strict=True):
        np.testing.assert_array_equal(wide(out), wide(alone(tokens, weight, size)))


def test_the_layer():
    """What None chooses as XLA has it, and its gradient."""
    rng = np.random.default_rng(0)
    shapes = [(256, 12), (12, 256, 136), (12, 256, 136), (12, 136, 256)]
    kernels = [jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.float32) for s in shapes]
    x = jnp.asarray(rng.normal(size=(3, 50, 256)), jnp.bfloat16)
    found = []
    for implementation in (None, "xla"):
        layer = tj.flax.Int4Experts.from_kernels(
            *kernels, top_k=3, normalize=True, implementation=implementation
        )

        def total(x, layer=layer):
            y = layer(x)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), d_x = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
        found.append((wide(y), wide(d_x)))
    for got, want in zip(*found, strict=True):
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)
