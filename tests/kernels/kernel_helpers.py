"""What the tests of the kernels share: lowering for a GPU on a machine without one."""

import contextlib

import jax
import jax.numpy as jnp

from turbojax._device import interpret_kernels
from turbojax.attention.score_modifiers import ScoreModifiers

# The name by which newer versions of jax look up what a GPU can do.
_GPU = "NVIDIA H100 80GB HBM3"


def gpu_type():
    """An H100 as jax's meshes describe it, on any machine."""
    return jax.sharding.AbstractDevice(device_kind=_GPU, num_cores=132, platform="cuda")


def abstract_gpu():
    """A context in which jax lowers for an H100, on any machine."""
    if any(device.platform == "gpu" for device in jax.devices()):
        return contextlib.nullcontext()
    axes = {"axis_types": (jax.sharding.AxisType.Auto,), "abstract_device": gpu_type()}
    mesh = jax.sharding.AbstractMesh((1,), ("device",), **axes)
    return jax.sharding.use_abstract_mesh(mesh)


def lower_for_cuda(f, *args, **kwargs):
    """Lowers `f`, jitted or not, of arrays or `ShapeDtypeStruct`s for a GPU; returns the text.

    A kernel that runs in interpret mode may not lower: this is what finds it on a CPU.
    """
    jitted = f if hasattr(f, "trace") else jax.jit(f)
    with abstract_gpu(), interpret_kernels(on=False):
        lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


SEGMENTS = ("query_segment_ids", "key_value_segment_ids")
OFFSETS = ("query_offset", "key_offset")


def modifiers_of(names, batch, tokens, size, heads):
    """Shapes and dtypes of these modifiers, as arguments of `lower_for_cuda`."""
    kinds = {
        "query_offset": ((batch,), jnp.int32),
        "key_offset": ((batch,), jnp.int32),
        "query_segment_ids": ((batch, tokens), jnp.int32),
        "key_value_segment_ids": ((batch, size), jnp.int32),
        "key_bounds": ((batch, tokens), jnp.int32),
        "bias": ((batch, heads, tokens, size), jnp.float32),
        "alibi_slopes": ((heads,), jnp.float32),
        "sinks": ((heads,), jnp.float32),
    }
    given = {name: jax.ShapeDtypeStruct(*kinds[name]) for name in names}
    if "key_bounds" in given:
        given["key_bounds"] = (given["key_bounds"],) * 2
    return ScoreModifiers(**given)
