"""Loss curves as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbojax import _extras, _writing
from turbojax.finetune.comparison import label, seconds_at, smooth, unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#3182bd", "#d94801", "#31a354")


def draw(logs: Sequence[Mapping[str, Any]], *, width: int = 20) -> "Figure":
    """The losses of at most three runs, over steps and over time in steps, and held-out scores.

    Curves are averaged over `width` steps; single steps are drawn pale. Raises ValueError for no
    runs or too many, ImportError without matplotlib.
    """
    _extras.need_matplotlib()
    from matplotlib.figure import Figure

    if not 1 <= len(logs) <= len(_COLOURS):
        raise ValueError(f"{len(logs)} runs must be 1 to {len(_COLOURS)}")
    figure = Figure(figsize=(10, 4.4), dpi=100, layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for log, colour in zip(logs, _COLOURS, strict=False):
        steps = range(1, len(log["losses"]) + 1)
        curve = smooth(log["losses"], width)
        by_step.plot(steps, log["losses"], color=colour, lw=0.5, alpha=0.3)
        by_step.plot(steps, curve, color=colour, lw=1.5, label=label(log))
        by_time.plot(seconds_at(log), curve, color=colour, lw=1.5)
        scores = log["evaluations"]
        if scores:
            name = f"held_out_bits_per_{unit(log)}"
            x, y = zip(*((r["step"], r[name]) for r in scores), strict=True)
            by_step.plot(x, y, "o--", color=colour, ms=4, lw=0.8, label=f"{label(log)}, held out")
    by_step.set_xlabel("step")
    by_step.set_ylabel(f"bits per {unit(logs[0])}")
    by_time.set_xlabel("seconds in training steps")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    # Below the plots: the curves leave no room inside.
    figure.legend(loc="outside lower center", ncols=2 * len(logs), frameon=False)
    settings = logs[0]["identity"]["settings"]
    figure.suptitle(
        f"{settings['context']:,} {unit(logs[0])}s of context, {settings['batch_size']} sequences "
        f"per step, {logs[0]['environment']['device']}"
    )
    return figure


def save_plot(logs: Sequence[Mapping[str, Any]], path: Path, *, width: int = 20) -> None:
    """Saves a picture of the losses of runs, over steps and over time, and their held-out scores.

    Args:
      logs: of the runs, at most three.
      path: the picture; its ending decides the format.
      width: steps over which the curves are averaged; single steps are drawn pale.

    Raises:
      ValueError: if there are no runs or too many, or matplotlib does not know the format.
      ImportError: if matplotlib is not installed.
    """
    with _writing.replacing(path) as draft:
        draw(logs, width=width).savefig(draft)
