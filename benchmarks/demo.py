"""Table of what `turbojax demo --json` measured."""

from pathlib import Path

from benchmarks import tables
from benchmarks.suite import Shown
from benchmarks.tables import Result


def demo_table(name: str, report: Result) -> str:
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


SHOWN = Shown(("demo",), {"demo": demo_table})
