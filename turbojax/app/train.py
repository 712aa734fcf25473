"""The commands `turbojax train`, `lora` and `compare`, around `turbojax.finetune`."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turbojax import _interrupt
from turbojax.app import options, programs, terminal


def train(
    out: Annotated[Path, typer.Option(help="Folder of log, checkpoints and model.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file, a folder of them, or, where tokens are not bytes, a .jsonl file of "
            "texts or conversations to train on; may be repeated. Default of a byte-level model: "
            "this Python's standard library."
        ),
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file or folder to measure with; may be repeated. Default: the last "
            "twentieth of --data, or the modules of the standard library that the embedded model "
            "was not trained on."
        ),
    ] = None,
    model: options.FloatModel = "embedded",
    attention: Annotated[str, typer.Option(help="dense or pooled.")] = "dense",
    policy: Annotated[
        str | None,
        typer.Option(
            help="How pooled attention chooses levels: threshold (by an estimate of the attention, "
            "per layer and step; the default), topk (the same), or window (near blocks token by "
            "token, the past as means)."
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Of --policy window: distance in tokens up to which nothing is pooled; "
            "beyond, means of 8 tokens. Default: 896."
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Of pooled attention: tokens of a block of queries, and of keys, that share a "
            "level. Default: 128."
        ),
    ] = None,
    bounds: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C,D",
            help="Of --policy threshold: up to which shares of the attention blocks have level 1, "
            "2, 4 and 8; of topk: up to which shares of the blocks. Default: "
            "0.7,0.85,0.93,0.98; 0.05,0.15,0.25,0.5.",
        ),
    ] = None,
    near: Annotated[
        int | None,
        typer.Option(
            help="Of --policy threshold and topk: distance in tokens up to which blocks are read "
            "token by token, whatever their importance. Default: 256 of threshold without "
            "--bounds, else 0."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Of --policy threshold and topk: queries, and means of keys, of a block that its "
            "importance is estimated from. Default: 8 of threshold, 4 of topk."
        ),
    ] = None,
    dense_layers: Annotated[
        int,
        typer.Option(help="Of pooled attention: how many of the first layers are dense."),
    ] = 0,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed",
            help="Of pooled attention: the files in a sequence do not see each other.",
        ),
    ] = False,
    context: Annotated[
        int, typer.Option(help="Tokens per sequence; bytes of a byte-level model.")
    ] = 16384,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    accumulate: options.Accumulate = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 300,
    optimizer: options.Optimizer = "adamw",
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear rise.")] = 20,
    schedule: Annotated[
        str,
        typer.Option(
            help="After the rise: cosine, linear, constant, or wsd (constant, then linear)."
        ),
    ] = "cosine",
    final_rate: Annotated[
        float | None,
        typer.Option(help="Where cosine, linear and wsd end, a share of the peak. Default: 0.1."),
    ] = None,
    decay_fraction: Annotated[
        float | None,
        typer.Option(
            help="Of --schedule wsd: the share of the steps after the rise in which the rate "
            "falls. Default: 0.1."
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="Of matrices and embeddings, times the rate.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the order of the data.")] = 0,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32. Default: float32 on a CPU, otherwise bfloat16; "
            "float16 on GPUs before Ampere, such as a T4, or float32 there for Gemma 2 and 3."
        ),
    ] = None,
    remat: options.Remat = "none",
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Devices to train on: data=4,model=2,sequence=2 splits the sequences of a step "
            "over 4, heads and inner sizes of layers over 2, the tokens of each sequence over 2, "
            "and weights over all. Default: one device.",
        ),
    ] = None,
    fsdp: options.Fsdp = True,
    coordinator: options.Coordinator = None,
    count: options.Count = None,
    index: options.Index = None,
    heartbeat: options.Heartbeat = 60.0,
    implementation: Annotated[
        str | None,
        typer.Option(help="What runs pooled attention. Default: the fastest that can."),
    ] = None,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between held-out scores; 0: at the end alone.")
    ] = 100,
    evaluate_windows: Annotated[
        int, typer.Option(help="Sequences of the held-out text that are scored, at most.")
    ] = 64,
    log_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Send what is logged there, too: tensorboard (event files in OUT/tensorboard) or "
            "wandb; may be repeated."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss to this file.")] = None,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Fine-tune all weights of a model, with dense or pooled attention.

    Run the same command again to go on after an interruption. At the end OUT/model is a Hugging
    Face folder that `turbojax generate --model` reads, and OUT/log.json the log.
    """
    programs.use(compilation_cache, "turbojax train")
    with (
        terminal.one_line_errors(
            "turbojax train", smaller="--batch or --context, or --remat full", extra="train"
        ),
        options.together(coordinator, count, index, heartbeat) as is_first,
    ):
        from turbojax import _writing, finetune
        from turbojax.app import startup
        from turbojax.finetune.trainer import check_remat

        if is_first:
            _writing.require_free(out)
            startup.check_output_folder("--out", out)
            startup.check_plot(plot)
            finetune.check_trackers(tuple(log_to or ()))
        settings = finetune.Settings(
            steps=steps,
            context=context,
            batch_size=batch,
            accumulate=accumulate,
            optimizer_name=optimizer,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            schedule_name=schedule,
            decay_fraction=decay_fraction,
            weight_decay=weight_decay,
            seed=seed,
            precision=precision or _usual_precision(model),
            remat=remat,
            **({} if final_rate is None else {"final_rate": final_rate}),
        )
        rhythm = finetune.Rhythm(log_every, save_every, evaluate_every, evaluate_windows)
        choice = {"window": window, "bounds": _bounds(bounds), "near": near, "samples": samples}
        pooled = _pooled(attention, policy, block_size, implementation, choice)
        check_remat(remat, is_pooled=pooled is not None)
        if packed and pooled is None:
            raise ValueError("--packed is for --attention pooled, not dense")
        if mesh is None and not fsdp:
            raise ValueError("--no-fsdp is for --mesh")
        how = {"pooled": pooled, "packed": packed, "fsdp": fsdp}
        how["dense_layers"] = dense_layers
        sinks = tuple(log_to or ()) if is_first else None
        log = _train(out, model, settings, (data, held_out), rhythm, mesh, sinks, how=how)
        if plot is not None and is_first:
            finetune.save_plot([log], plot)
    if not is_first:
        return
    unit = finetune.unit(log)
    for name, bits in log[f"held_out_bits_per_{unit}"].items():
        kind = "this attention" if name == "run" else "dense attention"
        typer.echo(f"held out, with {kind}: {bits:.4f} bits per {unit}")
    typer.echo(f"wrote {out / finetune.MODEL_NAME}")


def _usual_precision(model: str) -> str:
    """The dtype to compute in here, whatever the weights are stored in."""
    from turbojax import device
    from turbojax.app import text_model

    usual = device.compute_dtype()
    if usual != "float16":  # which alone depends on the model
        return usual.name
    found = text_model.usual_dtype(None, text_model.find_text_model(model).config)
    return (found or usual).name


def _corpus(model: str, data: list[Path] | None, held_out: list[Path] | None) -> Any:
    """The text that the options name, as a model's bytes or tokens."""
    from turbojax import finetune
    from turbojax.app import text_model
    from turbojax.models.text.tokenizer import ByteTokenizer

    if held_out and not data:
        raise ValueError("--held-out is for --data")
    tokenizer = text_model.find_text_model(model).tokenizer
    if not isinstance(tokenizer, ByteTokenizer):
        if not data:
            raise ValueError(f"--data is needed: model {model!r} reads tokens")
        # Between texts stands what ended texts when the model was trained.
        ends = [*tokenizer.eos_token_ids[:1], tokenizer.bos_token_id]
        separator = next((token for token in ends if token is not None), None)
        return finetune.tokens_of(tokenizer, data, held_out or (), separator=separator)
    if data:
        return finetune.corpus_of(data, held_out or ())
    return finetune.standard_library_corpus()


def _train(
    out: Path,
    model: str,
    settings: Any,
    text: tuple[list[Path] | None, list[Path] | None],
    rhythm: Any,
    mesh: str | None,
    sinks: tuple[str, ...] | None,
    *,
    how: dict[str, Any],
) -> dict[str, Any]:
    """The run, and what it shows as it trains: nothing with `sinks` None, else to those, too."""
    from turbojax import finetune, models
    from turbojax.app import text_model
    from turbojax.finetune import split

    axes = options.axes_of(mesh)
    if axes is not None:
        split.Split(axes, settings.precision, how["fsdp"]).check(settings)
    corpus = _corpus(model, *text)
    unit = "token" if isinstance(corpus, finetune.TokenCorpus) else "byte"
    start = models.load_transformer(model, mesh=axes)
    _check_memory(start.config, settings, axes, how["fsdp"])
    how = {**how, "axes": axes, "rhythm": rhythm, "source": model}
    if unit == "token":
        how["extra_config"], how["companions"] = text_model.files_beside(model)
    if sinks is None:
        return finetune.fine_tune(out, start, settings, corpus, **how)
    typer.echo(f"{corpus.stream.size:,} {unit}s of text; {start.config.num_parameters:,} weights")
    config = dataclasses.asdict(settings) | {"model": model}
    with _progress_bar(unit) as bar, contextlib.ExitStack() as stack:
        shown = _Display(bar, settings.steps, out, unit)
        sent = [stack.enter_context(finetune.tracker(name, out, config)) for name in sinks]
        report = finetune.reports(shown, *sent)
        return finetune.fine_tune(out, start, settings, corpus, report=report, **how)


def _check_memory(config: Any, settings: Any, axes: Any, fsdp: bool) -> None:
    """Raises ValueError if a step needs more memory than a device has, with the least it can."""
    import jax.numpy as jnp

    from turbojax.app import startup
    from turbojax.finetune.losses import MOST_LOGITS
    from turbojax.finetune.optimizer import MOMENTS

    batch, context = settings.part_size, settings.context
    # Weights, their gradient and what the optimizer keeps, all float32; a gradient of a part.
    numbers = 2 + MOMENTS[settings.optimizer_name] + int(settings.accumulate > 1)
    devices, heads, parts = 1, 1, 1
    if axes is not None:
        devices, heads = axes.size("batch") * axes.size("sequence"), axes.size("heads")
        parts = heads * (devices if fsdp else 1)
    # The input of every layer, which even --remat full keeps, and logits in float32.
    logits = min(batch * context // (devices * heads) * config.vocab_size, MOST_LOGITS)
    width = config.num_layers * config.hidden_size * jnp.dtype(settings.precision).itemsize
    startup.check_memory(
        {
            "weights and optimizer": 4 * numbers * config.num_parameters // parts,
            f"{batch:,} sequences of {context:,}": batch * context * width // devices + 4 * logits,
        },
        "smaller --batch or --context",
    )


# At 16k these cost less than 1 % of the loss at a quarter of the work: `docs/benchmarks/pooled.md`.
_BOUNDS, _NEAR = (0.7, 0.85, 0.93, 0.98), 256


def _bounds(text: str | None) -> tuple[float, ...] | None:
    """Four numbers of `--bounds`."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--bounds={text!r} must be four numbers with commas between") from None


def _pooled(
    attention: str,
    policy: str | None,
    block_size: int | None,
    implementation: str | None,
    choice: dict[str, Any],
) -> Any:
    """The `PooledAttention` of the options, or None for dense attention."""
    from turbojax import models

    if attention not in ("dense", "pooled"):
        raise ValueError(f"attention {attention!r} must be dense or pooled")
    if attention == "pooled":
        policy = policy or "threshold"
        if policy == "threshold" and choice["bounds"] is None:
            near = choice["near"]
            choice = {**choice, "bounds": _BOUNDS, "near": _NEAR if near is None else near}
        return models.pooled_by_name(
            policy,
            block_size=128 if block_size is None else block_size,
            implementation=implementation,
            **choice,
        )
    if any(value is not None for value in (policy, block_size, implementation, *choice.values())):
        raise ValueError(
            "policy, window, bounds, near, samples, block size and implementation are for "
            "--attention pooled, not dense"
        )
    return None


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
            "twentieth of --data."
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
            "model with experts those of attention."
        ),
    ] = None,
    gradient: Annotated[
        str | None,
        typer.Option(
            help="Of products with INT4 weights: e4m3, at the speed of the products on Hopper, or "
            "exact. Default: e4m3."
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
        with _progress_bar("token") as bar:
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
                report=_Display(bar, steps, out, "token"),
            )
    typer.echo(f"wrote {out / finetune.ADAPTERS_NAME}")


def _frozen(found: Any, *, is_sliced: bool) -> Any:
    """The model to train beside, in slices if they are wanted; what is whole is dropped."""
    from turbojax import finetune

    if found.axes is None or not found.axes.batch or not is_sliced:
        return found.load().decoder
    return finetune.sliced(found.load().decoder if found.is_quantized else found.open())


def compare(
    first: Annotated[Path, typer.Argument(help="Folder or log of a run, usually dense.")],
    second: Annotated[Path, typer.Argument(help="The same settings, pooled.")],
    smoothing: Annotated[int, typer.Option(help="Steps over which losses are averaged.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw both losses to this file.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write figures and both logs to this JSON file.")
    ] = None,
) -> None:
    """Compare two runs of `turbojax train`: their losses at the same step, and the time saved."""
    from turbojax.app import startup

    with terminal.one_line_errors("turbojax compare", extra="train"):
        from turbojax import _writing, finetune

        startup.check_plot(plot)
        startup.check_output_file("--write", write)
        logs = [finetune.read_log(path) for path in (first, second)]
        result = finetune.compare(*logs, width=smoothing)
        if write is not None:
            _writing.write_text(write, json.dumps(result) + "\n")
        if plot is not None:
            finetune.save_plot(logs, plot, width=smoothing)
    typer.echo(finetune.summary(result))


def _progress_bar(unit: str) -> Progress:
    """A bar of steps on standard error, with bits per `unit`, which `_Display` fills."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[bits]}} bits/{unit}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, soft_wrap=True),
    )


class _Display:
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
