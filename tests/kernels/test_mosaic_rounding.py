"""Tokens that a product rounds itself: emulated on a CPU against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper.matmul import rounding
from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding
from tests.caches.test_fp8_tokens import activations, bits
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import programs, warp
from turbojax import _device


def interleaved(codes, columns, groups):
    """Codes ``[M, inputs]`` as `load_rounded` leaves them, by the definition."""
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
    sizes = (r.groups * r.columns * 128, r.columns * 4, r.columns * 4)
    ends = [sum(sizes[: i + 1]) for i in range(3)]
    given = warp.Pointer(np.asarray(x).reshape(-1).view(np.uint8))

    def body(rank, shared):
        places = (shared, shared.at(warp.integer(ends[0])), shared.at(warp.integer(ends[1])))
        rounding.load_rounded(given, warp.integer(rank * r.groups), *places, r)

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
    """Those of 16 tokens of a Llama's down product, in a cluster of 8; and a whole token's."""
    assert Rounding("bfloat16", 16, 14336, 16, 14, 8, 4).held == 7
    assert Rounding("bfloat16", 1, 4096, 8, 32, 1, 4).held == 16


# How many kernels a layer takes -------------------------------------------------------------------


def layer(tokens):
    """A Llama's weights as shapes, and its products in a function; attention is left out."""
    hidden, inner = 4096, 14336
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    sizes = {
        "qkv": (6144, hidden, False),
        "o": (hidden, hidden, False),
        "gate_up": (2 * inner, hidden, True),
        "down": (hidden, inner, False),
    }
    weights = {name: shapes(*size) for name, size in sizes.items()}
    norm = jax.ShapeDtypeStruct((hidden,), jnp.float32)

    def products(x, norm, weights, rounded):
        normed = tj.fireq.rms_norm_quantize(x, norm, 1e-5)
        attended = tj.fireq.matmul(normed, weights["qkv"])[:, :hidden]
        x = tj.fireq.matmul(rounded(attended), weights["o"], residual=x)
        normed = tj.fireq.rms_norm_quantize(x, norm, 1e-5)
        inner = tj.fireq.matmul(normed, weights["gate_up"], activation="swiglu")
        return tj.fireq.matmul(rounded(inner), weights["down"], residual=x)

    return products, (x, norm, weights)


def shapes(outputs, inputs, gated):
    return tj.fireq.Int4Weight(
        jax.ShapeDtypeStruct((outputs // 64, inputs // 128, 64, 64), jnp.uint8),
        jax.ShapeDtypeStruct((outputs // 64, inputs // 128, 64), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((outputs,), jnp.float32),
        out_size=outputs,
        in_size=inputs,
        gated=gated,
    )


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
def test_kernels_of_a_layer(monkeypatch, tokens):
    """Two norms that round and four products; more where launches round.

    A program of the last product has too many of a token's inputs to round them itself.
    """
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
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
