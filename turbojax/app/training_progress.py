"""What `turbojax train` and `turbojax lora` show as they train, and where they are interrupted."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turbojax import _interrupt


def progress_bar(unit: str) -> Progress:
    """A bar of steps on standard error, with bits per `unit`, which `Display` fills."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[bits]}} bits/{unit}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, soft_wrap=True),
    )


class Display:
    """Shows records as a bar and as lines, and sets what an interrupted run says.

    `out` is the run's folder, and `unit` what bits are counted per, ``"byte"`` or ``"token"``.
    """

    def __init__(self, bar: Progress, steps: int, out: Path, unit: str) -> None:
        self._bar, self._out, self._unit = bar, out, unit
        self._task = bar.add_task("compiling", total=steps, bits="-")

    def __call__(self, row: dict[str, Any]) -> None:
        """Shows a record or an evaluation, see `turbojax.finetune.run.Report`."""
        from turbojax import finetune

        # Not earlier: until a run takes steps, the folder may hold another run's checkpoints.
        _interrupt.say(lambda: _kept(self._out, finetune.last_checkpoint(self._out)))
        step, name = row["step"], f"bits_per_{self._unit}"
        if row.get("resumed"):
            self._bar.console.print(f"resuming at step {step}")
        if f"held_out_{name}" in row:
            bits = row[f"held_out_{name}"]
            self._bar.console.print(f"step {step:6d}  held out {bits:.4f} bits/{self._unit}")
        if name not in row:
            self._bar.update(self._task, completed=step)
            return
        density = f"density {row['density']:.3f}  " if "density" in row else ""
        self._bar.console.print(
            f"step {step:6d}  {row[name]:.4f} bits/{self._unit}  "
            f"rate {row['learning_rate']:.2e}  norm {row['grad_norm']:.2f}  "
            f"{density}{row['tokens_per_second']:,} tokens/s"
        )
        bits = f"{row[name]:.3f}"
        self._bar.update(self._task, completed=step, bits=bits, description="training")


def _kept(out: Path, step: int | None) -> str:
    if step is None:
        return "no checkpoint was written yet; the same command begins anew"
    return f"the checkpoint of step {step} is in {out}; the same command goes on from there"
