"""The command `turbojax eval`: its options, and what it prints."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from turbojax.app import options, programs, terminal

_N = TypeVar("_N", int, float)

Model = Annotated[
    str, typer.Option(help="'embedded', or a folder with a checkpoint, quantized or not.")
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text to read; may be repeated. Token numbers where there is no tokenizer.json. "
        "Default: the modules of the standard library that the embedded model was not trained on."
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--method",
        help="Caches to measure, comma separated, with options after a colon, comma separated, "
        "too: exact,4bit,4bit:softmax=sas,block=32,kv4; or .json files with a cache for every "
        "layer. May be repeated. Default: one of each kind that the model can have.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens predicted per window. Default: 1023, or fewer where model or texts are short."
    ),
]
Prompt = Annotated[
    int | None,
    typer.Option(
        help="How many of them are prefilled; the others are decoded one by one. Default: half."
    ),
]
Windows = Annotated[int, typer.Option(help="Windows of each text, at most.")]
BatchSize = Annotated[int, typer.Option(help="Windows, or tasks, that run at once.")]
Seed = Annotated[int, typer.Option(help="Of intervals, and of what is asked in recall.")]
Measures = Annotated[
    str | None,
    typer.Option(
        help="What to measure, comma separated: text (bits per byte), layers (error of each "
        "layer's attention), recall (copying and looking up, far back), tasks (of --tasks). "
        "Default: text,layers, and tasks if there are some."
    ),
]
Kinds = Annotated[
    str | None,
    typer.Option(
        help="Of recall: some of copy, key_value, needle (a sentence in a long text) and chat (one "
        "told in an early turn), comma separated. Default: all, or of a model that reads bytes "
        "copy,key_value."
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        help="Of recall: lengths of the context in tokens, comma separated. Default: 1024 to 16384 "
        "in powers of two, as far as the model goes."
    ),
]
Depths = Annotated[
    str | None,
    typer.Option(
        help="Of recall: where in the context the answer lies, comma separated, from 0, its "
        "beginning, to 1."
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        help="Tasks of lm-eval: names that it knows, or YAML files, comma separated. May be "
        "repeated."
    ),
]
Limit = Annotated[
    float | None,
    typer.Option(
        help="Of --tasks: documents of each at most; below 1 a share of them. Default: all."
    ),
]
Fewshot = Annotated[
    int | None,
    typer.Option(help="Of --tasks: examples in each prompt. Default: what the task says."),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Of --tasks: write prompts by the model's chat template.")
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Devices to run on: model=2 splits heads and weights over 2. Default: one device.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Of a .gguf --model whose linear layers are all of type Q4_0: int4 takes their codes "
        "as they are. Default: float."
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option(help="Of --tasks: tokens of an answer at most, where a task does not say.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="JSON file for the results. It is written as they come: after an interruption the "
        "same command goes on."
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Folder to draw plots to: loss against bytes, and others.", metavar="FOLDER"),
]


def evaluate(
    model: Model = "embedded",
    text: Text = None,
    methods: Methods = None,
    context: Context = None,
    prompt: Prompt = None,
    windows: Windows = 1,
    batch_size: BatchSize = 8,
    seed: Seed = 0,
    measures: Measures = None,
    recall_kinds: Kinds = None,
    recall_lengths: Lengths = None,
    recall_depths: Depths = None,
    tasks: Tasks = None,
    limit: Limit = None,
    num_fewshot: Fewshot = None,
    chat: Chat = False,
    max_new_tokens: MaxNewTokens = 256,
    adapters: options.Adapters = None,
    mesh: Mesh = None,
    weights: Weights = None,
    dtype: options.Dtype = None,
    max_length: options.MaxLength = None,
    out: Out = None,
    plot: Plot = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Measure what caches cost: on text, layer by layer, far back in a context, and on tasks.

    Everything goes through the cache, as it is used: a part of each window is prefilled, and the
    rest decoded token by token, fed the true tokens. Costs and agreement are relative to the exact
    cache of the same model, which runs beside each method.
    """
    from turbojax.app.evaluate import display, run

    programs.use(compilation_cache, "turbojax eval")
    with terminal.one_line_errors("turbojax eval", smaller="--batch-size or --context"):
        settings = run.EvalSettings(
            model=model,
            texts=tuple(text or ()),
            methods=split_methods(methods),
            context=context,
            prompt=prompt,
            windows=windows,
            batch_size=batch_size,
            seed=seed,
            measures=None if measures is None else options.words(measures),
            recall_kinds=None if recall_kinds is None else options.words(recall_kinds),
            recall_lengths=_numbers("--recall-lengths", recall_lengths, int),
            recall_depths=_numbers("--recall-depths", recall_depths, float),
            tasks=tuple(word for text in tasks or () for word in options.words(text)),
            limit=limit,
            num_fewshot=num_fewshot,
            chat=chat,
            max_new_tokens=max_new_tokens,
            adapters=adapters,
            mesh=mesh,
            weights=weights,
            dtype=dtype,
            max_length=max_length,
            out=out,
            plot=plot,
        )
        with terminal.Bars() as bars:
            result = run.run(settings, bars.advance)
        if plot is not None:
            drawn = display.save_plots(result, plot)
    if as_json:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))
        return
    terminal.show(display.render(result))
    if plot is not None:
        typer.echo(f"plots written to {plot}: {', '.join(drawn)}")
    if out is not None:
        typer.echo(f"results written to {out}")


def split_methods(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The methods of a command line: ``4bit:softmax=sas,block=32,kv4`` are two.

    A piece between commas is an option of the method before it if it holds ``=`` and no colon
    before that; methods hold no ``=`` outside of their options.
    """
    if given is None:
        return None
    found = list[str]()
    for text in given:
        begun = len(found)
        for piece in options.words(text):
            name, equals, _ = piece.partition("=")
            if equals and ":" not in name and len(found) > begun:
                found[-1] += f",{piece}"
            else:
                found.append(piece)
    return tuple(found)


def _numbers(option: str, text: str | None, kind: Callable[[str], _N]) -> tuple[_N, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(word) for word in options.words(text))
    except ValueError:
        what = "integers" if kind is int else "numbers"
        raise ValueError(f"{option} {text!r} must be {what}, comma separated") from None
