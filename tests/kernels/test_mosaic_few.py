"""INT4 products of few tokens on Hopper without a GPU: launches, programs, rounding, lowering.

A program's warps run on arrays of 32 lanes, with copies, barriers and the cluster's memory in numpy
(`oracles.programs`). What the compiled kernel computes is checked in `test_gpu_int4.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper.matmul import epilogue, few, rounding
from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding
from pallas_kernels.mosaic.products import int4
from tests.caches.test_fp8_tokens import activations, bits
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.int4_helpers import (
    abstract_weight,
    assert_equals_oracle,
    random_epilogue,
    random_tokens,
    random_weight,
    specification,
    stored_bias,
    wide,
)
from tests.oracles import programs, warp
from turbojax.matmul.int4 import few_mosaic, mosaic_operands, reference
from turbojax.matmul.int4.static import GATED
from turbojax.matmul.int4.weight import BLOCK
from turbojax.quantizers import Fp8Tokens, quantize_tokens

ROWS = (1, 7, 8, 9, 16, 17, 33, 64)
SHAPES = (
    (1, 1),
    (11008, 4096),
    (28672, 8192),
    (70, 520),
    (4096, 4096),
    (6144, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 28672),
)


# Launches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["e4m3", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_launches(shape, scales):
    """Memory suffices, and who adds what up does not depend on the number of tokens."""
    found = set()
    for rows in ROWS:
        _, weight = specification(rows, *shape, scales=scales)
        launch = few_mosaic.default_launch(rows, weight)
        groups = weight.padded_shape[1] // BLOCK
        found.add(launch.splits * launch.parts)
        assert rows <= launch.tokens <= max(8, 2 * rows)
        assert launch.splits * launch.parts <= groups
        assert launch.warpgroups % launch.splits == 0
        assert launch.stages == 3
        resident = -(-groups // launch.parts)
        assert launch.resident == resident or launch.resident % launch.splits == 0
        assert 1 <= launch.resident <= resident
        assert launch.resident == resident or launch.resident >= 2 * launch.splits
        assert not launch.rounds
        s = settings_of(launch, None, False, False, "bfloat16")
        assert s.depth > 1 or not s.has_ring(groups)
        assert few.Memory.of(s, groups, {"e4m3": 1, "bf16": 2}[scales]).size <= 225 * 1024
    assert len(found) == 1


def test_no_launch():
    """Of more tokens, or of inputs whose scales do not fit."""
    _, weight = specification(65, 128, 128)
    assert few_mosaic.default_launch(65, weight) is None
    _, weight = specification(1, 500_000, 500_000, scales="bf16")
    assert few_mosaic.default_launch(1, weight) is None


def test_tokens_that_the_kernel_rounds():
    """As many as its lanes can hold, and all of a program's at once."""
    for rows, want in ((1, True), (16, True), (64, False)):
        _, weight = specification(rows, 14336, 4096)
        launch = few_mosaic.default_launch(rows, weight, rounds=True)
        assert launch.rounds == want
        assert not launch.rounds or launch.resident == -(-32 // launch.parts)


def settings_of(launch, activation, has_bias, has_residual, dtype, **options):
    return few.Settings(
        epilogue=few.Epilogue(activation, has_bias, has_residual, dtype, 0),
        tokens=launch.tokens,
        warpgroups=launch.warpgroups,
        parts=launch.parts,
        stages=launch.stages,
        resident=launch.resident,
        splits=launch.splits,
        **options,
    )


@pytest.mark.parametrize("kind", [None, "silu", "gelu"])
def test_activations(monkeypatch, kind):
    monkeypatch.setattr(epilogue, "lane", warp)
    x = np.linspace(-12, 12, 32, dtype=np.float32)
    got = epilogue.activate(warp.Float(x), kind).value
    np.testing.assert_allclose(got, reference.activate(jnp.asarray(x), kind), rtol=1e-5, atol=1e-6)


# Whole programs -----------------------------------------------------------------------------------


def memory(x):
    return None if x is None else warp.Pointer(np.array(x).reshape(-1).view(np.uint8).copy())


@pytest.fixture
def product(monkeypatch):
    """The product of a launch, every program of it emulated."""
    for module in (few, rounding, eight_bits, epilogue, int4):
        monkeypatch.setattr(module, "lane", warp)
    for module in (few, rounding):
        monkeypatch.setattr(module, "ClusterPointer", programs.ClusterPointer)

    def run(tokens, weight, bias, residual, activation, *, launch):
        is_rounded = isinstance(tokens, Fp8Tokens)
        x, scale = (tokens.codes, tokens.scale) if is_rounded else (tokens, None)
        count, inputs = x.shape
        rule = None
        if not is_rounded:
            sizes = (launch.tokens, launch.resident, launch.parts, launch.warpgroups)
            rule = rounding.Rounding(str(x.dtype), count, inputs, *sizes)
        dtype = str(tokens.dtype)
        has = bias is not None, residual is not None
        s = settings_of(launch, activation, *has, dtype, rounding=rule)
        is_e4m3 = weight.scale_dtype == "e4m3"
        out = memory(np.full((count, weight.result_size), np.nan, np.dtype(tokens.dtype)))
        tiles, groups = weight.codes.shape[:2]
        a = few.Arrays(
            codes=memory(weight.codes),
            scales=memory(weight.scales),
            tables=memory(mosaic_operands.tables()) if is_e4m3 else None,
            # Copies of boxes are of a matrix.
            x=warp.Pointer(np.array(x).view(np.uint8)) if s.has_ring(groups) else memory(x),
            token_scales=memory(scale),
            output_scales=memory(weight.output_scale),
            bias=memory(stored_bias(bias, weight)),
            residual=memory(residual),
            out=out,
            tiles=tiles,
            groups=groups,
            tokens=count,
            inputs=inputs,
            width=weight.result_size,
            scale_dtype="uint8" if is_e4m3 else str(weight.scales.dtype),
        )
        shared = few.Memory.of(s, groups, a.scale_bytes).size
        for rows in range(-(-tiles // s.tiles)):
            programs.run(
                monkeypatch,
                lambda part, own, rows=rows: few._program(
                    a, [warp.integer(rows), warp.integer(part)], own, s
                ),
                programs=s.parts,
                warps=4 * s.warpgroups,
                shared=shared,
            )
        got = out.memory.view(np.dtype(tokens.dtype)).reshape(count, -1)
        return jnp.asarray(got)

    return run


Launch = functools.partial(few_mosaic.Launch, rounds=False, splits=1)
# Tokens, outputs, inputs; scales; activation; launch: columns, warpgroups, parts, slots, groups.
CASES = {
    "two parts": ((5, 100, 528), "e4m3", None, Launch(8, 2, 2, 2, 3)),
    "uneven parts, gated": ((16, 75, 912), "e4m3", "swiglu", Launch(16, 1, 3, 2, 3)),
    "rounds of tokens": ((33, 70, 640), "bf16", "gelu", Launch(64, 1, 1, 2, 2)),
    "shares of a program": ((5, 100, 1040), "e4m3", None, Launch(8, 4, 2, 2, 5, splits=2)),
    "one program": ((9, 75, 1040), "f16", "geglu", Launch(16, 4, 1, 2, 9, splits=4)),
    "rounds of shares": ((17, 70, 1152), "bf16", None, Launch(32, 2, 2, 2, 4, splits=2)),
    "rows share a ring": ((33, 130, 1040), "e4m3", None, Launch(64, 4, 1, 2, 4, splits=2)),
    "deep ring": ((34, 190, 1168), "f16", None, Launch(64, 3, 1, 3, 5)),
    "no place to copy ahead": ((33, 64, 528), "bf16", None, Launch(64, 3, 1, 3, 5, splits=3)),
    "more rows than there are": ((3, 130, 272), "bf16", "silu", Launch(8, 2, 1, 4, 3)),
}


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", CASES)
def test_programs(product, name):
    (count, out_size, in_size), scales, activation, launch = CASES[name]
    rng = np.random.default_rng(0)
    weight = random_weight(rng, out_size, in_size, scales, gated=activation in GATED)
    tokens = random_tokens(rng, count, in_size)
    bias, residual = random_epilogue(rng, count, weight, jnp.bfloat16)
    got = product(tokens, weight, bias, residual, activation, launch=launch)
    assert_equals_oracle(got, tokens, weight, bias, residual, activation, BLOCK)


@pytest.mark.slow
def test_another_number_of_tokens(product):
    """The same bits, with other columns and slots."""
    rng = np.random.default_rng(1)
    weight = random_weight(rng, 64, 1024, "e4m3")
    tokens = random_tokens(rng, 9, 1024, jnp.float16)
    call = functools.partial(product, weight=weight, bias=None, residual=None, activation=None)
    one = call(tokens, launch=Launch(16, 1, 2, 2, 4))
    some = Fp8Tokens(tokens.codes[:3], tokens.scale[:3], tokens.dtype)
    few_of_them = call(some, launch=Launch(8, 1, 2, 3, 4))
    np.testing.assert_array_equal(wide(few_of_them), wide(one)[:3])


def test_shares_of_programs_and_of_a_cluster(product):
    """The same bits, whether warpgroups of a program share rows or programs of a cluster."""
    rng = np.random.default_rng(3)
    weight = random_weight(rng, 64, 1104, "e4m3")
    tokens = random_tokens(rng, 5, 1104)
    call = functools.partial(product, weight=weight, bias=None, residual=None, activation=None)
    want = call(tokens, launch=Launch(8, 1, 4, 2, 3))
    for launch in (Launch(8, 4, 1, 2, 9, splits=4), Launch(8, 2, 2, 3, 5, splits=2)):
        np.testing.assert_array_equal(wide(call(tokens, launch=launch)), wide(want))


def test_rounded_in_the_program(product):
    """The bits of a product whose tokens were rounded before."""
    rng = np.random.default_rng(2)
    weight = random_weight(rng, 64, 528, "e4m3")
    x = jnp.asarray(rng.normal(size=(5, 528)), jnp.bfloat16).at[2, 7].set(jnp.nan)
    call = functools.partial(product, weight=weight, bias=None, residual=None, activation=None)
    for launch in (Launch(8, 1, 2, 2, 3), Launch(8, 2, 1, 2, 5, splits=2)):
        want = call(quantize_tokens(x), launch=launch)
        np.testing.assert_array_equal(wide(call(x, launch=launch)), wide(want))
    assert np.isnan(wide(want)[2]).all()
    assert np.isfinite(wide(want)[3]).all()


# Lowering -----------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(
    ("shape", "scales", "activation"),
    [((5, 75, 300), "e4m3", "swiglu"), ((64, 4096, 14336), "bf16", None)],
)
def test_lowers(shape, scales, activation, is_rounded):
    """Tokens in e4m3 and others, which the kernel rounds itself where it can."""
    tokens, weight = specification(*shape, scales=scales, gated=activation == "swiglu")
    rows = shape[0]
    launch = few_mosaic.default_launch(rows, weight, rounds=not is_rounded)
    residual = jax.ShapeDtypeStruct((rows, weight.result_size), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((128, 16), jnp.uint8) if scales == "e4m3" else None
    given = tokens if is_rounded else jax.ShapeDtypeStruct(tokens.codes.shape, jnp.bfloat16)

    def call(tokens, weight, residual, tables):
        options = {"activation": activation, "launch": launch, "tables": tables}
        return few_mosaic.matmul(tokens, weight, None, residual, **options)

    text = lower_for_cuda(call, given, weight, residual, tables)
    assert "turbojax_int4_few_hopper" in text
    assert ("turbojax_fp8_tokens" in text) == (not is_rounded and not launch.rounds)


def interleaved(codes, columns, groups):
    """Codes ``[M, inputs]`` as `Loads.finish` leaves them, by the definition."""
    out = np.zeros((groups, columns, 128), np.uint8)
    padded = np.zeros((columns, groups * 128), np.uint8)
    # The sign of NaN is the device's.
    codes = np.where((codes & 127) == 127, 127, codes)
    padded[: len(codes)] = np.where(codes[:, :1] == 127, 127, 0)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    for group, column, chunk in np.ndindex(groups, columns, 8):
        byte = 128 * group + 16 * chunk
        place = 16 * (chunk ^ (column % 8))
        out[group, column, place : place + 16] = padded[column, byte : byte + 16]
    return out


def rounded(monkeypatch, x, r):
    """What each program of a cluster leaves in its memory: codes and scales."""
    for module in (rounding, eight_bits):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr(rounding, "ClusterPointer", programs.ClusterPointer)
    sizes = (r.groups * r.columns * 128, r.columns * 4, max(r.columns, r.warps) * 4)
    ends = [sum(sizes[: i + 1]) for i in range(3)]
    given = warp.Pointer(np.asarray(x).reshape(-1).view(np.uint8))

    def body(rank, shared):
        places = (shared, shared.at(warp.integer(ends[0])), shared.at(warp.integer(ends[1])))
        rounding.Loads.start(given, warp.integer(rank * r.groups), r).finish(*places)

    options = {"programs": r.parts, "warps": r.warps, "shared": ends[2]}
    programs.run(monkeypatch, body, **options)
    for memory in programs.ClusterPointer.memories:
        codes = memory[: ends[0]].reshape(r.groups, r.columns, 128)
        yield codes, memory[ends[0] : ends[1]].view(np.float32)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("tokens", "inputs", "columns", "warpgroups", "parts", "dtype"),
    [
        (1, 384, 8, 1, 1, jnp.bfloat16),
        (5, 200, 8, 2, 2, jnp.float16),
        (16, 1280, 16, 4, 2, jnp.bfloat16),
        (3, 1280, 8, 4, 1, jnp.bfloat16),
        (33, 264, 64, 4, 4, jnp.bfloat16),
    ],
)
def test_the_bits_of_the_definition(monkeypatch, tokens, inputs, columns, warpgroups, parts, dtype):
    """Zeros, outliers, and tokens with NaN or infinity among them; parts without any input."""
    x = activations((tokens, inputs), dtype)
    x = x.at[0, inputs - 1].set(jnp.inf) if tokens > 1 else x
    x = x.at[1, 0].set(jnp.nan).at[3].set(0) if tokens > 4 else x
    groups = -(-inputs // 128 // parts)
    r = Rounding(x.dtype.name, tokens, inputs, columns, groups, parts, warpgroups)
    want = tj.fireq.quantize_tokens(x)
    expected = interleaved(bits(want.codes).astype(np.uint8), columns, groups * parts)
    parts_of = np.split(expected, parts)
    found = list(rounded(monkeypatch, x, r))
    assert len(found) == parts
    for (codes, scales), part in zip(found, parts_of, strict=True):
        np.testing.assert_array_equal(scales[:tokens], want.scale.astype(jnp.float32))
        np.testing.assert_array_equal(np.where((codes & 127) == 127, 127, codes), part)


def test_words_that_a_lane_holds():
    """Those of 16 tokens of a Llama's down product, in a cluster of 8; and of whole tokens."""
    assert Rounding("bfloat16", 16, 14336, 16, 14, 8, 4).held == 7
    assert Rounding("bfloat16", 16, 4096, 16, 32, 1, 4).held == 16
    assert Rounding("bfloat16", 17, 4096, 32, 32, 1, 4).held == 32
    # All warps share one token, five of them each of three.
    assert Rounding("bfloat16", 1, 4096, 8, 32, 1, 4).held == 1
    assert Rounding("bfloat16", 3, 4096, 8, 32, 1, 4).held == 4


# How many kernels a layer takes -------------------------------------------------------------------


def layer(tokens):
    """A Llama's weights as shapes, and its products in a function; attention is left out."""
    hidden, inner = 4096, 14336
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    weights = {
        "qkv": abstract_weight(6144, hidden),
        "o": abstract_weight(hidden, hidden),
        "gate_up": abstract_weight(2 * inner, hidden, gated=True),
        "down": abstract_weight(hidden, inner),
    }
    norm = jax.ShapeDtypeStruct((hidden,), jnp.float32)

    def products(x, norm, weights, rounded):
        normed = tj.fireq.rms_norm_quantize(x, norm, 1e-5)
        attended = tj.fireq.matmul(normed, weights["qkv"])[:, :hidden]
        x = tj.fireq.matmul(rounded(attended), weights["o"], residual=x)
        normed = tj.fireq.rms_norm_quantize(x, norm, 1e-5)
        inner = tj.fireq.matmul(normed, weights["gate_up"], activation="swiglu")
        return tj.fireq.matmul(rounded(inner), weights["down"], residual=x)

    return products, (x, norm, weights)


def kernels(text):
    """Calls of our kernels in a lowered program, by name; each is a function that is called."""
    names = (
        "turbojax_fp8_tokens_hopper",
        "turbojax_int4_few_hopper",
        "turbojax_int4_matmul_hopper",
    )
    calls = [line for line in text.splitlines() if "custom_call" in line]
    return {name: sum(name in line for line in calls) for name in names}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("tokens", [1, 16])
def test_kernels_of_a_layer(hopper, tokens):
    """Two norms that round and four products; more where launches round.

    A program of the last product has too many of a token's inputs to round them itself.
    """
    function, arguments = layer(tokens)

    def count(rounded):
        def call(*given):
            # Functions that are called twice are lowered once, unless they are inlined.
            return function(*given, rounded)

        return kernels(lower_for_cuda(call, *arguments))

    apart, together = count(tj.fireq.quantize_activation), count(lambda x: x)
    assert apart["turbojax_fp8_tokens_hopper"] - together["turbojax_fp8_tokens_hopper"] == 1
    assert apart["turbojax_int4_few_hopper"] == together["turbojax_int4_few_hopper"] == 4
    assert together["turbojax_int4_matmul_hopper"] == 0
