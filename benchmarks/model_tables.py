"""Tables and bars of decode steps of whole models, and of loading: pure functions of their JSON."""

from benchmarks import tables
from benchmarks.tables import Result, Row

# The operations of the suites, as they begin the rows' names.
FAMILIES, LOADING = "model-decode", "loading"
CACHES = {
    "exact": "exact, bf16",
    "paged": "pages, bf16",
    "fp8_e4m3": "fp8 pages, e4m3",
    "turbo4": "turbo4 pages",
    "4bit": "4-bit",
}
"""Kinds of caches, as tables call them."""
METHODS = {
    "read": "reading the files alone",
    "load_decoder": "`load_decoder`",
    "load": "`load`",
    "naive": "all shards, then `jnp.stack`",
}
"""Ways to load, as tables call them."""
PLOTS = {FAMILIES: "families_speed.png", LOADING: "loading.png"}
PLOT_ALTS = {
    FAMILIES: "Decode steps of whole models: speed over the faster uncompressed cache",
    LOADING: "Loading a checkpoint: memory held at most, in units of the model's size",
}
_FILES = {"memory": "in the page cache", "disk": "on disk"}


def _failure(row: Row) -> str:
    return f"{row['status']}: {row['reason'][:120]}".replace("|", "\\|")


def _tokens(row: Row) -> str:
    count = row["tokens"]
    size = f"{count // 1024}k" if count % 1024 == 0 else str(count)
    return f"{row['batch']} x {size}"


def attention(row: Row) -> str:
    """What a model's attention is like: ``16 heads on 8 of 256, windows of 4,096, cap 50``."""
    parts = [f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}"]
    if row["windows"]:
        sizes = " and ".join(f"{size:,}" for size in row["windows"])
        some = "" if row["all_layers_have_windows"] else " in some layers"
        parts.append(f"windows of {sizes}{some}")
    if row["soft_cap"] is not None:
        parts.append(f"scores capped at {row['soft_cap']:g}")
    return ", ".join(parts)


def families_table(result: Result) -> str:
    """Every model and cache."""
    lines = []
    for row in _shown(result, FAMILIES):
        name = [row["model"], _tokens(row), CACHES[row["method"]]]
        if row["status"] != "ok":
            lines.append([*name, _failure(row), *[""] * 8])
            continue
        over = row.get("speedup_over", {})
        ratio, device = row.get("smaller_than_exact"), row["device_us"]
        share = row["percent_of_ceiling"]
        lines.append(
            [
                *name,
                f"{row['us'] / 1e3:.2f}",
                *(f"{over[base]:.2f}x" if base in over else "-" for base in ("exact", "paged")),
                "-" if device is None else f"{device / 1e3:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['cache_bytes'] / 1e9:.2f}",
                "-" if ratio is None else f"{ratio:.2f}x",
                "-" if share is None else f"{share:.0f} %",
                f"{row['relative_l2']:.3f}" if "relative_l2" in row else "-",
            ]
        )
    header = ["model", "batch x tokens", "cache", "ms a step", "over exact", "over pages"]
    header += [
        "kernels, ms",
        "tokens per second",
        "cache, GB",
        "smaller",
        "of bandwidth",
        "logits, relative L2",
    ]
    missing = tables.cut(result, FAMILIES)
    return tables.table(header, lines) + (f"\n\n{missing}" if missing else "")


def _shown(result: Result, operation: str) -> list[Row]:
    rows = [row for row in result["rows"] if row["operation"] == operation]
    return [row for row in rows if row.get("reason") != tables.OUT_OF_TIME]


def _shapes_sentence(result: Result) -> str:
    rows = {row["model"]: row for row in result["rows"]}
    return "; ".join(f"{model}: {attention(row)}" for model, row in rows.items())


def families_section(name: str, result: Result) -> str:
    """The table of docs/benchmarks and where its figures come from."""
    notes = f"Attention: {_shapes_sentence(result)}. "
    if copy := result["ceilings"].get("copy"):
        notes += f"Reading and writing 1 GiB: {copy:,.0f} GB/s. "
    picture = f"![{PLOT_ALTS[FAMILIES]}]({PLOTS[FAMILIES]})\n\n"
    return f"{picture}{families_table(result)}\n\n{notes}{tables.source(name, result)}"


def families_summary(name: str, result: Result) -> str:
    """Milliseconds of a step by model, and how much smaller the caches are."""
    lines = []
    for model, rows in _by_model(result).items():
        first = next(iter(rows.values()))
        line = [f"{model}, {_tokens(first)}"]
        for cache in CACHES:
            if cache not in rows:
                line.append("-")
                continue
            row, text = rows[cache], f"{rows[cache]['us'] / 1e3:.1f} ms"
            if cache == "exact":
                text += f", {row['cache_bytes'] / 1e9:.1f} GB"
            elif cache != "paged" and "smaller_than_exact" in row:
                text += f" ({_over_uncompressed(row):.2f}x), "
                text += f"{row['smaller_than_exact']:.1f}x smaller"
            line.append(text)
        lines.append(line)
    header = ["model, batch x tokens", *CACHES.values()]
    note = (
        "One decode step of the whole model, all layers and logits: wall time of many in a row, "
        "random weights, full caches. In brackets the speed over that of the faster uncompressed "
        "cache: the exact one, which is cuDNN's attention where a model has neither windows nor "
        "caps nor heads wider than 128 and otherwise XLA's, or pages, which are Triton's."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def _over_uncompressed(row: Row) -> float:
    """The speed over that of the faster cache without compression."""
    return min(row["speedup_over"].values())


def _by_model(result: Result) -> dict[str, dict[str, Row]]:
    """The decode steps that were measured, by model and cache."""
    models: dict[str, dict[str, Row]] = {}
    for row in tables.finished(result, FAMILIES):
        models.setdefault(row["model"], {})[row["method"]] = row
    return models


def families_bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """By model and cache: the speed over the faster uncompressed cache, and milliseconds."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for model, rows in _by_model(result).items():
        for cache, row in rows.items():
            if "speedup_over" in row:
                bar = (_over_uncompressed(row), f"{row['us'] / 1e3:.1f} ms")
                groups.setdefault(f"{model}\n{_tokens(row)}", {})[CACHES[cache]] = bar
    return groups


def loading_table(result: Result) -> str:
    """Every way to load a checkpoint."""
    lines = []
    for row in _shown(result, LOADING):
        name = [row["model"], _FILES[row["files"]], METHODS[row["method"]]]
        if row["status"] != "ok":
            lines.append([*name, _failure(row), *[""] * 5])
            continue
        over = row.get("speedup_over", {}).get("naive")
        lines.append(
            [
                *name,
                f"{row['seconds']:.2f}",
                "-" if over is None else f"{over:.2f}x",
                f"{row['gigabytes_per_second']:.2f}",
                _times(row.get("peak_device_bytes"), row),
                _times(row.get("peak_host_bytes"), row),
                _times(row.get("largest_tensor_bytes"), row),
            ]
        )
    header = ["checkpoint", "files", "by", "seconds", "over all shards", "GB/s"]
    header += ["most on the device", "most on the host", "largest tensor"]
    missing = tables.cut(result, LOADING)
    return tables.table(header, lines) + (f"\n\n{missing}" if missing else "")


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
    picture = f"![{PLOT_ALTS[LOADING]}]({PLOTS[LOADING]})\n\n"
    return f"{picture}{loading_table(result)}\n\n{notes}{tables.source(name, result)}"


def loading_bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """By what is counted and way to load: the peak over the model's size, and seconds."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    kinds = {
        "peak_device_bytes": "most on the device",
        "peak_host_bytes": "most on the host",
    }
    for row in tables.finished(result, LOADING):
        if row["files"] != "memory" or row["method"] == "read":
            continue
        for key, place in kinds.items():
            if row.get(key) is not None:
                over = row[key] / row["model_bytes"]
                bar = (over, f"{over:.2f}x, {row['seconds']:.1f} s")
                groups.setdefault(place, {})[METHODS[row["method"]].replace("`", "")] = bar
    return groups


def first_calls_section(name: str, result: Result) -> str:
    """Programs and seconds of one call for each prompt length, before and now; a served request."""
    lines = []
    for cache, versions in result["generate"].items():
        before = versions.get("before")
        for label, found in versions.items():
            ratio = "-" if before is None else f"{before['seconds'] / found['seconds']:.2f}x"
            lines.append(
                [
                    CACHES[cache],
                    {"now": "rounded up", "before": "one by one"}[label],
                    str(found["programs"]),
                    f"{found['seconds']:.1f}",
                    ratio,
                    f"{found['seconds_again']:.1f}",
                ]
            )
    header = ["cache", "sizes", "programs", "seconds", "speed", "the same calls again"]
    prompts, served = result["prompts"], result["serve"]
    slowest = max(row["seconds"] for row in result["interrupts"])
    calls = (
        f"{len(prompts)} calls of `models.generate`, prompts of {prompts[0]} to {prompts[-1]} "
        f"tokens and {result['new_tokens']} new ones, {result['generate_layers']} layers of "
        f"{result['shape']}, with nothing compiled before. "
    )
    commands = (
        "`turbojax serve` gave the first token of the embedded model after "
        f"{served['cold']:.1f} s without kept programs, and after {served['kept']:.1f} s with "
        "those of an earlier run. Ctrl-C while `turbojax generate` compiled for the whole model "
        f"ended it within {slowest:.1f} s. "
    )
    table = tables.table(header, lines)
    return f"{table}\n\n{calls}{commands}{tables.source(name, result)}"


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return f"{row['name']}: {row['status']}: {row['reason']}"
    over = [f"{ratio:.2f}x {name}" for name, ratio in row.get("speedup_over", {}).items()]
    if row["operation"] == LOADING:
        parts = [f"{row['seconds']:.2f} s", f"{row['gigabytes_per_second']:.2f} GB/s", *over]
        for key in ("peak_device_bytes", "peak_host_bytes"):
            if row.get(key) is not None:
                parts.append(f"{key} {row[key] / row['model_bytes']:.3f}x")
        return f"{row['name']}: {', '.join(parts)}"
    device = row["device_us"]
    parts = [f"{row['us'] / 1e3:.2f} ms a step of {row['repetitions']}", *over]
    parts += [] if device is None else [f"kernels {device / 1e3:.2f} ms"]
    parts.append(f"cache {row['cache_bytes'] / 1e9:.2f} GB")
    if "relative_l2" in row:
        parts.append(f"L2 {row['relative_l2']:.4f}")
    return f"{row['name']}: {', '.join(parts)}"
