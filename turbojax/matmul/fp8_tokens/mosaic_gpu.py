"""The Mosaic GPU kernel behind `fp8_tokens`."""

import functools

import jax
import numpy as np

from turbojax._device import needs_e4m3, needs_mosaic
from turbojax.numerics.fp8 import Fp8Tokens

_LARGEST = 2**15
_THREADS, _MOST_WARPGROUPS = 128, 4
# Up to this many tokens, fewer than run at once, a lane has as little to do as possible; beyond it,
# a lane has this many channels.
_FEW, _CHANNELS = 512, 32


def unsupported(*, x: jax.Array, scale: jax.Array | None) -> str | None:
    """Why the kernel cannot run this here; None if it can."""
    del scale
    if x.shape[1] > _LARGEST:
        return f"{x.shape[1]} channels must be at most {_LARGEST}"
    return needs_mosaic() or needs_e4m3()


def warpgroups(tokens: int, channels: int) -> int:
    """Warpgroups of a program, which takes a token."""
    run = next(n for n in (8, 4, 2, 1) if channels % n == 0)
    each = run if tokens <= _FEW else _CHANNELS
    return max(1, min(_MOST_WARPGROUPS, -(-channels // (_THREADS * each))))


@functools.partial(jax.jit, static_argnames="eps")
def quantize(x: jax.Array, scale: jax.Array | None, *, eps: float | None) -> Fp8Tokens:
    """`reference.quantize` as one kernel."""
    from pallas_kernels.mosaic.hopper import fp8_tokens

    settings = fp8_tokens.Settings(
        channels=x.shape[1],
        dtype=x.dtype.name,
        norm_dtype=None if scale is None else scale.dtype.name,
        eps=eps,
        warpgroups=warpgroups(*x.shape),
    )
    codes, scales = fp8_tokens.quantize(x, scale, settings)
    return Fp8Tokens(codes, scales, np.dtype(x.dtype))
