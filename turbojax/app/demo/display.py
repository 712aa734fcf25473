"""How the demo is shown: a table, the generated texts, a plot."""

from pathlib import Path

import jax
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turbojax import _extras, _writing
from turbojax.app.demo.measure import CacheResult, DemoReport, cache_kind
from turbojax.models import Transformer
from turbojax.models.generation.caching import init_caches

# A running mean of fewer bytes jumps about and hides the rest of the picture.
_UNSETTLED = 15


def render(report: DemoReport) -> RenderableType:
    """The report for a terminal."""
    settings = report.settings
    title = (
        f"{settings.file.name}: {settings.prompt_bytes} bytes prefilled, "
        f"{settings.new_bytes} decoded through each cache"
    )
    if settings.uncompressed_layers:
        title += f", {settings.uncompressed_layers} layers at either end uncompressed"
    # Columns are no wider than their names, so that the table fits 80 columns.
    table = Table(title=title, pad_edge=False)
    table.add_column("cache")
    for column in (
        "bits/\nbyte",
        "vs\nfirst",
        "same\nchoice",
        "cache\nbytes",
        "ratio",
        "bytes/s",
    ):
        table.add_column(column, justify="right")
    first = report.results[0]
    for result in report.results:
        table.add_row(
            result.name,
            f"{result.bits_per_byte:.4f}",
            f"{result.bits_per_byte - first.bits_per_byte:+.4f}",
            f"{result.agreement:.1%}",
            f"{result.nbytes:,}",
            f"{result.compression_ratio:.2f}x",
            "-" if result.bytes_per_second is None else f"{result.bytes_per_second:.1f}",
        )
    texts = [_generated_panel(result, first) for result in report.results]
    where = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
    footer = Text(f"{report.seconds:.0f} s in all, {where}", style="dim")
    if jax.default_backend() == "cpu":
        footer.append("; bytes/s do not compare: CPUs widen the exact cache's bfloat16 every step")
    return Group(table, *texts, footer)


def _generated_panel(result: CacheResult, first: CacheResult) -> Panel:
    """The freely generated text; what differs from the first cache's stands out."""
    same = 0
    for a, b in zip(result.generated, first.generated, strict=True):
        if a != b:
            break
        same += 1
    text = Text(result.generated[:same].decode("utf-8", "replace"))
    text.append(result.generated[same:].decode("utf-8", "replace"), style="bold yellow")
    title = f"{result.name} continues"
    if result is not first:
        total = len(result.generated)
        title += (
            f": the same {total} bytes as {first.name}"
            if same == total
            else f": as {first.name} for {same} of {total} bytes"
        )
    return Panel(text, title=title, title_align="left")


def save_plot(report: DemoReport, model: Transformer, path: Path) -> None:
    """Draws memory against context length, and what each cache costs along the text.

    The ending of `path` chooses the format. Raises OSError if the file cannot be written,
    ValueError for a format that matplotlib does not know, ImportError without matplotlib.
    """
    _extras.need_matplotlib()
    # Imported here: it takes a second that a run without a plot need not wait. A bare `Figure`
    # needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, quality = figure.subplots(1, 2)
    lengths = [256 * i for i in range(1, model.config.max_length // 256 + 1)]
    first = report.results[0]
    for result in report.results:
        kind = cache_kind(result.name, model, report.settings.uncompressed_layers)
        sizes = [
            jax.eval_shape(lambda n=n, kind=kind: init_caches(model, 1, n, kind)).nbytes / 2**20
            for n in lengths
        ]
        label = f"{result.name} ({result.compression_ratio:.2f}x)"
        memory.plot(lengths, sizes, label=label)
        cost = [mean - base for mean, base in zip(result.curve, first.curve, strict=True)]
        steps = range(1 + _UNSETTLED, len(cost) + 1)
        quality.plot(
            steps, cost[_UNSETTLED:], label=f"{result.name} ({result.bits_per_byte:.4f} bits/byte)"
        )
    memory.set(title="KV cache of the model", xlabel="context length (bytes of text)")
    memory.set_ylabel("MiB")
    memory.set_ylim(bottom=0)
    quality.set(title=f"Decoding {report.settings.file.name}", xlabel="bytes decoded")
    quality.set_ylabel(f"bits per byte more than {first.name}, running mean")
    # At least this range, so that differences which do not matter do not look large.
    low, high = quality.get_ylim()
    quality.set_ylim(min(low, -0.02), max(high, 0.04))
    for axes in (memory, quality):
        axes.grid(alpha=0.3)
        axes.legend()
    with _writing.replacing(path) as draft:
        figure.savefig(draft, dpi=120)
