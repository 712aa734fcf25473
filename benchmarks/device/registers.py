"""Registers and spills of the Mosaic GPU kernels, by compiling them for a GPU that is not there.

`python -m benchmarks.device.registers [PATTERN]` needs no GPU: jax's CUDA plugin compiles for a
device that it is told about, and calls ptxas, which tells what each kernel takes. A kernel that
spills in its inner loop is slower than it need be, and a change that spills more is seen here
before it is timed. Cases are prompts and gradients as users call them, and those of
`sanitizer_cases`. ``--capability 10.0`` compiles for a B200 instead of an H100, and says which
kernels do not compile for it. With `MOSAIC_GPU_DUMP_TO=FOLDER` in the environment, the kernels' PTX
is left there, for `ptxas` and `nvdisasm`.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from turbojax import _extras

# What XLA asks a device for. Rates do not matter: no kernel here is chosen by them.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# By compute capability: a device's name and multiprocessors.
_DEVICES = {
    "8.0": ("NVIDIA A100-SXM4-80GB", 108),
    "8.9": ("NVIDIA L40S", 142),
    "9.0": ("NVIDIA H100 80GB HBM3", 132),
    "10.0": ("NVIDIA B200", 148),
}
_PROPERTIES = re.compile(
    r"properties for (?P<name>\S+)\n.*?(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class Kernel(NamedTuple):
    """What ptxas says of a kernel.

    Attributes:
      name: its name.
      registers: of a thread when it starts; warpgroups that attend get more.
      stores: bytes that a thread spills, wherever that is in the program.
      loads: bytes that it loads again.
    """

    name: str
    registers: int
    stores: int
    loads: int


def parse(text: str) -> list[Kernel]:
    """The kernels in what ptxas prints with ``-v``."""
    return [
        Kernel(x["name"], int(x["registers"]), int(x["stores"]), int(x["loads"]))
        for x in _PROPERTIES.finditer(text)
    ]


def described(capability: str = "9.0") -> Any:
    """A device of which there is only a description, but for its name and generation an H100's."""
    from jax.experimental import topologies

    name, cores = _DEVICES[capability]
    major, minor = capability.split(".")
    target = _H100.replace("major: 9 minor: 0", f"major: {major} minor: {minor}")
    target = target.replace(_DEVICES["9.0"][0], name).replace("count: 132", f"count: {cores}")
    given = {"target_config": target, "topology": "1x1x1"}
    try:
        return topologies.get_topology_desc("gpu", platform="cuda", **given).devices[0]
    except Exception as error:  # whatever jax raises without the plugin, or for an older one
        sys.exit(f"this needs jax's CUDA plugin, {_extras.install('gpu')}: {error}")


@contextlib.contextmanager
def lowering_for(capability: str) -> Iterator[None]:
    """While functions are lowered for such a GPU; our adapters are told that it is an H100."""
    import jax

    from turbojax import _device

    @dataclasses.dataclass(frozen=True)
    class Described(jax.sharding.AbstractDevice):
        """What Mosaic asks a device for."""

        compute_capability: str = capability

    name, cores = _DEVICES[capability]
    device = Described(device_kind=name, num_cores=cores, platform="cuda")
    axes = {"axis_types": (jax.sharding.AxisType.Auto,), "abstract_device": device}
    mesh = jax.sharding.AbstractMesh((1,), ("device",), **axes)
    with (
        mock.patch.object(_device, "gpu_compute_capability", return_value=float(capability)),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


def kernels(
    call: Callable[..., Any], arguments: tuple[Any, ...], device: Any, capability: str = "9.0"
) -> list[Kernel]:
    """The Mosaic GPU kernels of a call, compiled."""
    import jax

    there = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments
    )
    with lowering_for(capability):
        lowered = jax.jit(call).lower(*shapes)
    with _output() as text:
        lowered.compile()
    return parse(text())


@contextlib.contextmanager
def _output() -> Iterator[Callable[[], str]]:
    """What this process prints, from C++ too."""
    with tempfile.TemporaryFile() as file:
        streams = [(stream, os.dup(stream)) for stream in (1, 2)]
        sys.stdout.flush()
        for stream, _ in streams:
            os.dup2(file.fileno(), stream)
        text = ""
        try:
            yield lambda: text
        finally:
            for stream, kept in streams:
                os.dup2(kept, stream)
                os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")


def _prompts(mode: Any, head_dim: int, is_causal: bool, gradient: Any = None) -> Any:
    """A call of 2 x 8,192 tokens with grouped queries, and its gradient."""
    import jax
    import jax.numpy as jnp

    import turbojax as tj

    if mode == "paper":
        config = tj.TurboConfig.paper()
    else:
        config = tj.TurboConfig(mode=mode, gradient=gradient or "float")
    attend = functools.partial(
        tj.turbo_attention, config=config, is_causal=is_causal, implementation="mosaic_gpu"
    )

    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(attend, *arrays)
        return pull(out)

    shapes = tuple(
        jax.ShapeDtypeStruct((2, 8192, heads, head_dim), jnp.bfloat16) for heads in (16, 4, 4)
    )
    return (attend if gradient is None else both), shapes


def cases() -> dict[str, Callable[[], Any]]:
    """What makes a function and its arguments, by name."""
    from benchmarks.device.sanitizer_cases import CASES

    made: dict[str, Callable[[], Any]] = {}
    for mode in ("fp8", "int8_fp8", "int8", "paper"):
        for head_dim in (64, 128, 256):
            for is_causal in (False, True):
                name = f"prompts, {mode}, {head_dim}" + ", causal" * is_causal
                made[name] = functools.partial(_prompts, mode, head_dim, is_causal)
    for mode in ("fp8", "int8_fp8"):
        for gradient in ("float", "8bit"):
            name = f"gradient, {mode}, {gradient}"
            made[name] = functools.partial(_prompts, mode, 128, True, gradient)
    return made | {name: case.build for name, case in CASES.items() if case.needs is None}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="regular expression on the names")
    parser.add_argument("--capability", choices=_DEVICES, default="9.0", help="of the GPU")
    given = parser.parse_args(arguments)
    pattern, capability = given.pattern, given.capability
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    device = described(capability)
    print("registers, bytes stored and loaded by spills, kernel: case", flush=True)
    for name, build in cases().items():
        if re.search(pattern, name):
            try:
                found = kernels(*build(), device, capability)
            except Exception as error:  # of the compiler, which refuses instructions by name
                if capability == "9.0":
                    raise
                print(f"does not compile: {name}: {str(error).splitlines()[0]}", flush=True)
                continue
            for kernel in found:
                print(*kernel[1:], f"{kernel.name}: {name}", flush=True)


if __name__ == "__main__":
    main()
