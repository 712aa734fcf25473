"""What commands check before anything slow: files to write, and memory."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from turbojax import _device, _extras
from turbojax.caches import CacheKind, init_layer_cache
from turbojax.models import TransformerConfig
from turbojax.models.generation.caching import (
    ModelCacheKind,
    kinds_of_layers,
    widths_of,
    windows_of_layers,
)


def check_output_file(option: str, path: Path | None) -> None:
    """Raises ValueError, naming the option, unless `path` is None or can be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} {path} must be a file in a folder that exists")
    if path.exists() and not path.is_file():  # such as /dev/null
        return
    if not path.exists():
        _check_writable(option, path, path.parent)
    elif not os.access(path, os.W_OK):  # a folder that is read-only may hold one that is not
        raise ValueError(f"{option} {path} must be a file that can be written")


def check_input_files(*paths: Path) -> None:
    """Raises OSError unless all of these files can be read."""
    for path in paths:
        path.open("rb").close()


def check_output_folder(option: str, path: Path) -> None:
    """Raises ValueError unless files can be written to this folder, which may not exist yet."""
    existing = next(x for x in (path, *path.absolute().parents) if x.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {path} must be a folder, {str(existing)!r} is a file")
    _check_writable(option, path, existing)


def check_plot(path: Path | None) -> None:
    """Raises unless a picture can be drawn to this file, if there is to be one.

    ImportError without matplotlib, ValueError if it does not know the ending or the file cannot be
    written.
    """
    if path is None:
        return
    _extras.need_matplotlib("--plot")
    from matplotlib.figure import Figure

    endings = sorted(Figure().canvas.get_supported_filetypes())
    # Without an ending, matplotlib would write to a file of another name.
    if path.suffix.lower().removeprefix(".") not in endings:
        raise ValueError(f"--plot {path} must end with one of .{', .'.join(endings)}")
    check_output_file("--plot", path)


def cache_bytes(
    config: TransformerConfig,
    dtype: np.dtype,
    batch_size: int,
    max_length: int,
    cache: ModelCacheKind,
) -> int:
    """Bytes of the caches that `models.init_caches` would make; ValueError if it could not."""

    def layer(kind: CacheKind, window: int | None, batch: int) -> int:
        heads, channels, rope_dim = widths_of(config, kind)
        sizes = (batch, max_length, heads, channels)
        options: Any = {"kind": kind, "dtype": dtype, "local_window_size": window}
        options["rope_dim"] = rope_dim
        return jax.eval_shape(lambda: init_layer_cache(*sizes, **options)).nbytes

    # Batches of 1 and 2 give the total, so that no array is as long as the batch: some parts, such
    # as a rotation, do not grow with it.
    kinds, total = kinds_of_layers(cache, config.num_layers), 0
    each = Counter(zip(kinds, windows_of_layers(config, kinds), strict=True))
    for (kind, window), layers in each.items():
        one, two = (layer(kind, window, batch) for batch in (1, 2))
        total += layers * (one + (batch_size - 1) * (two - one))
    return total


def prompt_bytes(config: TransformerConfig, dtype: np.dtype, batch_size: int, length: int) -> int:
    """Bytes that prompts take at least while they run through a layer.

    The residual stream and its norm, and the two factors of the feed-forward network's product.
    What attention takes depends on what runs it, and is not counted.
    """
    inner = config.intermediate_size
    if config.experts is not None:
        chosen = config.experts.per_token * config.experts.intermediate_size
        inner = max(inner, chosen) if config.experts.dense_layers else chosen
    width = 2 * (config.hidden_size + inner)
    return batch_size * length * width * dtype.itemsize


def check_memory(needs: Mapping[str, int], smaller: str, available: int | None = None) -> None:
    """Raises ValueError if a run needs more memory than there is.

    `needs` are bytes by what they are for; `smaller` says what can be done about it. There are
    `available` bytes, by default `available_memory`; where that is unknown, nothing is refused.
    """
    free = available_memory() if available is None else available
    total = sum(needs.values())
    if free is None or total <= free:
        return
    parts = ", ".join(
        f"{_size(size)} of {name}"
        for name, size in sorted(needs.items(), key=lambda item: -item[1])
        if size * 100 >= total
    )
    raise ValueError(
        f"this needs at least {_size(total)} of memory ({parts}), and {_size(free)} are free: "
        f"{smaller}"
    )


def available_memory() -> int | None:
    """Bytes that jax's default device can still give; None where that is not known.

    For a CPU this is what Linux calls available and free swap, or less where a control group, as
    containers have one, allows less; on other systems all memory there is.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        held = device.memory_stats() or {}
        limit = held.get("bytes_limit")
        return None if limit is None else max(0, limit - held.get("bytes_in_use", 0))
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return _device.host_memory()
    lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
    sizes = {line[0]: 1024 * int(line[1]) for line in lines if len(line) == 3}
    if "MemAvailable:" not in sizes:
        return None
    return min([sizes["MemAvailable:"] + sizes.get("SwapFree:", 0), *_group_memory()])


def _group_memory(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group of this process may still take; cached files count as free."""
    try:
        named = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next(line[3:] for line in named if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = root / own.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        try:
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            current = int((folder / "memory.current").read_text(encoding="ascii"))
            rows = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue
        cached = sum(
            int(row.split()[1])
            for row in rows
            if row.startswith(("inactive_file ", "active_file "))
        )
        if limit != "max":
            yield max(0, int(limit) - current + cached)


def _check_writable(option: str, path: Path, folder: Path) -> None:
    """Raises ValueError unless files can be made in the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {path} must be where files can be written: {str(folder)!r}: {error.strerror}"
        ) from error


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
