"""The command `turbojax train`: its options; `turbojax.finetune` trains."""

from pathlib import Path
from typing import Annotated, Any

import typer

from turbojax.app import options, programs, terminal, training_progress


def train(
    out: Annotated[Path, typer.Option(help="Folder of log, checkpoints and model.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file, or a folder of them, to train on; may be repeated. Default: this "
            "Python's standard library.",
            show_default=False,
        ),
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file or folder to measure with; may be repeated. Default: the last "
            "twentieth of --data, or the modules of the standard library that the embedded model "
            "was not trained on.",
            show_default=False,
        ),
    ] = None,
    model: options.ByteModel = "embedded",
    attention: Annotated[str, typer.Option(help="dense or pooled.")] = "dense",
    policy: Annotated[
        str | None,
        typer.Option(
            help="How pooled attention chooses levels: threshold (by an estimate of the attention, "
            "per layer and step; the default), topk (the same), or window (near blocks token by "
            "token, the past as means).",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Of --policy window: distance in tokens up to which nothing is pooled; "
            "beyond, means of 8 tokens. Default: 896.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Of pooled attention: tokens of a block of queries, and of keys, that share a "
            "level. Default: 128.",
            show_default=False,
        ),
    ] = None,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed",
            help="Of pooled attention: the files in a sequence do not see each other.",
        ),
    ] = False,
    context: Annotated[int, typer.Option(help="Bytes per sequence.")] = 16384,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 300,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear rise.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the order of the data.")] = 0,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32. Default: float32 on a CPU, otherwise bfloat16.",
            show_default=False,
        ),
    ] = None,
    remat: Annotated[
        bool, typer.Option("--remat", help="Recompute layers in the backward pass: less memory.")
    ] = False,
    implementation: Annotated[
        str | None,
        typer.Option(
            help="What runs pooled attention. Default: the fastest that can.", show_default=False
        ),
    ] = None,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between held-out scores; 0: at the end alone.")
    ] = 100,
    evaluate_windows: Annotated[
        int, typer.Option(help="Sequences of the held-out text that are scored, at most.")
    ] = 64,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss to this file.")] = None,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Fine-tune a byte-level model at a long context, with dense or pooled attention.

    Run the same command again to go on after an interruption. At the end OUT/model is a Hugging
    Face folder that `turbojax generate --model` reads, and OUT/log.json the log.
    """
    import jax

    from turbojax import models
    from turbojax.app import startup

    programs.use(compilation_cache, "turbojax train")
    with terminal.one_line_errors(
        "turbojax train", smaller="--batch or --context, or --remat", extra="train"
    ):
        from turbojax import _writing, finetune

        _writing.require_free(out)
        startup.check_output_folder("--out", out)
        startup.check_plot(plot)
        if precision is None:
            precision = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        settings = finetune.Settings(
            steps=steps,
            context=context,
            batch_size=batch,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            seed=seed,
            precision=precision,
        )
        rhythm = finetune.Rhythm(log_every, save_every, evaluate_every, evaluate_windows)
        pooled = _pooled(attention, policy, window, block_size, implementation)
        if packed and pooled is None:
            raise ValueError("--packed is for --attention pooled, not dense")
        if data:
            corpus = finetune.corpus_of(data, held_out or ())
        elif held_out:
            raise ValueError("--held-out is for --data")
        else:
            corpus = finetune.standard_library_corpus()
        start = models.load_transformer(model)
        _check_memory(start.config, settings)
        typer.echo(f"{corpus.stream.size:,} bytes of text; {start.config.num_parameters:,} weights")
        with training_progress.progress_bar("byte") as bar:
            log = finetune.fine_tune(
                out,
                start,
                settings,
                corpus,
                pooled=pooled,
                packed=packed,
                remat=remat,
                rhythm=rhythm,
                source=model,
                report=training_progress.Display(bar, steps, out, "byte"),
            )
        if plot is not None:
            finetune.save_plot([log], plot)
    for name, bits in log["held_out_bits_per_byte"].items():
        kind = "this attention" if name == "run" else "dense attention"
        typer.echo(f"held out, with {kind}: {bits:.4f} bits per byte")
    typer.echo(f"wrote {out / finetune.MODEL_NAME}")


def _check_memory(config: Any, settings: Any) -> None:
    """Raises ValueError if a step needs more memory than there is, with the least that it can."""
    import jax.numpy as jnp

    from turbojax.app import startup

    batch, context = settings.batch_size, settings.context
    # What every layer begins with, which even --remat keeps, and the logits in float32.
    width = config.num_layers * config.hidden_size * jnp.dtype(settings.precision).itemsize
    startup.check_memory(
        {
            # Weights, their gradient and two moments, all float32.
            "weights and optimizer": 16 * config.num_parameters,
            f"{batch:,} sequences of {context:,} bytes": batch
            * context
            * (width + 4 * config.vocab_size),
        },
        "smaller --batch or --context",
    )


def _pooled(
    attention: str,
    policy: str | None,
    window: int | None,
    block_size: int | None,
    implementation: str | None,
) -> Any:
    """The `PooledAttention` of the options, or None for dense attention."""
    from turbojax import models

    if attention not in ("dense", "pooled"):
        raise ValueError(f"attention {attention!r} must be dense or pooled")
    if attention == "pooled":
        return models.pooled_by_name(
            policy or "threshold",
            window=window,
            block_size=128 if block_size is None else block_size,
            implementation=implementation,
        )
    if (policy, window, block_size, implementation) != (None, None, None, None):
        raise ValueError(
            "policy, window, block size and implementation are for --attention pooled, not dense"
        )
    return None
