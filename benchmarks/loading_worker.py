"""Loads a checkpoint and says how long it took and how much memory: `METHOD FOLDER`, JSON out."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from turbojax import models
from turbojax.models.families.tensors import checkpoint_tensors

# Weights repeat after this many numbers; no two tensors begin at the same place.
_BLOCK = 1 << 22
_SAMPLED_SECONDS = 0.005


def weights() -> np.ndarray:
    """uint16 ``[_BLOCK]``: the bits of normal numbers of standard deviation 0.02 in bfloat16."""
    values = 0.02 * np.random.default_rng(0).standard_normal(_BLOCK, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def begin_of(name: str) -> int:
    """Where in `weights` a tensor begins; its values go on from there cyclically."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(name)) * 97 % _BLOCK


class HostMemory:
    """The most memory of this process's own, above what it had at first, while in a `with`.

    Attributes:
      peak: bytes, or None where the system does not tell. Pages of files are not in it.
    """

    def __init__(self) -> None:
        self._before = _own_bytes()
        self._done = threading.Event()
        self._most = self._before or 0

    @property
    def peak(self) -> int | None:
        return None if self._before is None else self._most - self._before

    def __enter__(self) -> "HostMemory":
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLED_SECONDS):
            self._most = max(self._most, _own_bytes() or 0)


def _own_bytes() -> int | None:
    """Resident bytes that are not pages of files."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    names = ("RssAnon:", "RssShmem:")
    lines = status.read_text(encoding="utf-8").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(names))


def main() -> None:
    method, folder = sys.argv[1], Path(sys.argv[2])
    if method == "read":
        begun = time.perf_counter()
        _read(folder)
        print(json.dumps({"seconds": time.perf_counter() - begun}))
        return
    load: Callable[[Path], Any] = {
        "load_decoder": models.load_decoder,
        "load": models.load,
        "naive": _naive,
    }[method]
    # The device is ready before the clock starts.
    jax.block_until_ready(jnp.zeros(8) + 1)
    with HostMemory() as host:
        begun = time.perf_counter()
        model = jax.block_until_ready(load(folder))
        seconds = time.perf_counter() - begun
    # Before the check, which copies.
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    _check(method, folder, model)
    print(json.dumps({"seconds": seconds, "peak_device_bytes": peak, "peak_host_bytes": host.peak}))


def _read(folder: Path) -> None:
    buffer = bytearray(1 << 26)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _naive(folder: Path) -> dict[tuple[str, ...], jax.Array]:
    """The arrays of a `Transformer` by path: files in memory, then stacked on the device."""
    config = models.TransformerConfig.from_hf(models.read_config(folder))
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    layers: dict[tuple[str, ...], list[jax.Array]] = {}
    made = {}
    stacked = [spec for spec in checkpoint_tensors(config) if spec.placements[0].layer is not None]
    for spec in checkpoint_tensors(config):
        [place] = spec.placements
        if place.layer is None:
            made[place.path] = jnp.asarray(tensors[spec.name])
    for path in dict.fromkeys(spec.placements[0].path for spec in stacked):
        for spec in stacked:
            [place] = spec.placements
            if place.path == path:
                array = jnp.asarray(tensors[spec.name])
                layers.setdefault(path, []).append(array.T if place.transpose else array)
        made[path] = jax.block_until_ready(jnp.stack(layers.pop(path)))
    return made


def _check(method: str, folder: Path, model: Any) -> None:
    """Raises ArithmeticError unless the last layer's weights are those that were written."""
    config = models.TransformerConfig.from_hf(models.read_config(folder))
    last, numbers = config.num_layers - 1, weights()
    name = f"model.layers.{last}.mlp.down_proj.weight"
    begin = begin_of(name)
    want = numbers[(begin + np.arange(64)) % numbers.size]
    if method == "load_decoder":
        kernel = model.layers[last]["mlp"]["down_proj"]["kernel"]
    elif method == "load":
        kernel = model.blocks.mlp.down_proj.kernel.get_value()[last]
    else:
        kernel = model["blocks", "mlp", "down_proj", "kernel"][last]
    got = np.asarray(kernel[:64, 0]).view(np.uint16)
    if not np.array_equal(got, want):
        raise ArithmeticError(f"{name} is not what was written")


if __name__ == "__main__":
    main()
