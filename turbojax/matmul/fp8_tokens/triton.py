"""The Triton kernel behind `fp8_tokens`."""

import functools
from typing import Any

import jax
import numpy as np

from turbojax._device import (
    ADA,
    AMPERE,
    gpu_compute_capability,
    interpreting,
    needs_gpu,
    unindexable,
)
from turbojax.matmul.fp8_tokens import reference
from turbojax.numerics.fp8 import Fp8Tokens

_LARGEST = 2**15


def unsupported(*, x: jax.Array, scale: jax.Array | None) -> str | None:
    """Why the kernel cannot run this here; None if it can."""
    del scale
    if x.shape[1] > _LARGEST:
        return f"{x.shape[1]} channels must be at most {_LARGEST}"
    return unindexable(x.size * x.dtype.itemsize, x.size) or needs_gpu(AMPERE)


def quantize(x: jax.Array, scale: jax.Array | None, *, eps: float | None) -> Fp8Tokens:
    """`reference.quantize` as one kernel; without a norm, XLA multiplies by `scale` before."""
    if eps is None and scale is not None:
        x, scale = reference.scaled(x, scale, None), None
    capability = gpu_compute_capability()
    has_e4m3 = capability is None or capability >= ADA
    return _quantize(x, scale, eps=eps or 0.0, has_e4m3=has_e4m3)


@functools.partial(jax.jit, static_argnames=("eps", "has_e4m3"))
def _quantize(x: jax.Array, scale: jax.Array | None, *, eps: float, has_e4m3: bool) -> Fp8Tokens:
    from pallas_kernels.triton import fp8_tokens

    static: dict[str, Any] = {"eps": eps, "has_e4m3": has_e4m3, "interpret": interpreting()}
    codes, scales = fp8_tokens.quantize(x, scale, **static)
    return Fp8Tokens(codes, scales, np.dtype(x.dtype))
