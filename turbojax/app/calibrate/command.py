"""The command `turbojax calibrate`: its options, and what it prints."""

from pathlib import Path
from typing import Annotated

import typer

from turbojax import _interrupt
from turbojax.app import options, programs, terminal
from turbojax.app.evaluate.command import split_methods

Out = Annotated[Path, typer.Option(help="JSON file to write: what --cache and --methods take.")]
Model = Annotated[
    str, typer.Option(help="'embedded', a folder with a checkpoint, a .gguf file, or smollm2.")
]
Candidates = Annotated[
    list[str] | None,
    typer.Option(
        help="Caches that a layer may get, comma separated, with options as turbojax eval "
        "--methods has them. Default: k4v2,4bit,paged_int8_v4,paged_int8."
    ),
]
Loss = Annotated[
    float | None,
    typer.Option(
        help="The smallest caches that lose at most so many bits per token, as divergence from "
        "the exact cache. Default: 0.01."
    ),
]
Ratio = Annotated[
    float | None,
    typer.Option(
        help="Instead of --loss: the caches that lose least of those that are so many times "
        "smaller than bfloat16 together."
    ),
]
Context = Annotated[int, typer.Option(help="Tokens of a window.")]
Decoded = Annotated[int, typer.Option(help="How many of them are decoded, the last ones.")]
Windows = Annotated[int, typer.Option(help="Windows, spread over the text.")]
BatchSize = Annotated[int, typer.Option(help="Windows that run at once.")]
Length = Annotated[
    int | None,
    typer.Option(
        help="Tokens that caches are sized for: sizes for a token differ where sequences are "
        "short. Default: --context."
    ),
]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text to measure with, unlike what you evaluate on later; may be repeated. Default: "
        "modules of this Python's standard library that turbojax eval does not read."
    ),
]

Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16. What one layer's cache costs may be less than what 16 "
        "bits round in the other layers: take them for a model that is too large otherwise."
    ),
]


def calibrate(
    out: Out,
    model: Model = "embedded",
    candidates: Candidates = None,
    loss: Loss = None,
    ratio: Ratio = None,
    context: Context = 1024,
    decoded: Decoded = 128,
    windows: Windows = 8,
    batch_size: BatchSize = 4,
    length: Length = None,
    text: TextFiles = None,
    weights: options.Weights = None,
    dtype: Dtype = "float32",
    max_length: options.MaxLength = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Choose a cache for every layer: small ones where they cost little.

    Measures what each cache costs in each layer alone, chooses by layer, and measures the choice
    beside the same cache in all layers. The file is what `turbojax generate --cache` and `turbojax
    eval --methods` take.
    """
    from turbojax.app.calibrate import run

    programs.use(compilation_cache, "turbojax calibrate")
    with terminal.one_line_errors("turbojax calibrate", smaller="--batch-size or --context"):
        settings = run.CalibrateSettings(
            out=out,
            model=model,
            candidates=split_methods(candidates) or run.DEFAULT_CANDIDATES,
            loss=loss,
            ratio=ratio,
            context=context,
            decoded=decoded,
            windows=windows,
            batch_size=batch_size,
            length=length,
            texts=tuple(text or ()),
            weights=weights,
            dtype=dtype,
            max_length=max_length,
        )
        _interrupt.say(lambda: f"nothing was written to {out}")
        with terminal.Bars() as bars:
            report = run.run(settings, bars.advance)
    terminal.report(report, run.render, as_json, f"wrote {out}")
