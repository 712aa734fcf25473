"""Tables and bars of attention layers in nnx: pure functions of their JSON."""

from benchmarks import tables
from benchmarks.tables import Result, Row

# The operations of the suite, as they begin the rows' names.
DECODE, TRAINING = "flax-decode", "flax-training"
BASELINES = ("nnx", "nnx-cudnn")
"""What rows are compared with."""
METHODS = {
    "nnx": "`nnx.MultiHeadAttention`",
    "nnx-cudnn": "the same through cuDNN",
    "exact": "`TurboAttention`, exact cache",
    "turbo4": "`TurboAttention`, turbo4 pages",
    "4bit": "`TurboAttention`, 4-bit cache",
    "turbo-int8": "with `TurboAttentionFn()`",
    "turbo-fp8": "with `TurboAttentionFn`, fp8",
    "pooled": "with `PooledAttentionFn`, top-k",
}
"""Modules and functions, as tables call them."""
_SHORT = {
    "nnx-cudnn": "Flax's, cuDNN",
    "exact": "exact cache",
    "turbo4": "turbo4 pages",
    "4bit": "4-bit cache",
    "turbo-int8": "turbo, int8",
    "turbo-fp8": "turbo, fp8",
    "pooled": "pooled, top-k",
}
PLOT = "flax_speed.png"
_ALT = "Attention layers in nnx: speed over Flax's own module"
_UNITS = {"copy": "bytes", "bf16": "bf16"}


def _failure(row: Row) -> str:
    return f"{row['status']}: {row['reason'][:120]}".replace("|", "\\|")


def layer(row: Row) -> str:
    """``32 heads on 8 of 128, 16 x 8k``."""
    tokens = row["tokens"]
    size = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    return (
        f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}, {row['batch']} x {size}"
    )


def _ratios(row: Row) -> list[str]:
    over = row.get("speedup_over", {})
    return [f"{over[name]:.2f}x" if name in over else "-" for name in BASELINES]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(row: Row) -> str:
    percent = row["percent_of_ceiling"]
    # What is counted is dense attention's work, of which pooled attention leaves most out.
    return (
        "-"
        if percent is None or row["method"] == "pooled"
        else f"{percent:.0f} % ({_UNITS[row['bound']]})"
    )


def decode_table(result: Result) -> str:
    """Every layer, module and cache."""
    lines = []
    for row, name in _shown(result, DECODE, 8):
        lines.append(
            [
                *name,
                tables.number(row["us"]),
                *_ratios(row),
                tables.number(row["wall_us"]),
                f"{row['cache_bytes'] / 1e6:,.0f}",
                _times(row.get("smaller_than_nnx")),
                _share(row),
                f"{row['relative_l2']:.4f}",
            ]
            if row["status"] == "ok"
            else name
        )
    header = ["layer, batch x tokens", "module", "us", "over nnx", "over cuDNN", "wall, us"]
    header += ["cache, MB", "smaller", "of ceiling", "relative L2"]
    return _with_cut(result, DECODE, tables.table(header, lines))


def training_table(result: Result) -> str:
    """Every function."""
    lines = []
    for row, name in _shown(result, TRAINING, 8):
        memory = row.get("temporary_bytes")
        lines.append(
            [
                *name,
                f"{row['us'] / 1e3:.2f}",
                *_ratios(row),
                f"{row['wall_us'] / 1e3:.2f}",
                "-" if memory is None else f"{memory / 1e9:.2f}",
                _share(row),
                f"{row['relative_l2']:.4f}",
                f"{row['gradient_relative_l2']:.4f}",
            ]
            if row["status"] == "ok"
            else name
        )
    header = ["layer, batch x tokens", "attention", "ms", "over nnx", "over cuDNN", "wall, ms"]
    header += ["temporaries, GB", "of ceiling", "output, relative L2", "gradient"]
    return _with_cut(result, TRAINING, tables.table(header, lines))


def _shown(result: Result, operation: str, columns: int) -> list[tuple[Row, list[str]]]:
    """The rows of an operation with their names, and what a row that did not run shows."""
    found = []
    for row in result["rows"]:
        if row["operation"] == operation and row.get("reason") != tables.OUT_OF_TIME:
            name = [layer(row), METHODS[row["method"]]]
            if row["status"] != "ok":
                name += [_failure(row), *[""] * (columns - 1)]
            found.append((row, name))
    return found


def _with_cut(result: Result, operation: str, table: str) -> str:
    missing = tables.cut(result, operation)
    return table + (f"\n\n{missing}" if missing else "")


def page_section(name: str, result: Result, operation: str) -> str:
    """A table of docs/benchmarks and where its figures come from."""
    table = decode_table(result) if operation == DECODE else training_table(result)
    picture = f"![{_ALT}]({PLOT})\n\n" if operation == DECODE else ""
    names = {"copy": "Reading and writing 1 GiB: {:,.0f} GB/s. "}
    names |= {"bf16": "A product of 8192 x 8192 x 8192 through XLA: {:,.0f} TFLOP/s in bfloat16. "}
    rates = result["ceilings"]
    text = "".join(form.format(rates[unit]) for unit, form in names.items() if rates.get(unit))
    return f"{picture}{table}\n\n{text}{tables.source(name, result)}"


def _by_layer(result: Result, operation: str) -> dict[str, dict[str, Row]]:
    """The rows that were measured, by layer and method."""
    layers: dict[str, dict[str, Row]] = {}
    for row in tables.finished(result, operation):
        layers.setdefault(layer(row), {})[row["method"]] = row
    return layers


def summary(name: str, result: Result) -> str:
    """Decoding by layer: microseconds, the speed over Flax's module, and its cache's size."""
    shown = ("nnx", "nnx-cudnn", "exact", "turbo4", "4bit")
    lines = []
    for place, rows in _by_layer(result, DECODE).items():
        line = [place]
        for method in shown:
            if method not in rows:
                line.append("-")
                continue
            row = rows[method]
            text = tables.number(row["us"])
            over = row["speedup_over"].get("nnx")
            if method != "nnx" and over is not None:
                text += f" ({over:.2f}x)"
            line.append(f"{text}, {row['cache_bytes'] / 1e6:,.0f} MB")
        lines.append(line)
    header = ["layer, batch x tokens", *(METHODS[method] for method in shown)]
    note = (
        "Microseconds of a decode step of one attention layer, projections included, and the size "
        "of its cache; in brackets the speed over Flax's own module. Time of the kernels on the "
        "device."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """By layer and module: the speed over Flax's own module, and milliseconds."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for operation, what in ((DECODE, "decoding"), (TRAINING, "training")):
        for place, rows in _by_layer(result, operation).items():
            for method, row in rows.items():
                over = row["speedup_over"].get("nnx")
                if method == "nnx" or over is None:
                    continue
                bar = (over, f"{over:.2f}: {tables.number(row['us'] / 1e3)} ms")
                groups.setdefault(f"{what}\n{place}", {})[_SHORT[method]] = bar
    return groups


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return f"{row['name']}: {row['status']}: {row['reason']}"
    parts = [f"{row['us']:.1f} us ({row['clock']}), wall {row['wall_us']:.1f}"]
    parts += [f"{ratio:.2f}x {name}" for name, ratio in row.get("speedup_over", {}).items()]
    if row["percent_of_ceiling"] is not None:
        parts.append(f"{row['percent_of_ceiling']:.0f} % of ceiling ({row['bound']})")
    parts.append(f"L2 {row['relative_l2']:.4f} from {row['against']}")
    return f"{row['name']}: {', '.join(parts)}"
