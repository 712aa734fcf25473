"""Tables and bars of the paged suite and the engine's: pure functions of their JSON."""

from benchmarks import tables
from benchmarks.tables import Result, Row

# The operations of the suites, as they begin the rows' names.
DECODE, PAGES, CHUNK = "paged-decode", "paged-page-size", "paged-chunk"
APPEND, ENGINE = "paged-append", "engine"
PAGE_64 = "page-64"
_OTHERS = ("cudnn", "bf16-pages", "fp8-pages")
BASELINES = {
    DECODE: _OTHERS,
    CHUNK: _OTHERS,
    PAGES: (PAGE_64,),
    APPEND: ("dense",),
    ENGINE: ("auto",),
}
"""What rows of an operation are compared with, by family."""
_BASELINE_NAMES = {
    "cudnn": "over cuDNN",
    "bf16-pages": "over bf16 pages",
    "fp8-pages": "over fp8 pages",
    PAGE_64: "over 64",
    "dense": "over dense",
    "auto": "over bf16",
}
KV_DTYPES = {
    "auto": "bf16",
    "fp8_e4m3": "fp8, e4m3",
    "fp8_e5m2": "fp8, e5m2",
    "turbo4": "turbo4",
    "k8v4": "k8v4",
    "turbo_k4v2": "turbo, 4 and 2 bits",
}
"""Ways to store pages, as tables call them."""
_METHODS = {
    "cudnn": "dense bf16",
    "cudnn-full": "dense bf16, all tokens",
    "dense": "dense bf16, a slice",
    "jax": "bf16, jax's kernel",
    "jax-128": "bf16, jax's kernel, blocks of 128",
}
_UNITS = {"copy": "bytes", "bf16": "bf16"}
STOPPED = "stopped"
"""Status of an engine's row that the clock ended."""


def label(row: Row) -> str:
    """``16 x 32k``, with what makes it different from one query and sequences of one length."""
    tokens = row["tokens"]
    size = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    if row["operation"] == APPEND:
        return f"{row['queries']:,} of {row['batch']} x {size}"
    text = f"{row['batch']} x {size}"
    if row["operation"] == CHUNK:
        text += f", {row['queries']} queries"
    if row["ragged"]:
        first = tokens // row["batch"]
        start = f"{first // 1024}k" if first % 1024 == 0 else str(first)
        text = f"{row['batch']} x {start} to {size}"
    return text


def method(row: Row) -> str:
    """A row's method in words."""
    if row["operation"] == PAGES:
        return f"{KV_DTYPES[row['kv_dtype']]}, {row['method'].removeprefix('page-')} tokens"
    return KV_DTYPES.get(row["method"]) or _METHODS.get(row["method"], row["method"])


def _kernel(row: Row) -> str:
    others = {"cudnn": "cuDNN", "jax": "Pallas"}
    return row["implementation"] or others.get(row["family"], "XLA")


def _ratios(row: Row) -> list[str]:
    over = row.get("speedup_over", {})
    names = BASELINES[row["operation"]]
    return [f"{over[name]:.2f}x" if name in over else "-" for name in names]


def _share(row: Row) -> str:
    percent = row["percent_of_ceiling"]
    return "-" if percent is None else f"{percent:.0f} % ({_UNITS[row['bound']]})"


def _failure(row: Row) -> str:
    return f"{row['status']}: {row['reason'][:120]}".replace("|", "\\|")


def operation_table(result: Result, operation: str) -> str:
    """Every row of an operation; those that did not run with the reason."""
    lines = []
    for row in result["rows"]:
        if row["operation"] != operation or row.get("reason") == tables.OUT_OF_TIME:
            continue
        name = [label(row), method(row), _kernel(row)]
        if row["status"] != "ok":
            lines.append([*name, _failure(row), *[""] * (len(BASELINES[operation]) + 4)])
            continue
        lines.append(
            [
                *name,
                tables.number(row["us"]),
                *_ratios(row),
                f"{row['bytes'] / 1e6:,.1f}",
                tables.number(row["gigabytes_per_second"]),
                _share(row),
                f"{row['relative_l2']:.4f}",
            ]
        )
    header = ["batch x tokens", "keys and values", "kernel", "us"]
    header += [_BASELINE_NAMES[name] for name in BASELINES[operation]]
    header += ["MB", "GB/s", "of ceiling", "relative L2"]
    missing = tables.cut(result, operation)
    return tables.table(header, lines) + (f"\n\n{missing}" if missing else "")


def engine_table(result: Result) -> str:
    """Requests through the engine, by workload and kind of pages."""
    lines = []
    for row in result["rows"]:
        name = [_workload(row), KV_DTYPES[row["kv_dtype"]]]
        if row["status"] not in ("ok", STOPPED):
            lines.append([*name, _failure(row), *[""] * 9])
            continue
        done = f" ({row['finished']} of {row['requests']})" if row["status"] == STOPPED else ""
        lines.append(
            [
                *name,
                f"{row['generated_per_second']:,.0f}",
                *_ratios(row),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['seconds']:.1f}{done}",
                f"{row['token_capacity']:,}",
                f"{row['capacity_over_auto']:.2f}x" if "capacity_over_auto" in row else "-",
                f"{row['most_tokens']:,}",
                str(row["most_sequences"]),
                str(row["preemptions"]),
                f"{row['steps']:,}",
            ]
        )
    header = ["requests", "pages", "new tokens per second", "over bf16", "with prompts", "seconds"]
    header += ["pool holds, tokens", "over bf16", "most held", "sequences", "preemptions", "steps"]
    return tables.table(header, lines)


def _workload(row: Row) -> str:
    prompt, new = ("{:,} to {:,}".format(*row[name]) for name in ("prompt", "new"))
    return f"{row['requests']} x {prompt}, {new} new"


def page_section(name: str, result: Result, operation: str) -> str:
    """A table of docs/benchmarks and where its figures come from."""
    picture = f"![{PLOT_ALTS[operation]}]({PLOTS[operation]})\n\n" if operation in PLOTS else ""
    table = engine_table(result) if operation == ENGINE else operation_table(result, operation)
    names = {"copy": "Reading and writing 1 GiB: {:,.0f} GB/s. "}
    names |= {"bf16": "A product of 8192 x 8192 x 8192 through XLA: {:,.0f} TFLOP/s in bfloat16. "}
    rates = {} if operation == ENGINE else result["ceilings"]
    text = "".join(form.format(rates[unit]) for unit, form in names.items() if rates.get(unit))
    return f"{picture}{table}\n\n{text}{tables.source(name, result)}"


PLOTS = {DECODE: "paged_speed.png", ENGINE: "engine.png"}
PLOT_ALTS = {
    DECODE: "Attention over pages: speed over cuDNN by shape and kind of pages",
    ENGINE: "The engine with a pool of one size: new tokens per second and tokens held",
}


def _fastest(rows: list[Row], family: str) -> Row | None:
    return tables.fastest(rows, lambda row: row["family"] == family)


def by_place(result: Result) -> dict[str, list[Row]]:
    """The decode rows that were measured, by shape."""
    places: dict[str, list[Row]] = {}
    for row in tables.finished(result, DECODE):
        places.setdefault(label(row), []).append(row)
    return places


def summary(name: str, result: Result) -> str:
    """Decode by shape: the fastest of cuDNN and of each kind of pages."""
    lines = []
    for place, rows in by_place(result).items():
        line = [place]
        for family in ("cudnn", "bf16-pages", "fp8-pages", "turbo4"):
            row = _fastest(rows, family)
            if row is None:
                line.append("-")
                continue
            ratio = row["speedup_over"].get("cudnn")
            shown = family != "cudnn" and ratio is not None
            line.append(tables.number(row["us"]) + (f" ({ratio:.2f}x)" if shown else ""))
        lines.append(line)
    header = ["batch x tokens", "cuDNN, dense bf16", "bf16 pages", "fp8 pages", "turbo4 pages"]
    note = (
        "Microseconds for one query token per sequence, time of the kernels on the device; in "
        "brackets the speed over that of cuDNN."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


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


def engine_bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """Of each figure, by kind of pages: what it is relative to bfloat16, and in its own unit."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in result["rows"]:
        if row["status"] == "ok" and "capacity_over_auto" in row:
            name = KV_DTYPES[row["kv_dtype"]]
            held = (row["capacity_over_auto"], f"{row['token_capacity']:,}")
            groups.setdefault("tokens the pool holds", {})[name] = held
            if "auto" in row.get("speedup_over", {}):
                rate = (row["speedup_over"]["auto"], f"{row['generated_per_second']:,.0f}")
                place = "new tokens per second,\n{:,} to {:,} a request".format(*row["new"])
                groups.setdefault(place, {})[name] = rate
    return groups


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] not in ("ok", STOPPED):
        return f"{row['name']}: {row['status']}: {row['reason']}"
    over = [f"{ratio:.2f}x {name}" for name, ratio in row.get("speedup_over", {}).items()]
    if row["operation"] == ENGINE:
        parts = [
            f"{row['generated_per_second']:,.0f} new tokens/s",
            f"{row['tokens_per_second']:,.0f} with prompts",
            f"{row['seconds']:.1f} s (compiled in {row['compile_seconds']:.0f})",
            f"pool holds {row['token_capacity']:,}, held {row['most_tokens']:,} "
            f"of {row['most_sequences']}",
            f"{row['preemptions']} preemptions",
            *over,
        ]
        stopped = f" ({row['reason']})" if row["status"] == STOPPED else ""
        return f"{row['name']}: {', '.join(parts)}{stopped}"
    parts = [f"{row['us']:.1f} us ({row['clock']})", *over]
    if row["percent_of_ceiling"] is not None:
        parts.append(f"{row['percent_of_ceiling']:.0f} % of ceiling ({row['bound']})")
    parts.append(f"L2 {row['relative_l2']:.4f}")
    return f"{row['name']}: {', '.join(parts)}"
