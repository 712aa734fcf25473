"""The command `turbojax lora`: its options; `turbojax.finetune` trains."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from turbojax.app import options, programs, terminal, training_progress


def lora(
    out: Annotated[Path, typer.Option(help="Folder of log, checkpoints and adapters.")],
    model: Annotated[
        str,
        typer.Option(
            help="embedded, smollm2, a GGUF file, or a checkpoint's folder, with floating-point "
            "or INT4 weights (see turbojax quantize)."
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            help="A text file, a folder of them, or a .jsonl file of texts or conversations to "
            "train on; may be repeated."
        ),
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
            help="A linear layer that gets adapters: q, k, v, o, gate, up or down, of latent "
            "attention q or q_a and q_b, kv_a, kv_b or o; may be repeated. Default: all, in a "
            "model with experts those of attention.",
            show_default=False,
        ),
    ] = None,
    gradient: Annotated[
        str | None,
        typer.Option(
            help="Of products with INT4 weights: e4m3, at the speed of the products on Hopper, or "
            "exact. Default: e4m3.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    accumulate: options.Accumulate = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    optimizer: options.Optimizer = "adamw",
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 1e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear rise.")] = 10,
    seed: Annotated[int, typer.Option(help="Of new adapters, and the order of the data.")] = 0,
    dtype: options.Dtype = None,
    remat: Annotated[
        str,
        typer.Option(
            help="What the backward pass computes again, for less memory: none or full (layers)."
        ),
    ] = "none",
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Devices to train on: data=4,model=2 splits the sequences of a step over 4, and "
            "heads and inner sizes of floating-point layers over 2. Default: one device.",
            show_default=False,
        ),
    ] = None,
    fsdp: options.Fsdp = True,
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
    """Train low-rank adapters (LoRA) beside the weights of a model, INT4 or floating-point ones.

    Run the same command again to go on after an interruption. At the end OUT/adapters holds them
    as PEFT stores them, for `turbojax generate --adapters`, and OUT/log.json the log.
    """
    from turbojax import models
    from turbojax.app import startup, text_model

    programs.use(compilation_cache, "turbojax lora")
    with terminal.one_line_errors("turbojax lora", smaller="--batch or --context", extra="train"):
        from turbojax import _writing, finetune
        from turbojax.finetune.frozen import check_frozen
        from turbojax.finetune.split import check_batch
        from turbojax.finetune.trainer import check_remat

        _writing.require_free(out)
        startup.check_output_folder("--out", out)
        if mesh is None and not fsdp:
            raise ValueError("--no-fsdp is for --mesh")
        axes = options.axes_of(mesh)
        found = text_model.find_text_model(model, text_model.parse_dtype(dtype), axes=axes)
        settings = finetune.Settings(
            steps=steps,
            context=context,
            batch_size=batch,
            accumulate=accumulate,
            optimizer_name=optimizer,
            remat=remat,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=0.0,
            seed=seed,
            precision=found.dtype.name,
        )
        rhythm = finetune.Rhythm(log_every, save_every, evaluate_every, evaluate_windows)
        check_remat(remat, is_pooled=False)
        check_frozen(found.axes, is_quantized=found.is_quantized)
        if found.axes is not None:
            check_batch(settings, found.axes)
        corpus = finetune.tokens_of(found.tokenizer, data, held_out or ())
        decoder = _frozen(found, is_sliced=fsdp)
        targets = tuple(target) if target else None
        adapters = models.init_adapters(decoder, rank=rank, alpha=alpha, targets=targets, seed=seed)
        typer.echo(f"{corpus.stream.size:,} tokens; {adapters.num_parameters:,} numbers to train")
        with training_progress.progress_bar("token") as bar:
            finetune.fine_tune_adapters(
                out,
                decoder,
                adapters,
                settings,
                corpus,
                gradient=cast(Any, gradient),
                fsdp=fsdp,
                rhythm=rhythm,
                base_model=model,
                report=training_progress.Display(bar, steps, out, "token"),
            )
    typer.echo(f"wrote {out / finetune.ADAPTERS_NAME}")


def _frozen(found: Any, *, is_sliced: bool) -> Any:
    """The model to train beside, in slices if they are wanted; what is whole is dropped."""
    from turbojax import finetune

    if found.axes is None or not found.axes.batch or not is_sliced:
        return found.load().decoder
    return finetune.sliced(found.load().decoder if found.is_quantized else found.open())
