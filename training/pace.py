"""How many steps a machine does in a given time: measured once, kept for a run that is resumed."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from training.state import Settings, Trainer
from turbojax import _writing

PACE_NAME = "pace.json"
_STEPS = 8


def for_minutes(
    minutes: float, settings: Settings, make: Callable[[Settings], Trainer], folder: Path
) -> Settings:
    """The settings with as many steps as take so long.

    Each context's steps are timed on their own, with weights that are thrown away; the run's steps
    have the settings' shares of them. Compilation, evaluations and checkpoints are not counted.

    Args:
      minutes: time in steps.
      settings: of the run, with any number of steps.
      make: makes a trainer.
      folder: of the run. What was measured is kept there: a run that is resumed has its steps.

    Raises:
      ValueError: if `minutes` is not positive, or those that are kept were for other settings.
    """
    if not 0 < minutes < float("inf"):
        raise ValueError(f"{minutes=} must be positive and finite")
    path, asked = folder / PACE_NAME, dataclasses.asdict(dataclasses.replace(settings, steps=1))
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if (kept["minutes"], kept["settings"]) != (minutes, asked):
            raise ValueError(
                f"{path} has the steps of a run of {kept['minutes']} minutes with "
                f"{kept['settings']}, must be {minutes} with {asked}"
            )
        return dataclasses.replace(settings, steps=kept["steps"])
    shares = _shares(settings)
    seconds = {context: _seconds(settings, context, make) for context in shares}
    mean = sum(share * seconds[context] for context, share in shares.items())
    steps = max(1, int(60 * minutes / mean))
    row = {"minutes": minutes, "steps": steps, "seconds_per_step": seconds, "settings": asked}
    _writing.write_text(path, json.dumps(row, indent=1) + "\n")
    for context, each in seconds.items():
        print(
            f"context {context}: {each:.4f} s per step, "
            f"{settings.tokens_per_step / each / 1e6:.3f} M tokens/s",
            flush=True,
        )
    print(f"{steps:,} steps take {minutes:g} minutes", flush=True)
    return dataclasses.replace(settings, steps=steps)


def _shares(settings: Settings) -> dict[int, float]:
    """Context -> share of the steps."""
    shares: dict[int, float] = {}
    short = 1 - settings.long_fraction - settings.longest_fraction
    for context, share in (
        (settings.short_context, short),
        (settings.long_context, settings.long_fraction),
        (settings.longest_context, settings.longest_fraction),
    ):
        if share > 0:
            shares[context] = shares.get(context, 0.0) + share
    return shares


def _seconds(settings: Settings, context: int, make: Callable[[Settings], Trainer]) -> float:
    """Mean time of a step with this context, once compiled."""
    alone = dataclasses.replace(
        settings,
        steps=_STEPS + 2,
        short_context=context,
        long_context=context,
        long_fraction=0.0,
        longest_fraction=0.0,
    )
    trainer = make(alone)
    for _ in range(2):
        float(trainer.run_step()["bits_per_byte"])
    begun = time.perf_counter()
    rows = [trainer.run_step() for _ in range(_STEPS)]
    float(rows[-1]["bits_per_byte"])
    return (time.perf_counter() - begun) / _STEPS
