"""Table and plot of fine-tuning with pooled attention: what `turbojax compare --write` wrote."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.suite import Shown
from turbojax.finetune import display

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_section(name: str, result: Mapping[str, Any]) -> str:
    """Runs of `turbojax train`, as `turbojax compare --write` puts them into one file."""
    compared, runs = result["comparison"], result["runs"]
    lines = []
    for i, log in enumerate(runs):
        attention = log["identity"]["attention"]["kind"]
        records, steps = log["records"], compared["steps"]
        last = [record for record in records if record["step"] <= steps][-1]
        rate = last["step"] * _tokens_per_step(log) / last["seconds"]
        held_out = log.get("held_out_bits_per_byte", {})
        lines.append(
            [
                attention,
                "1" if i == 0 else f"{compared['density']:.3f}",
                f"{compared['seconds'][i]:.1f}",
                f"{rate:,.0f}",
                f"{compared['seconds'][0] / compared['seconds'][i]:.2f}x",
                f"{last['bits_per_byte']:.4f}",
                _bits(held_out.get("run")),
                _bits(held_out.get("dense", held_out.get("run") if i == 0 else None)),
            ]
        )
    header = ["attention", "density", "seconds in steps", "bytes per second", "over dense"]
    header += ["loss at the end", "held out", "held out, dense attention"]
    settings = runs[0]["identity"]["settings"]
    note = (
        f"{compared['steps']} steps of {settings['batch_size']} sequences of "
        f"{settings['context']:,} bytes; loss in bits per byte. Over means of "
        f"{compared['smoothing']} steps the pooled loss is "
        f"{compared['final_ratio']:.4f} times the dense one at the end, "
        f"{compared['mean_ratio']:.4f} on average and {compared['largest_ratio']:.4f} at most."
    )
    picture = tables.picture(*PLOT)
    source = tables.source(name, runs[1]["environment"])
    return f"{picture}{tables.table(header, lines)}\n\n{note} {source}"


PLOT = ("pooled_training.png", "Loss of dense and of pooled fine-tuning")


def _tokens_per_step(log: Mapping[str, Any]) -> int:
    settings = log["identity"]["settings"]
    return settings["context"] * settings["batch_size"]


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def training_plot(result: Mapping[str, Any]) -> "Figure":
    """Smoothed losses over steps and over time in steps."""
    return display.draw(result["runs"], width=result["comparison"]["smoothing"])


SHOWN = Shown(("pooled_training",), {"pooled training": training_section}, {PLOT[0]: training_plot})
