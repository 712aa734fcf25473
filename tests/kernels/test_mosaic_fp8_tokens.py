"""Activations to e4m3 on Hopper: the kernel emulated on a CPU against the definition; lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper import fp8_tokens as kernel
from tests.caches.test_fp8_tokens import EPS, activations, assert_same_bits, bits, norm_scale, wide
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes
from turbojax.matmul.fp8_tokens import (
    mosaic_gpu,
    quantize_activation,
    rms_norm_quantize,
    scale_quantize,
)

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# A run of eight channels a lane, several, the last lanes without; runs of four, two and one.
CHANNELS = (1024, 5000, 300, 46, 9, 1)


@pytest.fixture
def quantize(monkeypatch):
    """The kernel's adapter, traced anew, so that no trace is kept for others."""
    lanes.patch(monkeypatch, kernel, eight_bits)
    return jax.jit(mosaic_gpu.quantize.__wrapped__, static_argnames="eps")


@pytest.mark.quick(first=3, slow=0)
@pytest.mark.parametrize(
    ("channels", "dtype", "tokens"),
    [
        (1024, jnp.bfloat16, 3),
        (5000, jnp.float16, 2),
        (46, jnp.float32, 3),
        *pairwise(channels=CHANNELS, dtype=DTYPES, tokens=(2, 4)),
    ],
)
def test_the_bits_of_the_definition(quantize, channels, dtype, tokens):
    x = activations((tokens, channels), dtype)
    assert_same_bits(quantize(x, None, eps=0.0), quantize_activation(x, implementation="xla"))


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("channels", "dtype", "norm_dtype"),
    [
        (1024, jnp.bfloat16, jnp.float32),
        (300, jnp.float32, jnp.bfloat16),
        *pairwise(channels=CHANNELS[:-1], dtype=DTYPES, norm_dtype=DTYPES),
    ],
)
def test_norm(quantize, channels, dtype, norm_dtype):
    """Squares are summed in another order, so some codes differ, by one step."""
    x, scale = activations((3, channels), dtype), norm_scale(channels, norm_dtype)
    got = quantize(x, scale, eps=EPS)
    want = rms_norm_quantize(x, scale, EPS, implementation="xla")
    for a, b in ((got.codes, want.codes), (got.scale, want.scale)):
        difference = np.abs(bits(a) - bits(b))
        assert difference.max() <= 1
        assert np.count_nonzero(difference) <= 0.003 * x.size + 1


@pytest.mark.parametrize(("channels", "dtype"), [(1024, jnp.bfloat16), (46, jnp.float32)])
def test_factors_without_a_norm(quantize, channels, dtype):
    x, scale = activations((3, channels), dtype), norm_scale(channels, jnp.float32)
    got, want = quantize(x, scale, eps=None), scale_quantize(x, scale, implementation="xla")
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_many_programs_lanes_share(quantize, monkeypatch, dtype):
    """As few lanes as there may be: several runs for each."""
    monkeypatch.setattr(mosaic_gpu, "_FEW", 0)
    x = activations((2, 3000), dtype)
    assert mosaic_gpu.warpgroups(*x.shape) == 1
    assert_same_bits(quantize(x, None, eps=0.0), quantize_activation(x, implementation="xla"))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_marks_its_token(quantize, bad):
    x = activations((4, 200), jnp.float32).at[1, 190].set(bad).at[2, 0].set(bad)
    for scale in (None, jnp.ones(200)):
        for dtype in DTYPES:
            got = quantize(x.astype(dtype), scale, eps=EPS)
            np.testing.assert_array_equal(np.isnan(wide(got.scale)), [False, True, True, False])
            assert np.isnan(wide(got.codes)[1:3]).all()
            assert np.isfinite(wide(got.codes)[[0, 3]]).all()


def test_zeros_and_limits(quantize):
    """Zeros, numbers below the normal ones, the smallest scale, and a scale that rounds down."""
    tiny = float(np.finfo(np.float32).tiny)
    # 1.00390625 lies halfway between bfloat16 numbers, of which the even one is 1.
    rows = [[0.0, -0.0, 0.0], [tiny / 2, 0, 0], [tiny, 0, 0], [448 * 1.00390625, -1.0, 5.5]]
    got = quantize(jnp.asarray(rows, jnp.float32), None, eps=0.0)
    np.testing.assert_array_equal(wide(got.scale), [1, 1, tiny, 1])
    np.testing.assert_array_equal(wide(got.codes)[:2], 0)
    np.testing.assert_array_equal(wide(got.codes)[2:], [[1, 0, 0], [448, -1, 5.5]])


# The choice, and that it lowers -------------------------------------------------------------------


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("channels", "dtype", "tokens", "norm_dtype"),
    [
        (4096, jnp.bfloat16, 16, jnp.bfloat16),
        (300, jnp.float32, 3000, None),
        *pairwise(
            channels=(*CHANNELS, 4096, 2**15),
            dtype=DTYPES,
            tokens=(1, 3000),
            norm_dtype=(None, *DTYPES),
        ),
    ],
)
def test_it_lowers(hopper, channels, dtype, tokens, norm_dtype):
    x = jax.ShapeDtypeStruct((tokens, channels), dtype)
    call, given = quantize_activation, (x,)
    if norm_dtype is not None:
        given = x, jax.ShapeDtypeStruct((channels,), norm_dtype)
        call = functools.partial(rms_norm_quantize, eps=EPS)
    assert kernel.NAME in str(jax.make_jaxpr(call)(*given))
    assert "custom_call @mosaic_gpu" in lower_for_cuda(call, *given)


def test_it_lowers_under_vmap(hopper):
    x = jax.ShapeDtypeStruct((3, 5, 256), jnp.bfloat16)
    assert "custom_call @mosaic_gpu" in lower_for_cuda(jax.vmap(quantize_activation), x)


def test_too_many_channels_are_refused(hopper):
    x = jax.ShapeDtypeStruct((1, 2**15 + 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="32776 channels must be at most 32768"):
        jax.eval_shape(functools.partial(quantize_activation, implementation="mosaic_gpu"), x)


@pytest.mark.parametrize(
    ("tokens", "channels", "expected"),
    [(16, 4096, 4), (1024, 4096, 1), (1024, 14336, 4), (16, 128, 1), (9000, 2**15, 4)],
)
def test_lanes_of_a_program(tokens, channels, expected):
    assert mosaic_gpu.warpgroups(tokens, channels) == expected
