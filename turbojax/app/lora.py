"""The command `turbojax lora`: its options, and what it shows; `turbojax.finetune` trains."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turbojax import _interrupt
from turbojax.app import options, programs, terminal
from turbojax.app.train import kept


def lora(
    out: Annotated[Path, typer.Option(help="Folder of log, checkpoints and adapters.")],
    model: Annotated[
        str, typer.Option(help="The folder of a quantized model, see turbojax quantize.")
    ],
    data: Annotated[
        list[Path],
        typer.Option(help="A text file, or a folder of them, to train on; may be repeated."),
    ],
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file or folder to measure with; may be repeated. Default: the last "
            "twentieth of --data.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[int, typer.Option(help="Of each adapter.")] = 8,
    alpha: Annotated[
        float, typer.Option(help="What adapters add is multiplied by alpha / rank.")
    ] = 16.0,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A linear layer that gets adapters: q, k, v, o, gate, up or down; may be "
            "repeated. Default: all, in a model with experts those of attention.",
            show_default=False,
        ),
    ] = None,
    gradient: Annotated[
        str,
        typer.Option(
            help="Of the INT4 products: e4m3, at the speed of the products on Hopper, or exact."
        ),
    ] = "e4m3",
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 1e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear rise.")] = 10,
    seed: Annotated[int, typer.Option(help="Of new adapters, and the order of the data.")] = 0,
    dtype: options.Dtype = None,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between held-out scores; 0: at both ends alone.")
    ] = 100,
    evaluate_windows: Annotated[
        int, typer.Option(help="Sequences of the held-out text that are scored, at most.")
    ] = 64,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Train low-rank adapters (LoRA) beside the INT4 weights of a quantized model.

    Run the same command again to go on after an interruption. At the end OUT/adapters holds them
    as PEFT stores them, for `turbojax generate --adapters`, and OUT/log.json the log.
    """
    from turbojax import models
    from turbojax.app import startup, text_model

    programs.use(compilation_cache, "turbojax lora")
    with terminal.one_line_errors("turbojax lora", smaller="--batch or --context", extra="train"):
        from turbojax import _writing, finetune

        _writing.require_free(out)
        startup.check_output_folder("--out", out)
        found = text_model.find_text_model(model, text_model.parse_dtype(dtype))
        settings = finetune.Settings(
            steps=steps,
            context=context,
            batch_size=batch,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=0.0,
            seed=seed,
            precision=found.dtype.name,
        )
        rhythm = finetune.Rhythm(log_every, save_every, evaluate_every, evaluate_windows)
        corpus = finetune.tokens_of(found.tokenizer, data, held_out or ())
        decoder = found.load().decoder
        if not isinstance(decoder, models.QuantizedDecoder):
            raise ValueError(f"model {model!r} must be quantized: see turbojax quantize")
        targets = tuple(target) if target else None
        adapters = models.init_adapters(decoder, rank=rank, alpha=alpha, targets=targets, seed=seed)
        typer.echo(f"{corpus.stream.size:,} tokens; {adapters.num_parameters:,} numbers to train")
        with _progress_bar() as bar:
            finetune.fine_tune_adapters(
                out,
                decoder,
                adapters,
                settings,
                corpus,
                gradient=cast(Any, gradient),
                rhythm=rhythm,
                base_model=model,
                report=_Display(bar, steps, out),
            )
    typer.echo(f"wrote {out / finetune.ADAPTERS_NAME}")


class _Display:
    """Shows records as a bar and as lines, and sets what an interrupted run says."""

    def __init__(self, bar: Progress, steps: int, out: Path) -> None:
        self._bar, self._out = bar, out
        self._task = bar.add_task("compiling", total=steps, bits="-")

    def __call__(self, row: dict[str, Any]) -> None:
        from turbojax import finetune

        _interrupt.say(lambda: kept(self._out, finetune.last_checkpoint(self._out)))
        step = row["step"]
        if row.get("resumed"):
            self._bar.console.print(f"resuming at step {step}")
        if "held_out_bits_per_token" in row:
            bits = row["held_out_bits_per_token"]
            self._bar.console.print(f"step {step:6d}  held out {bits:.4f} bits/token")
        if "bits_per_token" not in row:
            self._bar.update(self._task, completed=step)
            return
        self._bar.console.print(
            f"step {step:6d}  {row['bits_per_token']:.4f} bits/token  "
            f"rate {row['learning_rate']:.2e}  norm {row['grad_norm']:.2f}  "
            f"{row['tokens_per_second']:,} tokens/s"
        )
        bits = f"{row['bits_per_token']:.3f}"
        self._bar.update(self._task, completed=step, bits=bits, description="training")


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bits]} bits/token"),
        TimeRemainingColumn(),
        console=Console(stderr=True, soft_wrap=True),
    )
