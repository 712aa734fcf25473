"""Runs over the same data, side by side: how far the losses are apart, the time saved, pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turbojax import _extras, _writing
from turbojax.finetune.log import LOG_NAME, read_content
from turbojax.finetune.settings import with_defaults

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What runs must have in common for losses at the same step, and held-out scores, to be comparable.
_SAME = ("settings", "model", "start_sha256", "stream_sha256", "held_out_sha256")
_COLOURS = ("#3182bd", "#d94801", "#31a354")

Log = Mapping[str, Any]


def read_log(path: Path) -> dict[str, Any]:
    """The log of a run.

    Args:
      path: the run's folder or its `log.json`.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if it is no such log.
    """
    file = path / LOG_NAME if path.is_dir() else path
    content = read_content(file)
    if not content["losses"]:
        raise ValueError(f"{file} must hold at least one step")
    return content


def smooth(losses: np.ndarray, width: int) -> np.ndarray:
    """Mean of each value and up to ``width - 1`` before it; float64, as long as `losses`."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(losses, np.float64))])
    end = np.arange(1, len(total))
    begin = np.maximum(0, end - width)
    return (total[end] - total[begin]) / (end - begin)


def compare(first: Log, second: Log, *, width: int = 20) -> dict[str, Any]:
    """What the second run lost and saved against the first.

    Args:
      first: a log, usually of dense attention.
      second: the log of a run with the same settings, start and data; compared over the steps
        that both have done.
      width: steps over which losses are averaged, see `smooth`.

    Returns:
      A JSON object: both logs under ``"runs"``, and under ``"comparison"``

      - `steps`, `smoothing`: see above;
      - `final_ratio`: smoothed loss of the second over that of the first at the last step;
      - `largest_ratio`, `mean_ratio`: the same over the steps with a whole window of `width`
        (all steps if there is none);
      - `held_out_ratio`: of bits per byte, or token, of the held-out text at the end, each with its
        own attention; None if a run has not ended;
      - `density`: mean over the second run's steps;
      - `seconds`: of both, in training steps alone; `seconds_saved`, `speedup`.

    Raises:
      ValueError: if the runs differ in settings, model, start, data or held-out text, or `width` is
        not positive.
    """
    if width < 1:
        raise ValueError(f"{width=} must be at least 1")
    identities = [with_defaults(log["identity"]) for log in (first, second)]
    for name in _SAME:
        one, two = (_known(identity.get(name)) for identity in identities)
        if one != two:
            raise ValueError(f"{name} of the runs must be the same: {one} and {two}")
    steps = min(len(first["losses"]), len(second["losses"]))
    one, two = (smooth(log["losses"][:steps], width) for log in (first, second))
    ratio = two / one
    whole = ratio[width - 1 :] if steps >= width else ratio
    seconds = [float(seconds_at(log)[steps - 1]) for log in (first, second)]
    comparison = {
        "steps": steps,
        "smoothing": width,
        "final_ratio": round(float(ratio[-1]), 5),
        "largest_ratio": round(float(whole.max()), 5),
        "mean_ratio": round(float(whole.mean()), 5),
        "held_out_ratio": _held_out_ratio(first, second),
        "density": round(mean_density(second), 5),
        "seconds": [round(x, 3) for x in seconds],
        "seconds_saved": round(seconds[0] - seconds[1], 3),
        "speedup": round(seconds[0] / seconds[1], 3),
    }
    return {"comparison": comparison, "runs": [dict(first), dict(second)]}


def _known(value: Any) -> Any:
    """An identity without fields that are None, which older logs may not have."""
    if isinstance(value, Mapping):
        return {name: item for name, item in value.items() if item is not None}
    return value


def seconds_at(log: Log) -> np.ndarray:
    """Time in training steps at the end of every step, float64; linear between records."""
    records = log["records"]
    steps = [0, *(row["step"] for row in records)]
    seconds = [0.0, *(row["seconds"] for row in records)]
    return np.interp(np.arange(1, len(log["losses"]) + 1), steps, seconds)


def mean_density(log: Log) -> float:
    """Mean over the steps of a log."""
    steps = np.diff([0, *(row["step"] for row in log["records"])])
    return float(np.average([row["density"] for row in log["records"]], weights=steps))


def unit(log: Log) -> str:
    """What a run's bits are of: ``"byte"`` or ``"token"``."""
    return "token" if "tokens" in log.get("data", ()) else "byte"


def _held_out_ratio(first: Log, second: Log) -> float | None:
    name = f"held_out_bits_per_{unit(first)}"
    scores = [log.get(name, {}).get("run") for log in (first, second)]
    if scores[0] is None or scores[1] is None:
        return None
    return round(scores[1] / scores[0], 5)


def label(log: Log) -> str:
    """A run's name in tables and pictures."""
    attention = log["identity"]["attention"]
    if attention["kind"] == "dense":
        return "dense"
    return f"pooled, density {mean_density(log):.2f}"


def summary(result: Mapping[str, Any]) -> str:
    """A few lines for a terminal."""
    row, (first, second) = result["comparison"], result["runs"]
    held_out = row["held_out_ratio"]
    lines = [
        f"{label(second)}, against {label(first)}, over {row['steps']} steps on "
        f"{second['environment']['device']}:",
        f"  loss, mean of {row['smoothing']} steps: {row['final_ratio']:.4f} times at the end, "
        f"{row['mean_ratio']:.4f} on average, {row['largest_ratio']:.4f} at most",
        f"  time in steps: {row['seconds'][0]:.1f} s and {row['seconds'][1]:.1f} s, "
        f"{row['seconds_saved']:.1f} s saved, {row['speedup']:.2f} times as fast",
    ]
    if held_out is not None:
        lines.append(f"  held-out bits per {unit(first)}: {held_out:.4f} times")
    return "\n".join(lines)


def draw(logs: Sequence[Log], *, width: int = 20) -> "Figure":
    """The picture that `save_plot` saves."""
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


def save_plot(logs: Sequence[Log], path: Path, *, width: int = 20) -> None:
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
