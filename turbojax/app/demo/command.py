"""The command `turbojax demo`: its options, and what it prints."""

from pathlib import Path
from typing import Annotated

import typer

from turbojax.app import options, programs, terminal

File = Annotated[
    Path | None,
    typer.Option(
        help="Text to read. Default: a module of this Python's standard library that the "
        "model was not trained on."
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        help=f"Caches, comma separated: {options.CACHES} Default: exact,4bit,2/4bit; of a model "
        "that answers exact,4bit,turbo4."
    ),
]


def demo(
    file: File = None,
    prompt_bytes: Annotated[int, typer.Option(help="Bytes to prefill.")] = 3072,
    new_bytes: Annotated[int, typer.Option(help="Bytes to decode one by one and score.")] = 256,
    generate_bytes: Annotated[int, typer.Option(help="Bytes to generate freely.")] = 96,
    question: Annotated[
        str | None,
        typer.Option(
            help="What a model that answers, such as smollm2, is asked. Default: about Paris."
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Of its answer: tokens, at most.")] = 64,
    cache: Cache = None,
    uncompressed_layers: options.UncompressedLayers = 0,
    model: Annotated[
        str,
        typer.Option(
            help="'embedded'; a folder with a checkpoint whose tokens are bytes; or smollm2, a "
            ".gguf file or a folder with a chat template: such a model answers a question."
        ),
    ] = "embedded",
    plot: Annotated[Path | None, typer.Option(help="Also draw a picture to this file.")] = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Read a file with a small language model through several KV caches, side by side.

    The model prefills the beginning of the file, then decodes on through each cache, fed the true
    bytes: bits per byte, how often the greedy prediction equals that of the first cache, memory
    and speed. Then it continues the text by itself.

    A model with a chat template answers a question instead: its answers, and how well each cache
    predicts the first one's.
    """
    import jax.numpy as jnp

    from turbojax import models
    from turbojax.app import startup
    from turbojax.app.demo import chat, measure

    programs.use(compilation_cache, "turbojax demo")
    with terminal.one_line_errors("turbojax demo", smaller="--prompt-bytes"):
        startup.check_plot(plot)
        settings = measure.DemoSettings(
            file=file or measure.default_file(prompt_bytes + new_bytes),
            prompt_bytes=prompt_bytes,
            new_bytes=new_bytes,
            generated_bytes=generate_bytes,
            caches=options.words(cache or "exact,4bit,2/4bit"),
            uncompressed_layers=uncompressed_layers,
        )
        startup.check_input_files(settings.file)
        if chat.answers(model):
            if file is not None or plot is not None:
                raise ValueError("--file and --plot are for models whose tokens are bytes")
            _chat(model, question, new_tokens, cache, uncompressed_layers, as_json)
            return
        if question is not None:
            raise ValueError(f"--question is for a model with a chat template: {model!r} has none")
        # float32 is the fast dtype of CPUs; the caches are what is being compared.
        transformer = models.load_transformer(model, dtype=jnp.float32)
        steps = len(settings.caches) * (settings.new_bytes + settings.generated_bytes)
        with terminal.progress_bar(transient=True) as bar:
            task = bar.add_task("starting", total=steps)

            def advance(name: str, count: int) -> None:
                bar.update(task, advance=count, description=f"{name} cache")

            report = measure.run(transformer, settings, advance)
        if plot is not None:
            measure.save_plot(report, transformer, plot)
    drawn = None if plot is None else f"plot written to {plot}"
    terminal.report(report, measure.render, as_json, drawn)


def _chat(
    model: str,
    question: str | None,
    new_tokens: int,
    cache: str | None,
    uncompressed_layers: int,
    as_json: bool,
) -> None:
    from turbojax.app.demo import chat

    names = options.words(cache or "exact,4bit,turbo4")
    settings = chat.ChatSettings(model, question, new_tokens, names, uncompressed_layers)
    with terminal.progress_bar(transient=True) as bar:
        task = bar.add_task("loading", total=2 * len(names) * new_tokens)

        def advance(name: str, count: int) -> None:
            bar.update(task, advance=count, description=f"{name} cache")

        report = chat.run(settings, advance)
    terminal.report(report, chat.render, as_json)
