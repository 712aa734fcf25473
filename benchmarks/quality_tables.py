"""Markdown tables of what caches cost on text: pure functions of the results' JSON."""

from pathlib import Path

from benchmarks import tables
from benchmarks.tables import Result


def demo_table(name: str, report: Result) -> str:
    """What `make demo` printed."""
    settings = report["settings"]
    first = report["results"][0]
    lines = []
    for row in report["results"]:
        difference = row["bits_per_byte"] - first["bits_per_byte"]
        cost = "" if row is first else f" ({difference:+.4f})"
        lines.append(
            [
                row["name"],
                f"{row['bits_per_byte']:.4f}{cost}",
                f"{row['agreement']:.1%}",
                f"{row['nbytes']:,}",
                f"{row['compression_ratio']:.2f}x",
            ]
        )
    header = ["cache", "bits per byte", "same greedy byte", "cache bytes", "smaller than bf16"]
    note = (
        f"`{Path(settings['file']).name}`: {settings['prompt_bytes']} bytes prefilled, "
        f"{settings['new_bytes']} decoded;"
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, report)}"


def quality_table(name: str, report: Result) -> str:
    """What caches cost over all held-out files."""
    caches = report["caches"]
    base = caches["exact"]
    lines = []
    for label, row in caches.items():
        cost = row["bits_per_byte"] - base["bits_per_byte"]
        ratio = base["cache_bytes_per_sequence"] / row["cache_bytes_per_sequence"]
        lines.append(
            [
                label,
                f"{row['bits_per_byte']:.4f}",
                f"{cost:+.4f}",
                f"{row['same_greedy_choice']:.1%}",
                f"{ratio:.2f}x",
            ]
        )
    header = ["cache", "bits per byte", "cost", "same greedy byte", "smaller than exact"]
    note = (
        f"{report['decoded_bytes']:,} bytes of {report['windows']} windows, positions "
        f"{report['prefilled']} to {report['context'] + 1}, decoded one by one;"
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, report)}"


_PAGES = ("turbo4", "fp8_e4m3", "fp8_e5m2")


def pages_sentence(name: str, result: Result) -> str:
    """What each kind of page adds to the bits of a bfloat16 cache."""
    measured = any("cost" in result["caches"].get(kind, {}) for kind in _PAGES)
    start = "What a byte of held-out text costs the embedded model in bits, beyond a bfloat16 cache"
    if not measured:
        return f"{start}: not measured."
    costs = []
    for kind in _PAGES:
        row = result["caches"].get(kind, {})
        if "cost" in row:
            costs.append(f'{row["cost"]:+.4f} ± {row["cost_standard_error"]:.4f} with `"{kind}"`')
        else:
            costs.append(f'not measured with `"{kind}"`')
    return (
        f"{start}: {', '.join(costs)}. Means over {result['windows']} windows of "
        f"{result['modules']} modules of the standard library, the first {result['prefilled']:,} "
        "bytes of each in one piece and the others one by one, with their standard errors; "
        f"{result['device']}, jax {result['jax']}, {result['date']} (`{name}`)."
    )
