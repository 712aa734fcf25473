"""What `turbojax calibrate` shows: the layers' caches, and what they cost beside uniform ones."""

import itertools
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbojax.app.calibrate.run import CHOSEN, CalibrateReport


def render(report: CalibrateReport) -> RenderableType:
    """The tables of a run."""
    settings = report.settings
    note = (
        f"Bits per token, of {report.tokens:,} tokens decoded after {settings.prompt:,}: KL is the "
        "divergence from the exact cache, cost what true tokens cost more. Bytes are those of "
        f"{settings.sized_for:,} tokens. Costs of layers add up roughly; what counts is what was "
        "measured."
    )
    return Group(_layers_table(report), _caches_table(report), Text(note, style="dim"))


def groups(report: CalibrateReport) -> Iterator[tuple[int, int, str]]:
    """The first and the last of neighbouring layers with the same cache, and its name."""
    numbered = itertools.groupby(enumerate(report.layers), key=lambda item: item[1])
    for name, members in numbered:
        layers = [layer for layer, _ in members]
        yield layers[0], layers[-1], name


def _layers_table(report: CalibrateReport) -> Table:
    table = Table(title=f"A cache for each layer: {report.settings.limit}", pad_edge=False)
    table.add_column("layers")
    table.add_column("cache", overflow="fold")
    for column in ("predicted KL", "bytes", "smaller"):
        table.add_column(column, justify="right")
    each = report.exact_bytes / len(report.layers)
    for first, last, name in groups(report):
        part = slice(first, last + 1)
        size = sum(report.nbytes[part])
        table.add_row(
            str(first) if first == last else f"{first} to {last}",
            name,
            f"{sum(report.predicted[part]):.4f}",
            f"{size:,}",
            f"{each * (last + 1 - first) / size:.2f}x",
        )
    return table


def _caches_table(report: CalibrateReport) -> Table:
    table = Table(title="The choice beside the same cache in all layers", pad_edge=False)
    table.add_column("cache", overflow="fold")
    for column in ("sum of\nlayers' KL", "KL,\nmeasured", "cost,\nmeasured", "bytes", "smaller"):
        table.add_column(column, justify="right")
    for name, row in report.rows.items():
        table.add_row(
            name,
            f"{row.predicted:.4f}",
            f"{row.divergence:.4f}",
            f"{row.cost:+.4f}",
            f"{row.nbytes:,}",
            f"{row.ratio:.2f}x",
            style="bold" if name == CHOSEN else None,
        )
    return table
