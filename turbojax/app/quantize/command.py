"""The command `turbojax quantize`."""

import collections
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from turbojax import _interrupt
from turbojax.app import options, programs, terminal


def quantize(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write the quantized model to: new, or of a quantized model, which is "
            "overwritten."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="'embedded', or a folder with a checkpoint of any supported family: config.json, "
            "safetensors files, and tokenizer.json, which needs the extra 'text'."
        ),
    ] = "embedded",
    scale_dtype: Annotated[
        str,
        typer.Option(
            help="Scales of the groups of weights: e4m3, for the fastest kernels, or bf16, with "
            "which dequantized weights are not rounded again."
        ),
    ] = "e4m3",
    cas: Annotated[
        bool, typer.Option(help="Even out the input channels of the weights (CAS).")
    ] = True,
    cas_inputs: Annotated[
        str,
        typer.Option(
            help="Whether CAS also evens out what the norms write (inputs of q, k, v, gate and "
            "up): all, for models with outliers there, or constant, as the paper has it, which is "
            "a little better for some models without."
        ),
    ] = "all",
    pts: Annotated[
        bool, typer.Option(help="Scale each weight by a power of two against underflow (PTS).")
    ] = True,
    rpn: Annotated[bool, typer.Option(help="Even out pairs of key channels (RPN).")] = True,
    crs: Annotated[
        bool, typer.Option(help="Scale the largest key channels (CRS): 8 pairs of each head.")
    ] = True,
    quantize_embedding: Annotated[
        bool, typer.Option("--quantize-embedding", help="The embedding to INT4, too.")
    ] = False,
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="The projection to logits to INT4, too.")
    ] = False,
    calibration_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to calibrate RPN and CRS with; may be repeated. Token numbers where there "
            "is no tokenizer.json. Default: modules of this Python's standard library."
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens of it to read.")] = 16384,
    evaluation_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to measure with; may be repeated. Default: the modules of the standard "
            "library that the embedded model was not trained on."
        ),
    ] = None,
    evaluation_tokens: Annotated[
        int, typer.Option(help="Tokens of it to predict; 0 to measure nothing.")
    ] = 16384,
    window: Annotated[
        int, typer.Option(help="Tokens that the model sees at once, in both.")
    ] = 1024,
    max_length: options.MaxLength = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Quantize the linear layers of a model's blocks to INT4 and say what that saves and costs.

    The folder it writes is what `turbojax generate --model` and `turbojax.models.load` read. The
    column "exact" is measured with exact attention, "kv4" with keys, values and queries as decoding
    through a kv4 cache has them, for every token. The model is read layer by layer: memory holds
    the quantized one and one layer.
    """
    from turbojax.app.quantize.run import QuantizeSettings, run
    from turbojax.smoothing import Smoothing

    programs.use(compilation_cache, "turbojax quantize")
    with terminal.one_line_errors("turbojax quantize", smaller="--window"):
        settings = QuantizeSettings(
            model=model,
            out=out,
            smoothing=Smoothing(
                cas=cas, pts=pts, rpn=rpn, crs=crs, cas_inputs=cast(Any, cas_inputs)
            ),
            scale_dtype=cast(Any, scale_dtype),
            quantize_embedding=quantize_embedding,
            quantize_head=quantize_head,
            calibration_files=tuple(calibration_file or ()),
            calibration_tokens=calibration_tokens,
            evaluation_files=tuple(evaluation_file or ()),
            evaluation_tokens=evaluation_tokens,
            window=window,
            max_length=max_length,
        )
        with terminal.Bars() as bars:
            done = collections.Counter[str]()

            def advance(phase: str, count: int, total: int) -> None:
                if phase == "evaluation":
                    _interrupt.say(
                        lambda: f"the model is in {out}, but was not measured to the end"
                    )
                done[phase] += count
                bars.advance(phase, done[phase], total)

            report = run(settings, advance)
    terminal.report(report, _table, as_json, f"wrote {out}")


def _table(report: Any) -> Table:
    """Before and after, a row each."""
    table = Table()
    caches = list(report.bits.get("before", {}))
    for title in (
        "",
        "megabytes",
        "bits per\nweight",
        *(f"bits/{report.unit}, {c}" for c in caches),
    ):
        table.add_column(title, justify="left" if not title else "right")
    sizes = {"before": report.bytes_before, "after": report.bytes_after}
    for name, size in sizes.items():
        weights = f"{report.bits_per_weight:.2f}" if name == "after" else ""
        costs = [f"{report.bits[name][cache]:.4f}" for cache in caches]
        table.add_row(name, f"{size / 1e6:,.2f}", weights, *costs)
    return table
