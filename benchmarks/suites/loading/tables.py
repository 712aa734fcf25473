"""Table and plot of loading a checkpoint: pure functions of its JSON."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATION = "loading"
"""How the rows' names begin."""
METHODS = {
    "read": "reading the files alone",
    "load_decoder": "`load_decoder`",
    "load": "`load`",
    "naive": "all shards, then `jnp.stack`",
}
"""Ways to load, as tables call them."""
PLOT = (
    "loading.png",
    "Loading a checkpoint: memory held at most, in units of the model's size",
)
_FILES = {"memory": "in the page cache", "disk": "on disk"}


def loading_table(result: Result) -> str:
    """Every way to load a checkpoint."""
    lines = []
    for row in tables.shown(result, OPERATION):
        name = [row["model"], _FILES[row["files"]], METHODS[row["method"]]]
        if row["status"] != "ok":
            lines.append([*name, tables.failure_cell(row), *[""] * 5])
            continue
        over = row.get("speedup_over", {}).get("naive")
        lines.append(
            [
                *name,
                f"{row['seconds']:.2f}",
                tables.times(over),
                f"{row['gigabytes_per_second']:.2f}",
                _times(row.get("peak_device_bytes"), row),
                _times(row.get("peak_host_bytes"), row),
                _times(row.get("largest_tensor_bytes"), row),
            ]
        )
    header = ["checkpoint", "files", "by", "seconds", "over all shards", "GB/s"]
    header += ["most on the device", "most on the host", "largest tensor"]
    return tables.with_cut(tables.table(header, lines), result, OPERATION)


def _times(count: int | None, row: Row) -> str:
    return "-" if count is None else f"{count / row['model_bytes']:.3f}x"


def loading_section(name: str, result: Result) -> str:
    """The table of docs/benchmarks and where its figures come from."""
    row = result["rows"][0]
    notes = (
        f"A checkpoint of {row['model_bytes'] / 1e9:.1f} GB in {row['shards']} shards, bfloat16; "
        "memory in units of it. Each row runs in a process of its own. Host memory is what the "
        "process itself allocates, above what it had before, without the pages of mapped files. "
    )
    picture = tables.picture(*PLOT)
    return f"{picture}{loading_table(result)}\n\n{notes}{tables.source(name, result)}"


def loading_bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """By what is counted and way to load: the peak over the model's size, and seconds."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    kinds = {
        "peak_device_bytes": "most on the device",
        "peak_host_bytes": "most on the host",
    }
    for row in tables.finished(result, OPERATION):
        if row["files"] != "memory" or row["method"] == "read":
            continue
        for key, place in kinds.items():
            if row.get(key) is not None:
                over = row[key] / row["model_bytes"]
                bar = (over, f"{over:.2f}x, {row['seconds']:.1f} s")
                groups.setdefault(place, {})[METHODS[row["method"]].replace("`", "")] = bar
    return groups


def memory_plot(result: Result) -> "Figure":
    """Most memory over the checkpoint's size, one bar per way to load it."""
    row = result["rows"][0]
    title = f"Loading {row['model']}, {row['model_bytes'] / 1e9:.1f} GB, on {result['device']}"
    bars = loading_bars(result)
    return plots.of_ratios(
        bars, title, "times the checkpoint's size", width=7, bar=0.25, margin=0.35
    )


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    parts = [f"{row['seconds']:.2f} s", f"{row['gigabytes_per_second']:.2f} GB/s"]
    parts += tables.ratio_parts(row)
    for key in ("peak_device_bytes", "peak_host_bytes"):
        if row.get(key) is not None:
            parts.append(f"{key} {row[key] / row['model_bytes']:.3f}x")
    return f"{row['name']}: {', '.join(parts)}"


TABLES: Mapping[str, Callable[[str, Result], str]] = {"loading": loading_section}
PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: memory_plot}
