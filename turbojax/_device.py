"""What the device can run: the predicates that the kernels' adapters share."""

import contextlib
import functools
import importlib.util
import os
from typing import Any

import jax

from pallas_kernels.varying import axes_of

AMPERE, ADA, HOPPER, BLACKWELL = 8.0, 8.9, 9.0, 10.0
"""Compute capabilities of NVIDIA's GPUs, the first of each."""

_MULTIPROCESSORS = 132
_REFUSES_UPDATES = (0, 11)  # the first version of jax that does, see `needs_updates`
# Part of the key of what `jax.jit` traced: a trace for the interpreter is not reused without it.
_INTERPRETING = jax.make_user_context(default_value=False)


@functools.cache
def gpu_compute_capability() -> float | None:
    """Compute capability of the default GPU, such as 9.0; None if that is not one of NVIDIA's."""
    if jax.default_backend() != "gpu":
        return None
    try:
        return float(jax.devices()[0].compute_capability)
    except (AttributeError, ValueError):  # AMD GPUs name an architecture instead
        return None


def has_gpu() -> bool:
    """Whether the default GPU is one of NVIDIA's."""
    return gpu_compute_capability() is not None


def lacks_e4m3() -> bool:
    """Whether the default GPU is NVIDIA's and too old to multiply e4m3, such as an Ampere."""
    found = gpu_compute_capability()
    return found is not None and found < ADA


def has_bfloat16() -> bool:
    """Whether the default device multiplies bfloat16; False for NVIDIA GPUs before Ampere."""
    found = gpu_compute_capability()
    return found is None or found >= AMPERE


def multiprocessors() -> int:
    """Number of multiprocessors of the default GPU; that of an H100 where there is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or _MULTIPROCESSORS


def total_memory() -> int | None:
    """Bytes of memory of this process' first device, for a CPU the host's; None if not known."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return host_memory()
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int | None:
    """Bytes of memory of the host; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


@functools.cache
def has_pallas_triton() -> bool:
    """Whether jax comes with Pallas' Triton backend, which it has deprecated."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def needs_gpu(minimum: float, *, by_pallas: bool = True) -> str | None:
    """None if a kernel for GPUs from `minimum` on can run compiled here, or the reason why not.

    `by_pallas` says whether Pallas lowers it to Triton.
    """
    if interpreting():
        return None
    if by_pallas and not has_pallas_triton():
        return f"needs Pallas' Triton backend, which jax {jax.__version__} does not have"
    found = gpu_compute_capability()
    if found is not None and found >= minimum:
        return None
    wanted = f"needs an NVIDIA GPU of compute capability {minimum:.1f} or newer"
    if found is None:
        return f"{wanted}; jax's default backend is {jax.default_backend()}"
    return f"{wanted}; {jax.devices()[0].device_kind} has {found:.1f}"


def needs_hopper() -> str | None:
    """None if code for Hopper can run here, or the reason why not in words.

    Kernels with products of warpgroups are compiled for ``sm_90a``, whose matrix instructions no
    other GPU has, newer ones included; and no interpreter can run them.
    """
    return _needs_one_of(HOPPER)


def needs_mosaic() -> str | None:
    """None if Mosaic's kernels without products of warpgroups can run here, or why not in words.

    They compile for data centers' GPUs from Ampere to Blackwell, and for Ada, but were run on
    Hopper only, see `is_measured`.
    """
    return _needs_one_of(AMPERE, ADA, HOPPER, BLACKWELL)


def needs_updates(*arrays: Any) -> str | None:
    """None if Mosaic's kernels can run here that write to such arrays in place, or why not.

    From 0.11 on jax refuses them in a `jax.shard_map` that checks along which axes arrays vary.
    """
    axes = sorted(axes_of(arrays)) if jax.__version_info__ >= _REFUSES_UPDATES else []
    if not axes:
        return needs_mosaic()
    return (
        f"arrays that vary along the mesh axes {axes}: jax {jax.__version__} refuses kernels that "
        "update these in place, but with jax.shard_map(check_vma=False)"
    )


def has_bulk_copies() -> bool:
    """Whether the default GPU copies in bulk, as GPUs since Hopper do; True where there is none."""
    found = gpu_compute_capability()
    return found is None or found >= HOPPER


def shared_memory() -> int:
    """Bytes of shared memory that a program can have on the default GPU; an H100's without one."""
    kib = {AMPERE: 163, ADA: 99}.get(gpu_compute_capability() or HOPPER, 227)
    return kib * 2**10


def too_much_memory(size: int) -> str | None:
    """Why a program cannot have so many bytes of shared memory here; None if it can."""
    most = shared_memory()
    return None if size <= most else f"{size} bytes of shared memory must be at most {most}"


def needs_e4m3() -> str | None:
    """Why the default GPU cannot convert from and to 8-bit floats; None if it can."""
    return f"needs compute capability {ADA} for 8-bit floats" if lacks_e4m3() else None


def is_measured() -> bool:
    """Whether Mosaic's kernels were run, checked and timed on such GPUs; True where is none."""
    return gpu_compute_capability() in (None, HOPPER)


def _needs_one_of(*capabilities: float) -> str | None:
    if interpreting():
        return "its kernel cannot be interpreted"
    found = gpu_compute_capability()
    if found in capabilities:
        return None
    *most, last = map(str, capabilities)
    names = f"{', '.join(most)} or {last}" if most else last
    wanted = f"needs an NVIDIA GPU of compute capability {names}, for which alone it is compiled"
    if found is None:
        return f"{wanted}; jax's default backend is {jax.default_backend()}"
    return f"{wanted}; {jax.devices()[0].device_kind} has {found:.1f}"


def unindexable(*sizes: int) -> str | None:
    """Why kernels cannot index arrays of these sizes (in bytes); None if they can.

    The Triton lowering computes offsets as signed 32-bit integers up to 2**32 bytes, although those
    of 1-byte elements overflow from 2**31 on; beyond it uses 64 bits.
    """
    for size in sizes:
        if 2**31 < size <= 2**32:
            return f"an array of {size} bytes, between {2**31} and {2**32}, cannot be indexed"
    return None


def interpreting() -> bool:
    """Whether kernels are to be interpreted."""
    found: bool = _INTERPRETING.value
    return found


def interpret_kernels(*, on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Context in which kernels run interpreted, on any device: slow, for tests."""
    context: contextlib.AbstractContextManager[None] = _INTERPRETING(on)
    return context
