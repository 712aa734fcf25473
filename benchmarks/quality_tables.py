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
