"""`implementation="mosaic_gpu"` of `int4_matmul` without a GPU: all but the matrix unit itself.

Refusals, order, launches, lowering; and the order of a register operand, with the kernel's own
arithmetic on arrays of lanes. What it computes is checked on a GPU, in `test_gpu_int4.py`, whose
bounds for sums in the matrix unit are checked here.
"""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic.hopper.matmul import epilogue, int4_many
from pallas_kernels.mosaic.hopper.matmul import int4 as int4_kernel
from pallas_kernels.mosaic.pipeline import WARPGROUPS
from pallas_kernels.mosaic.products import int4 as int4_operand
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.int4_helpers import random_tokens, specification, wide
from tests.oracles import int4 as oracle
from tests.oracles import warp
from turbojax import _device
from turbojax.matmul.int4 import matmul, mosaic_gpu, mosaic_operands
from turbojax.matmul.int4 import weight as int4
from turbojax.matmul.int4.api import MATMUL

ROWS = (1, 7, 8, 9, 16, 33, 64, 65, 128, 129, 192, 193, 256, 257, 1000, 2048, 4097)
SHARED_BYTES = 227 * 1024


def arguments(*shape, **options):
    tokens, weight = specification(*shape, **options)
    rest = dict.fromkeys(("bias", "residual", "activation"))
    return {"tokens": tokens, "weight": weight, **rest}


# What is refused, and how it is launched ----------------------------------------------------------


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("scales", ["e4m3", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 75, 300), (2**17, 64, 12288)])
def test_is_the_first_choice_on_hopper(shape, scales, dtype):
    given = arguments(*shape, scales=scales, dtype=dtype)
    assert mosaic_gpu.unsupported(**given) is None
    assert MATMUL.select(None, **given).name == "mosaic_gpu"


@pytest.mark.usefixtures("hopper")
def test_refusals_in_words():
    wide_tokens = arguments(5, 64, 128, dtype=jnp.float32)
    words = "dtype=float32 must be bfloat16 or float16"
    assert mosaic_gpu.unsupported(**wide_tokens) == words
    assert MATMUL.select(None, **wide_tokens).name == "triton"
    small_groups = arguments(5, 64, 128, group_size=64)
    assert mosaic_gpu.unsupported(**small_groups) == "group_size=64 must be 128"
    assert MATMUL.select(None, **small_groups).name == "triton"
    lopsided = arguments(5, 64, 128, scales="f16")
    zeros = jax.ShapeDtypeStruct(lopsided["weight"].scales.shape, jnp.int8)
    lopsided["weight"] = dataclasses.replace(lopsided["weight"], zeros=zeros)
    words = "weight.zeros must be None: weights must be symmetric"
    assert mosaic_gpu.unsupported(**lopsided) == words
    assert MATMUL.select(None, **lopsided).name == "triton"
    with pytest.raises(NotImplementedError, match="mosaic_gpu: group_size=64 must be 128"):
        MATMUL.select("mosaic_gpu", **small_groups)


def test_needs_hopper(monkeypatch):
    given = arguments(5, 64, 128)
    with _device.interpret_kernels():
        assert mosaic_gpu.unsupported(**given) == "its kernel cannot be interpreted"
    for capability in (None, 8.9, 10.0):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda found=capability: found)
        refusal = mosaic_gpu.unsupported(**given)
        assert refusal.startswith("needs an NVIDIA GPU of compute capability 9.0, for which alone")


@pytest.mark.parametrize("is_precise", [False, True])
@pytest.mark.parametrize("scales", ["e4m3", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (70, 520), (4096, 4096), (28672, 14336)])
def test_launches(shape, scales, is_precise):
    """Of every number of tokens: memory suffices, nobody is idle, and sums are as promised."""
    for rows in ROWS:
        _, weight = specification(rows, *shape, scales=scales)
        launch = mosaic_gpu.default_launch(rows, weight, is_precise=is_precise)
        is_coarse = rows > 128 and scales == "e4m3" and not is_precise
        assert launch.expands == (is_coarse and rows >= 4096)
        # The smallest tiles of which there are as few as can be.
        tiles = -(-rows // (256 if is_coarse else 128))
        sizes = (8, 16, 32, 64, 128, 192, 256)
        assert launch.tokens == next(n for n in sizes if n * tiles >= rows)
        assert launch.teams == (2 if rows <= 64 else 1)
        assert launch.stages % launch.teams == 0
        assert launch.stages >= 2 * launch.teams
        # Every part has a group of inputs, and a part alone as many as it is worth.
        groups = weight.scales.shape[1]
        assert launch.parts == 1 or (rows <= 256 and groups >= 4 * launch.parts)
        # Whole tiles of more than 64 tokens are those of the kernel for many of them.
        is_whole = launch.parts == 1 and not launch.expands
        assert launch.is_many == (rows > 64 and scales == "e4m3" and is_whole)
        assert shared_bytes(launch, {"e4m3": 1, "bf16": 2}[scales]) <= SHARED_BYTES


def shared_bytes(launch, scale_bytes):
    """What Pallas allocates: every buffer in units of 1,024 bytes, and barriers of 8."""
    stages = launch.stages
    # Of tokens above 64 the output goes by two places of 64; of a part it is float32.
    places, written = (1, launch.tokens) if launch.tokens <= 64 else (2, 64)
    if launch.is_many:
        written = 32
    buffers = [
        stages * launch.tokens * 128,
        2 * -(-launch.tokens // 64) * 64,
        places * written * 128 * (4 if launch.parts > 1 else 2),
        (launch.teams - 1) * 128 * launch.tokens * 4,
    ]
    if launch.expands:
        buffers.append(stages * 128 * 128)
    else:
        buffers += [stages * 128 * 64, stages * 128 * scale_bytes, 128 * 16]
    if launch.is_many:
        buffers += [4 * 128, 4 * 128]
    return sum(-(-size // 1024) * 1024 for size in buffers) + 8 * (2 * stages + 9)


@pytest.mark.parametrize(
    ("shape", "gated", "columns"),
    [
        ((3, 64, 96), False, 128),
        ((3, 64, 64), True, 64),
        ((7, 64, 4096), False, 128),  # Float32 sums of programs that share a tile.
        ((3, 72, 96), False, 128),
        ((3, 130, 96), False, 192),
    ],
)
def test_no_output_is_as_wide_as_one_warpgroups_part(shape, gated, columns, monkeypatch):
    """Its rows would be copied as one run of bytes, the other warpgroup's part into the next row.

    On an H200 all rows but the first of three were wrong.
    """
    asked = []

    def kernel(codes, scales, tables, x, *rest, columns, settings):
        asked.append(columns)
        if settings.parts > 1:
            return jnp.zeros((settings.parts, x.shape[0], columns), jnp.float32)
        return jnp.zeros((x.shape[0], columns), jnp.bfloat16)

    monkeypatch.setattr(int4_kernel, "int4_matmul", kernel)
    tokens, weight = specification(*shape, gated=gated)
    call = functools.partial(
        mosaic_gpu._matmul.__wrapped__,  # Compiled for another test it would not ask again.
        activation="swiglu" if gated else None,
        launch=mosaic_gpu.default_launch(shape[0], weight),
    )
    result = jax.eval_shape(call, tokens, weight, None, None)
    assert result.shape == (shape[0], weight.result_size)
    assert asked == [columns]


# Lowering -----------------------------------------------------------------------------------------

# Tokens, outputs, inputs; scales; activation; a word for each of bias, residual, float16, highest.
LOWERED = [
    (1, 4096, 4096, "e4m3", None, ""),
    (1, 75, 300, "f16", "swiglu", "bias residual"),
    (7, 4096, 14336, "bf16", None, "residual"),
    (7, 200, 520, "e4m3", "silu", "bias float16"),
    (8, 64, 128, "e4m3", None, "bias residual"),
    (9, 1, 1, "bf16", "gelu", "bias"),
    (16, 14336, 4096, "e4m3", "swiglu", ""),
    (33, 1030, 1000, "e4m3", "gelu", "residual float16"),
    (33, 28672, 640, "bf16", "geglu", "residual"),
    (64, 512, 256, "e4m3", "swiglu", "bias residual"),
    (64, 6144, 4096, "bf16", None, "highest"),
    (65, 14336, 4096, "e4m3", "geglu", "residual"),
    (65, 200, 300, "bf16", "silu", "bias residual float16"),
    (128, 4096, 4096, "e4m3", None, "residual"),
    (129, 4096, 4096, "e4m3", None, "residual"),
    (192, 14336, 300, "e4m3", "swiglu", "bias residual float16"),
    (193, 200, 300, "e4m3", "gelu", "bias"),
    (256, 14336, 4096, "bf16", "swiglu", "residual"),
    (256, 14336, 4096, "e4m3", "gelu", "bias residual highest"),
    (257, 75, 130, "e4m3", "swiglu", "bias"),
    (1000, 640, 1024, "bf16", None, ""),
    (1000, 1030, 520, "e4m3", "silu", "bias residual"),
    (1000, 704, 640, "e4m3", "swiglu", "residual highest"),
    (2048, 768, 1000, "e4m3", None, "bias residual"),
    (2048, 75, 300, "e4m3", "swiglu", "bias residual float16"),
    (2048, 704, 640, "e4m3", "swiglu", "bias residual highest"),
    (4097, 1030, 520, "bf16", "gelu", "bias residual"),
    (4097, 4096, 14336, "e4m3", None, "residual"),
]


# One of each kernel, gated or not, in the fast tier.
FIRST = [LOWERED[i] for i in (1, 9, 12, 23, 27)]


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    "case", [*FIRST, *(pytest.param(c, marks=pytest.mark.fuzz) for c in LOWERED if c not in FIRST)]
)
def test_lowers_for_cuda(case):
    """What lowers also fits into shared memory: the lowering counts it."""
    *shape, scales, activation, words = case
    options = {"scales": scales, "gated": activation in ("swiglu", "geglu")}
    if "float16" in words:
        options["dtype"] = jnp.float16
    tokens, weight = specification(*shape, **options)
    bias = weight.output_scale if "bias" in words else None
    residual = jax.ShapeDtypeStruct((shape[0], weight.result_size), tokens.dtype)
    residual = residual if "residual" in words else None
    static = {"activation": activation, "is_precise": "highest" in words}
    call = functools.partial(mosaic_gpu.matmul, **static)
    text = lower_for_cuda(call, tokens, weight, bias, residual)
    stays = scales == "e4m3" and "highest" not in words
    expands = stays and shape[0] >= 4096
    assert ("turbojax_int4_expand_hopper" in text) == expands
    assert ("turbojax_fp8_matmul_hopper" in text) == expands
    # Weights are expanded when there are tokens, not those of all layers at first.
    assert ("optimization_barrier" in text) == expands
    is_few = shape[0] <= 64
    assert ("turbojax_int4_few_hopper" in text) == is_few
    tiles = -(-shape[0] // (256 if stays else 128)) * -(-weight.padded_shape[0] // 128)
    # Few tiles of up to 256 tokens are shared.
    is_whole = shape[0] > 256 or tiles > 66 or weight.padded_shape[1] < 1024
    is_many = scales == "e4m3" and not is_few and not expands and is_whole
    assert ("turbojax_int4_matmul_many_hopper" in text) == is_many
    rest = not expands and not is_many and not is_few
    assert ("turbojax_int4_matmul_hopper" in text) == rest


def test_every_number_of_tokens_lowers():
    assert {case[0] for case in LOWERED} == set(ROWS)


@pytest.mark.quick(1, slow=0)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("count", [7, 1, 65, 72])
def test_lowers_under_vmap(count):
    """Of few tokens; and of more, whose scales are copied from strides that copies can have."""
    tokens, weight = specification(count, 200, 300)
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), tokens)
    call = functools.partial(matmul, implementation="mosaic_gpu")
    name = "turbojax_int4_few_hopper" if count <= 64 else MANY
    assert name in lower_for_cuda(jax.vmap(call, (0, None)), many, weight)


@pytest.mark.quick(first=2)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("precision", [None, "high", "default", jax.lax.Precision.HIGHEST])
def test_precision_reaches_the_kernel(precision):
    """Weights are expanded only for sums that stay in the matrix unit."""
    tokens, weight = specification(4096, 64, 128)
    call = functools.partial(matmul, precision=precision, implementation="mosaic_gpu")
    text = lower_for_cuda(call, tokens, weight)
    assert ("turbojax_fp8_matmul_hopper" in text) == (precision in (None, "default"))


# Weights as a register operand --------------------------------------------------------------------


def test_tables():
    """All scales, NaN among them, times all codes."""
    codes = np.arange(16)
    codes = np.where(codes > 7, codes - 16, codes)
    scales = np.append(oracle.E4M3, np.nan)
    want = oracle.e4m3_bits(scales[:, None] * codes)
    got = mosaic_operands.tables()
    assert got.shape == (int4_operand.TABLES, int4_operand.TABLE_BYTES)
    np.testing.assert_array_equal(got[:127], want[:127])
    np.testing.assert_array_equal(got[127] & 0x7F, 0x7F)
    integers = np.array(int4_operand._INTEGERS, "<u4").view(np.uint8)
    np.testing.assert_array_equal(integers, oracle.e4m3_bits(codes.astype(np.float64)))


class Lanes(np.ndarray):
    """A number of each of a warpgroup's 128 lanes, where the kernel has one lane's."""

    value = property(lambda self: self)

    def as_float(self):
        return self.view(np.float32)


class Memory:
    """A pointer of each lane into an array's bytes."""

    def __init__(self, array, offset=0):
        self.bytes, self.offset = array, offset

    @classmethod
    def to(cls, array):
        return cls(array.reshape(-1).view(np.uint8))

    def at(self, *offsets):
        return Memory(self.bytes, self.offset + sum(offsets))

    def _load(self, size):
        places = np.asarray(self.offset)[:, None] + np.arange(size)
        numbers = self.bytes[places].astype(np.uint32) << (8 * np.arange(size, dtype=np.uint32))
        return numbers.sum(1, dtype=np.uint32).view(Lanes)

    def byte(self):
        return self._load(1)

    def half(self):
        return self._load(2)

    def words(self, count):
        return [self.at(4 * i)._load(4) for i in range(count)]

    def store(self, word):
        places = np.asarray(self.offset)[:, None] + np.arange(4)
        self.bytes[places] = np.asarray(word).astype("<u4").view(np.uint8).reshape(-1, 4)


def permute_bytes(low, high, selector):
    """PTX's ``prmt``: byte `i` of the result is that of eight that nibble `i` names.

    Where the nibble has its highest bit set, that byte's sign, eight times.
    """
    low, high, selector = np.broadcast_arrays(low, high, selector)
    eight = np.stack([low, high], -1).astype("<u4").view(np.uint8)
    nibbles = (selector[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & 15
    chosen = np.take_along_axis(eight, (nibbles & 7).astype(np.int64), axis=-1)
    chosen = np.where(nibbles & 8, np.where(chosen & 128, 255, 0), chosen).astype(np.uint8)
    return chosen.view("<u4")[:, 0].view(Lanes)


@pytest.fixture
def on_lanes(monkeypatch):
    """Lets the kernel's code of one lane run on arrays of lanes."""
    thread = np.arange(128)
    places = (thread // 32 * 16 + thread % 32 // 4, thread % 4)
    lane, number = int4_operand.lane, lambda x: np.asarray([x]).view(Lanes)
    monkeypatch.setattr(int4_operand, "Pointer", Memory)
    monkeypatch.setattr(int4_operand.fragments, "row_and_place", lambda: places)
    monkeypatch.setattr(int4_operand.fragments, "carrier", lambda words: words)
    monkeypatch.setattr(int4_operand.fragments, "row_array", lambda pair: pair)
    monkeypatch.setattr(lane, "permute_bytes", permute_bytes)
    monkeypatch.setattr(lane, "flip_masked", lambda a, mask, bits: (a & mask) ^ bits)
    monkeypatch.setattr(lane, "scalar", lambda x: x)
    monkeypatch.setattr(lane, "integer", lambda x: np.uint32(x))
    monkeypatch.setattr(lane, "number", lambda x: number(np.float32(x)))


def group_of_weights(scales_dtype):
    """128 rows of a group: every code at every place, and every scale (of e4m3)."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (128, 128))
    bits = rng.permutation(128).astype(np.uint8)
    if scales_dtype == "bf16":
        bits = np.asarray(jnp.asarray(rng.normal(size=128), jnp.bfloat16)).view(np.uint16)
    return codes, oracle.pack(codes), bits


def fragment(words):
    """The ``[64, 128]`` bytes that a warpgroup's instructions of 32 inputs read from registers.

    Thread ``4 g + t`` of a warp has in its four words rows `g` and ``g + 8`` of the warp's 16, at
    inputs ``4 t``, then both at ``16 + 4 t``, and the three after each (PTX, register fragments of
    ``wgmma.mma_async.m64nNk32``).
    """
    out = np.zeros((64, 128), np.int64)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for i, word in enumerate(words):
            step, half, further = i // 4, i % 2, i % 4 // 2
            first = 32 * step + 16 * further + 4 * t
            part = np.array([word[thread]], "<u4").view(np.uint8)
            out[16 * warp + g + 8 * half, first : first + 4] = part
    return out


def test_packing_is_that_of_the_quantizer():
    codes, packed, _ = group_of_weights("e4m3")
    np.testing.assert_array_equal(int4.unpack_codes(jnp.asarray(packed)), codes)


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("first", [0, 64])
def test_register_operand_with_tables(first):
    codes, packed, bits = group_of_weights("e4m3")
    tables = mosaic_operands.tables()
    words, rest = int4_operand.operand(packed, bits, tables, first)
    rows = slice(first, first + 64)
    want = tables[bits[rows, None], codes[rows] & 15]
    np.testing.assert_array_equal(fragment(words), want)
    assert all((np.asarray(scale) == 1).all() for scale in rest)
    # The same words, of which the last permutation is left.
    threes = iter(int4_operand.choices_of_operand(packed, bits, tables, first))
    chosen = [permute_bytes(*three) for three in zip(threes, threes, threes, strict=True)]
    np.testing.assert_array_equal(chosen, words)
    # In memory for all groups at once: rows whose 16 bytes change places.
    out = np.zeros(64 * 128, np.uint8)
    int4_operand.expand(packed, bits, tables, first, out)
    place = np.arange(64 * 128)
    np.testing.assert_array_equal(out[place ^ ((place >> 7 & 7) << 4)].reshape(64, 128), want)


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("first", [0, 64])
def test_register_operand_of_integers(first):
    codes, packed, scales = group_of_weights("bf16")
    words, rest = int4_operand.operand(packed, scales, None, first)
    rows = slice(first, first + 64)
    want = oracle.e4m3_bits(codes[rows].astype(np.float64))
    np.testing.assert_array_equal(fragment(words), want)
    thread = np.arange(128)
    for half, got in enumerate(rest):
        row = first + thread // 32 * 16 + thread % 32 // 4 + 8 * half
        exact = (scales[row].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(np.asarray(got), exact)


# What the matrix unit loses -----------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("depth", [128, 1024])
def test_the_bound_of_the_matrix_unit(depth):
    """It holds, it is needed, and it is not wide. Tokens have outliers."""
    rng = np.random.default_rng(0)
    weight = tj.fireq.quantize_weight(jnp.asarray(rng.normal(size=(64, 1024)), jnp.float32))
    values, codes = wide(tj.fireq.dequantize(weight)), wide(random_tokens(rng, 60, 1024).codes)
    parts = [slice(k, k + depth) for k in range(0, 1024, depth)]
    got = sum(oracle.matrix_unit(codes[:, part], values[:, part]) for part in parts)
    error = np.abs(got - codes @ values.T)
    bound = oracle.matrix_unit_error(codes, values, depth)
    assert (error <= bound).all()
    assert (error > bound / 4).any()
    size = np.abs(codes) @ np.abs(values).T
    assert (error > (1024 + 8) * 2.0**-24 * size).any()
    assert np.linalg.norm(bound) < 0.01 * np.linalg.norm(got)
    # What docs/fireq.md says.
    loss = np.linalg.norm(error) / np.linalg.norm(got)
    assert loss == pytest.approx({128: 9e-5, 1024: 4e-4}[depth], rel=0.2)


def test_the_matrix_unit_by_hand():
    """Two sums whose every step is known: a product far below the sum, and one at its edge."""
    codes, values = np.zeros((1, 64)), np.zeros((2, 64))
    codes[0, [0, 32]] = 256, 1
    values[:, 0] = 1
    values[:, 32] = 2.0**-5, 2.0**-6
    # A unit is 2^-5 after the first step.
    got = oracle.matrix_unit(codes, values)
    np.testing.assert_array_equal(got, [[256 + 2.0**-5, 256]])
    loss = np.abs(got - codes @ values.T)
    assert (loss <= oracle.matrix_unit_error(codes, values, 64)).all()


MANY = "turbojax_int4_matmul_many_hopper"
# Tokens, weight rows, inputs; tokens of a tile; activation.
MANY_LOWERED = [
    (304, 1088, 640, 256, "swiglu"),
    (72, 64, 128, 128, "gelu"),
    (1000, 640, 1024, 192, None),
]


def settings_of(tile, activation, stages, is_full=True, **more):
    swizzle = 64 if activation in ("swiglu", "geglu") else 128
    of_call = int4_many.Epilogue(activation, is_full, is_full, "bfloat16", swizzle)
    return int4_many.Settings(of_call, tile, stages, **more)


def lowered(tokens, rows, inputs, tile, activation, stages=3, **more):
    """The text that a call with everything lowers to."""
    settings = settings_of(tile, activation, stages, **more)
    columns = max(rows // (2 if activation == "swiglu" else 1), settings.columns)
    shape = jax.ShapeDtypeStruct
    arrays = [
        shape((rows // 64, inputs // 128, 64, 64), jnp.uint8),
        shape((rows // 64, inputs // 128, 64), jnp.float8_e4m3fn),
        shape((128, 16), jnp.uint8),
        shape((tokens, inputs), jnp.float8_e4m3fn),
        shape((tokens,), jnp.bfloat16),
        shape((rows,), jnp.float32),
        shape((rows,), jnp.float32),
        shape((tokens, columns), jnp.bfloat16),
    ]

    def call(*arrays):
        return int4_many.int4_matmul(*arrays, columns=columns, settings=settings)

    return lower_for_cuda(call, *arrays)


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("case", MANY_LOWERED)
def test_many_tokens_lower_for_cuda(case, is_even):
    assert MANY in lowered(*case, is_even=is_even)


@pytest.mark.parametrize(
    ("grid", "programs"),
    [
        ((4, 112, 32), 132),
        ((2, 86, 32), 132),
        ((1, 86, 32), 132),
        ((1, 32, 112), 132),
        ((1, 2, 7), 132),
    ],
)
def test_programs_have_equally_many_groups(grid, programs):
    """Parts of a tile are those of consecutive places, all but the first what these do first."""
    grid, s = int4_many.Grid(*grid), settings_of(256, None, 3, is_even=True)
    places = min(programs, grid.tiles * grid.groups)
    most = grid.tiles // places + 2

    def of(place):
        share = int4_many.EvenShare(place, places, grid, s)
        return share.count, jax.vmap(share.work)(jnp.arange(most))

    counts, works = jax.tree.map(np.asarray, jax.vmap(of)(jnp.arange(places)))
    parts = {}
    for place, count in enumerate(counts):
        for i in range(count):
            token, tile, begin, end, missing = (int(x[place, i]) for x in works)
            parts.setdefault((token, tile), []).append((begin, end, missing, place, i))
    tiles = itertools.product(range(0, 256 * grid.across, 256), range(grid.down))
    assert parts.keys() == set(tiles)
    for found in map(sorted, parts.values()):
        begins, ends, missing, at, numbers = zip(*found, strict=True)
        assert (*begins, grid.groups) == (0, *ends)
        assert missing == (len(found) - 1, *[0] * (len(found) - 1))
        assert at == tuple(range(at[0], at[0] + len(found)))
        rounds = max(0, grid.tiles // places - 1)
        assert numbers[1:] == (rounds,) * (len(found) - 1)
        # Those that are there early are no more than one.
        assert grid.tiles < places or len(found) <= 2
    sizes = np.where(np.arange(most) < counts[:, None], works.end - works.begin, 0).sum(1)
    assert np.ptp(sizes) <= 1


@pytest.mark.parametrize(
    ("rows", "shape", "is_even"),
    [
        (128, (14336, 4096), False),
        (128, (11008, 4096), True),
        (128, (6144, 4096), True),
        (128, (4096, 4096), False),
        (192, (4096, 14336), True),
        (256, (14336, 4096), False),
        (512, (14336, 4096), False),
        (1024, (14336, 4096), True),
        (256, (11008, 4096), False),
        (512, (11008, 4096), True),
        (256, (4096, 14336), True),
        (512, (4096, 14336), True),
        (1024, (4096, 14336), False),
        (256, (6144, 4096), True),
        (512, (6144, 4096), False),
        (256, (4096, 4096), False),
        (256, (28672, 4096), False),
        (1024, (28672, 4096), False),
    ],
)
def test_tiles_are_cut_where_that_was_faster(rows, shape, is_even):
    _, weight = specification(rows, *shape)
    launch = mosaic_gpu.default_launch(rows, weight)
    assert launch.is_even == is_even
    assert launch.is_many or launch.parts > 1


def test_sums_go_from_program_to_program(monkeypatch):
    """What one hands over the other adds to its own, number by number."""
    monkeypatch.setattr(epilogue, "lane", warp)
    monkeypatch.setattr(epilogue, "fragments", SimpleNamespace(by_row=list, of_rows=list))
    monkeypatch.setattr(epilogue, "Pointer", SimpleNamespace(to=warp.Pointer))
    monkeypatch.setattr(warp, "scalar", warp.integer, raising=False)
    monkeypatch.setattr(warp, "special", lambda _: warp.thread(), raising=False)
    rng = np.random.default_rng(0)
    sums, done = np.full(3 * 128 * 8, np.nan, np.float32), np.zeros(3, np.uint32)
    memory = sums.view(np.uint8), done.view(np.uint8)
    # Of eight warps, two warpgroups, two rows of four numbers a lane.
    theirs, own = rng.normal(size=(2, 8, 2, 4, 32)).astype(np.float32)

    def each(f, values, which):
        for number in range(8):
            monkeypatch.setattr(warp.STATE, "number", number)
            rows = [[warp.Float(x) for x in row] for row in values[number]]
            yield f(rows, which + number // 4, *memory)

    list(each(epilogue.hand_over, theirs, 1))
    np.testing.assert_array_equal(done, [0, 1, 1])
    assert np.isnan(sums[:1024]).all()
    got = [[[x.value for x in row] for row in rows] for rows in each(epilogue.take_over, own, 1)]
    np.testing.assert_array_equal(got, own + theirs)
    with pytest.raises(AssertionError, match="nobody has released"):
        list(each(epilogue.take_over, own, 0))


def test_counts_its_shared_memory():
    """As many stages as `shared_bytes` allows lower; the lowering counts them too."""
    fits = [n for n in range(1, 20) if settings_of(128, "gelu", n).shared_bytes <= SHARED_BYTES]
    assert MANY in lowered(*MANY_LOWERED[1], stages=fits[-1])
    with pytest.raises(ValueError, match="shared memory"):
        lowered(*MANY_LOWERED[1], stages=fits[-1] + 1)


def test_registers_are_those_that_there_are():
    """A kernel that asks for more than its threads have at the start waits forever."""
    own, copies = int4_many.REGISTERS
    given = 65536 // (128 * (WARPGROUPS + 1)) // 8 * 8
    assert WARPGROUPS * own + copies <= (WARPGROUPS + 1) * given
    assert own % 8 == copies % 8 == 0


def test_refuses_fewer_outputs_than_a_tile():
    settings = settings_of(128, None, 3, is_full=False)
    codes, scales = jnp.zeros((1, 1, 64, 64), jnp.uint8), jnp.zeros((1, 1, 64), jnp.float8_e4m3fn)
    tables = jnp.zeros((128, 16), jnp.uint8)
    x, token_scales = jnp.zeros((72, 128), jnp.float8_e4m3fn), jnp.zeros(72, jnp.bfloat16)
    arrays = (codes, scales, tables, x, token_scales, jnp.zeros(64, jnp.float32), None, None)
    with pytest.raises(ValueError, match="columns=64 must be at least 128"):
        int4_many.int4_matmul(*arrays, columns=64, settings=settings)
