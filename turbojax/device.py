"""What the device suggests: a dtype to compute in, and which kernels run on it."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _device

_TRITON = "the Triton kernels and cuDNN's attention"
_E4M3 = "products in e4m3"
_HOPPER = "the Mosaic kernels for Hopper"


def compute_dtype() -> np.dtype:
    """The dtype that commands and notebooks compute in where nothing else decides.

    Returns:
      float32 on a CPU; float16 on NVIDIA GPUs before compute capability 8.0, such as a T4, which
      have no units for bfloat16; bfloat16 on all others. Float16 ends at 65,504: models whose
      residual stream grows beyond it, as those of Gemma 2 and 3 may, need float32 there.
    """
    half = half_dtype()
    is_wide = half == jnp.bfloat16 and jax.default_backend() == "cpu"
    return jnp.dtype(jnp.float32) if is_wide else half


def half_dtype() -> np.dtype:
    """The 16-bit dtype of this device: bfloat16, or float16 on NVIDIA GPUs that lack bfloat16."""
    return jnp.dtype(jnp.bfloat16 if _device.has_bfloat16() else jnp.float16)


def has_kernels() -> bool:
    """Whether the default device is a GPU that Triton kernels run on: NVIDIA's from Ampere on.

    Elsewhere plain JAX runs everything, whose time does not shrink with what levels skip.
    """
    found = _device.gpu_compute_capability()
    return found is not None and _device.has_bfloat16()


def kernels() -> str:
    """One line: which kernels run on the default device, and what an L4, A100 or H100 would add.

    `turbojax doctor` lists them op by op.
    """
    backend, found = jax.default_backend(), _device.gpu_compute_capability()
    if found is None and backend != "gpu":
        return (
            f"{backend.upper()}: no kernels, plain JAX runs everything. An A100 adds {_TRITON}, "
            f"an L4 also {_E4M3}, an H100 {_HOPPER}."
        )
    kind = jax.devices()[0].device_kind
    if found is None:
        return f"{kind}: no kernels, which are for NVIDIA GPUs; plain JAX runs everything."
    name = f"{kind} (compute capability {found})"
    if not _device.has_bfloat16():
        return (
            f"{name}: no kernels and no bfloat16 units; plain JAX runs everything, in float16. An "
            f"A100 adds {_TRITON}, an L4 also {_E4M3}, an H100 {_HOPPER}."
        )
    if _device.lacks_e4m3():
        return f"{name}: {_TRITON}. An L4 adds {_E4M3}, an H100 {_HOPPER}."
    if _device.needs_hopper() is None:
        return f"{name}: {_HOPPER}, {_TRITON}."
    return f"{name}: {_TRITON}, {_E4M3}. An H100 adds {_HOPPER}."
