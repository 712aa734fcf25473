"""Attention over pages of 16, 8 and 4 bits, and appending to them, in device time.

Against cuDNN on dense bfloat16, jax's own paged kernel, our bfloat16 pages and our fp8 pages. The
whole public call is timed, with its checks and the rotations of queries and outputs.

Three suites: ``paged``, ``paged_chunk`` with chunks of prompts, and ``paged_formats`` with keys and
values that are stored unlike each other.
"""

from typing import TYPE_CHECKING, Any

from benchmarks import plots, tables
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Group
from benchmarks.shapes import Shape
from benchmarks.suite import Suite, Table, over_baselines
from benchmarks.suites.paged import cases
from benchmarks.suites.paged.cases import APPEND, CHUNK, DECODE, MOSAIC, PAGE_64, PAGES, TRITON
from benchmarks.suites.paged.inputs import Problem
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DECODE = (
    ("auto", MOSAIC),
    ("auto", TRITON),
    ("fp8_e4m3", MOSAIC),
    ("turbo4", MOSAIC),
    ("fp8_e4m3", TRITON),
    ("turbo4", TRITON),
    ("int8", MOSAIC),
    ("fp8_e5m2", MOSAIC),
)
_UNLIKE = ("k8v4", "int8_v4", "turbo_k4v2", "turbo_k3v2")
_FORMATS = (
    *_DECODE[:-1],
    *((kind, kernel) for kernel in (MOSAIC, TRITON) for kind in _UNLIKE),
    ("int8", TRITON),
)
_APPEND = ("auto", "fp8_e4m3", "turbo4")
_PLACES = ((64, 4096), (1, 32768), (1, 8192), (1, 4096), (1, 1024))
_PROMPT = (
    *(("auto", MOSAIC), ("fp8_e4m3", MOSAIC), ("turbo4", MOSAIC), ("int8", MOSAIC)),
    ("auto", TRITON),
)
# Chunks of prompts, and tokens held then.
_PROMPTS = (
    *((8192, 8192), (1024, 8192), (256, 8192)),
    *((8192, 32768), (1024, 32768), (256, 32768), (64, 32768)),
)


def _groups() -> list[Group]:
    model = "llama3-8b"
    largest = Shape(model, 16, 32768)
    shapes = (largest, *(Shape(model, *place) for place in _PLACES))
    groups = [cases.decode(Problem(shape), _DECODE) for shape in shapes]
    groups.append(cases.decode(Problem(largest, ragged=True), _DECODE[:4]))
    for kv_dtype in ("turbo4", "fp8_e4m3"):
        groups.append(cases.page_sizes(largest, kv_dtype, MOSAIC, (16, 32, 128)))
    groups.append(cases.append(Shape(model, 64, 4096), 1, _APPEND))
    groups.append(cases.append(Shape(model, 4, 32768), 4096, _APPEND))
    return groups


def _chunk_groups() -> list[Group]:
    model = "llama3-8b"
    problems = [Problem(Shape(model, 4, 8192), queries=queries) for queries in (4, 16, 64, 256)]
    problems += [Problem(Shape(model, 1, tokens), queries=queries) for queries, tokens in _PROMPTS]
    return [cases.decode(problem, _PROMPT, operation=CHUNK) for problem in problems]


def _format_groups() -> list[Group]:
    model, kinds = "llama3-8b", (*_APPEND, "k8v4", "int8", "int8_v4")
    shapes = [Shape(model, *place) for place in ((16, 32768), *_PLACES)]
    groups = [cases.decode(Problem(shape), _FORMATS, with_jax=False) for shape in shapes]
    groups.append(cases.append(Shape(model, 64, 4096), 1, kinds))
    groups.append(cases.append(Shape(model, 4, 32768), 4096, kinds))
    return groups


def _quick_groups() -> list[Group]:
    shape = Shape("tiny", 2, 192)
    kinds = tuple((kv_dtype, "xla") for kv_dtype in ("turbo4", "auto", "fp8_e4m3", "fp8_e5m2"))
    kernels = (("turbo4", TRITON), ("turbo4", MOSAIC))
    return [
        cases.decode(Problem(shape), kinds + kernels),
        cases.decode(Problem(shape, ragged=True), kinds[:1]),
        cases.page_sizes(shape, "turbo4", "xla", (16,)),
        cases.append(shape, 1, _APPEND),
        cases.append(shape, 96, ("auto", "turbo4")),
    ]


def _quick_chunk_groups() -> list[Group]:
    problem = Problem(Shape("tiny", 2, 192), queries=4)
    return [cases.decode(problem, (("turbo4", "xla"),), operation=CHUNK)]


def _quick_format_groups() -> list[Group]:
    shape, kinds = Shape("tiny", 2, 192), ("auto", "int8", "fp8_e4m3", *_UNLIKE)
    chosen = [(kv_dtype, "xla") for kv_dtype in kinds]
    return [
        cases.decode(Problem(shape), chosen, with_jax=False),
        cases.append(shape, 1, kinds[:4]),
    ]


# What the docs show -------------------------------------------------------------------------------

_OTHERS = ("cudnn", "bf16-pages", "fp8-pages")
BASELINES = {
    DECODE: _OTHERS,
    CHUNK: _OTHERS,
    PAGES: (PAGE_64,),
    APPEND: ("dense",),
}
"""What rows of an operation are compared with, by family."""
_BASELINE_NAMES = {
    "cudnn": "over cuDNN",
    "bf16-pages": "over bf16 pages",
    "fp8-pages": "over fp8 pages",
    PAGE_64: "over 64",
    "dense": "over dense",
}
KV_DTYPES = {
    "auto": "bf16",
    "fp8_e4m3": "fp8, e4m3",
    "fp8_e5m2": "fp8, e5m2",
    "int8": "int8",
    "turbo4": "turbo4",
    "k8v4": "k8v4",
    "int8_v4": "int8_v4",
    "turbo_k4v2": "turbo, 4 and 2 bits",
    "turbo_k3v2": "turbo, 3 and 2 bits",
}
"""Ways to store pages, as tables call them."""
_METHODS = {
    "cudnn": "dense bf16",
    "cudnn-full": "dense bf16, all tokens",
    "cudnn-paged": "bf16, cuDNN's pages",
    "dense": "dense bf16, a slice",
    "jax": "bf16, jax's kernel",
    "jax-128": "bf16, jax's kernel, blocks of 128",
}


def label(row: Row) -> str:
    """``16 x 32k``, with what makes it different from one query and sequences of one length."""
    tokens = row["tokens"]
    size = tables.short(tokens)
    if row["operation"] == APPEND:
        return f"{row['queries']:,} of {row['batch']} x {size}"
    text = f"{row['batch']} x {size}"
    if row["operation"] == CHUNK:
        text += f", {row['queries']} queries"
    if row["ragged"]:
        first = tokens // row["batch"]
        text = f"{row['batch']} x {tables.short(first)} to {size}"
    return text


def method(row: Row) -> str:
    if row["operation"] == PAGES:
        return f"{KV_DTYPES[row['kv_dtype']]}, {row['method'].removeprefix('page-')} tokens"
    return KV_DTYPES.get(row["method"]) or _METHODS.get(row["method"], row["method"])


def _kernel(row: Row) -> str:
    if row["operation"] == APPEND and row["family"] != "dense":
        return "default"
    others = {"cudnn": "cuDNN", "cudnn-paged": "cuDNN", "jax": "Pallas"}
    return row["implementation"] or others.get(row["family"], "XLA")


_NAMES = (("batch x tokens", label), ("keys and values", method), ("kernel", _kernel))


def operation_table(result: Result, operation: str) -> str:
    columns = (
        tables.US,
        *tables.over({name: _BASELINE_NAMES[name] for name in BASELINES[operation]}),
        ("MB", tables.shown_as("bytes", "{:,.1f}", 1e6)),
        *(tables.GIGABYTES, tables.CEILING, tables.L2),
    )
    return tables.operation_table(result, operation, _NAMES, columns)


def _section(*operations: str, plot: tuple[str, str] | None = None) -> Table:
    def table(result: Result) -> str:
        return "\n\n".join(operation_table(result, operation) for operation in operations)

    return tables.section(table, plot=plot, rates=tables.COPY_AND_PRODUCT)


PLOT = ("paged_speed.png", "Attention over pages: speed over cuDNN by shape and kind of pages")


def _fastest(rows: list[Row], family: str) -> Row | None:
    return tables.fastest(rows, lambda row: row["family"] == family)


def by_place(result: Result) -> dict[str, list[Row]]:
    places: dict[str, list[Row]] = {}
    for row in tables.finished(result, DECODE):
        places.setdefault(label(row), []).append(row)
    return places


def summary_table(result: Result) -> str:
    """Decode by shape: the fastest of cuDNN and of each kind of pages."""
    titles = {"cudnn": "cuDNN, dense bf16", "bf16-pages": "bf16 pages", "fp8-pages": "fp8 pages"}
    titles |= {"turbo4": "turbo4 pages"}
    places = {
        place: {family: row for family in titles if (row := _fastest(rows, family)) is not None}
        for place, rows in by_place(result).items()
    }
    return tables.pivot("batch x tokens", places, titles, _over_cudnn)


def _over_cudnn(row: Row) -> str:
    ratio = None if row["family"] == "cudnn" else row["speedup_over"].get("cudnn")
    return tables.with_ratio(tables.number(row["us"]), ratio)


_SUMMARY = (
    "Microseconds for one query token per sequence, time of the kernels on the device; in "
    "brackets the speed over that of cuDNN. "
)


def speed_bars(result: Result) -> dict[str, dict[str, float]]:
    """Speed over cuDNN by shape, of the fastest of our kernels for each kind of pages."""
    groups: dict[str, dict[str, float]] = {}
    for place, rows in by_place(result).items():
        bars = {}
        for kv_dtype, name in KV_DTYPES.items():
            row = tables.fastest(rows, lambda row, kv_dtype=kv_dtype: row["method"] == kv_dtype)
            if row is not None and (ratio := row["speedup_over"].get("cudnn")) is not None:
                bars[name] = ratio
        jax = _fastest(rows, "jax")
        if jax is not None and "cudnn" in jax["speedup_over"]:
            bars[_METHODS["jax"]] = jax["speedup_over"]["cudnn"]
        if bars:
            groups[place] = bars
    return groups


def speed_plot(result: Result) -> "Figure":
    bars = {
        place: {name: (ratio, f"{ratio:.2f}") for name, ratio in found.items()}
        for place, found in speed_bars(result).items()
    }
    title = f"Attention over pages, one token per sequence, on {result['device']}"
    return plots.of_ratios(bars, title, "times as fast as cuDNN on dense bf16", margin=0.12)


_COMMON: dict[str, Any] = {
    "run": calls.run,
    "with_ratios": over_baselines(BASELINES),
    "formats": ("bf16",),
}
SUITE = Suite(
    name="paged",
    groups=_groups,
    quick_groups=_quick_groups,
    tables={
        "paged summary": tables.section(summary_table, note=_SUMMARY),
        "paged decode": _section(DECODE, plot=PLOT),
        "paged page size": _section(PAGES),
        "paged append": _section(APPEND),
    },
    plots={PLOT[0]: speed_plot},
    **_COMMON,
)
CHUNKS = Suite(
    name="paged_chunk",
    groups=_chunk_groups,
    quick_groups=_quick_chunk_groups,
    tables={"paged chunk": _section(CHUNK)},
    **_COMMON,
)
FORMATS = Suite(
    name="paged_formats",
    groups=_format_groups,
    quick_groups=_quick_format_groups,
    tables={"paged formats": _section(DECODE, APPEND)},
    **_COMMON,
)
