"""The command `turbojax generate`: its options, and what it prints."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turbojax.app import options, programs, terminal

if TYPE_CHECKING:
    from turbojax.app.text_model import FoundModel

# Of the random prompts of --random-weights.
_PROMPT_TOKENS = 128

Prompt = Annotated[str | None, typer.Argument(help="Text to continue.")]
File = Annotated[Path | None, typer.Option(help="Continue this file instead.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(help="Length of the random prompts of --random-weights. Default: 128."),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="The text is what a user says: write it by the checkpoint's chat template."
    ),
]
System = Annotated[
    str | None,
    typer.Option(help="Of --chat: a system message that stands before it."),
]
Cache = Annotated[
    str,
    typer.Option(
        help=f"The KV cache: {options.CACHES} 2/4bit is 2 bits for half of the KV heads; with "
        "--mesh for half of each device's, so that texts may depend on the mesh. Or a .json file "
        "with a cache for every layer, as turbojax calibrate writes it."
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0 for the most likely token; otherwise logits are divided by it.")
]
TopK = Annotated[int | None, typer.Option(help="Draw from this many most likely tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the fewest most likely tokens with this probability together."),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Draw from tokens with at least this share of the most likely one's probability."
    ),
]
Seed = Annotated[
    int, typer.Option(help="Of the random numbers; sequence b of a batch takes this plus b.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help=r"A text that ends the result and is no part of it; may be given several times. "
        r"\n, \t, \r and \\ are a line's end, a tab, a carriage return and a backslash."
    ),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Print the text as it comes, or at the end. Default: as it comes on a terminal.",
    ),
]
BatchSize = Annotated[int, typer.Option(help="Sequences: copies of the prompt, or random prompts.")]
PrefillBatchSize = Annotated[
    int | None, typer.Option(help="Prompts that run at a time. Default: all.")
]
Prefill = Annotated[
    str,
    typer.Option(
        help="How prompts attend to themselves: dense, or pooled with levels chosen by window, "
        "topk or threshold."
    ),
]
PrefillWindow = Annotated[
    int | None,
    typer.Option(
        help="Of --prefill window: distance in tokens up to which nothing is pooled; beyond, "
        "means of 8 tokens. Default: 896."
    ),
]
PrefillBlockSize = Annotated[
    int | None,
    typer.Option(help="Of pooled prefill: tokens of a block that has one level. Default: 128."),
]
Implementation = Annotated[
    str | None,
    typer.Option(
        help="What runs attention: mosaic_gpu (not for kv4, k8v4), triton or xla; for the exact "
        "cache xla, cudnn, mosaic_gpu or repeatable. Pooled prefill chooses for itself. "
        "Default: the fastest that can."
    ),
]


def generate(
    prompt: Prompt = None,
    file: File = None,
    model: options.Model = None,
    adapters: options.Adapters = None,
    chat: Chat = False,
    system: System = None,
    cache: Cache = "4bit",
    uncompressed_layers: options.UncompressedLayers = 0,
    max_new_tokens: options.MaxNewTokens = 128,
    max_length: options.MaxLength = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Stop = None,
    stream: Stream = None,
    batch_size: BatchSize = 1,
    prefill_batch_size: PrefillBatchSize = None,
    prefill: Prefill = "dense",
    prefill_window: PrefillWindow = None,
    prefill_block_size: PrefillBlockSize = None,
    implementation: Implementation = None,
    mesh: options.Mesh = None,
    dtype: options.Dtype = None,
    random_weights: options.RandomWeights = None,
    weights: options.Weights = None,
    prompt_tokens: PromptTokens = None,
    as_json: options.AsJson = False,
    coordinator: options.Coordinator = None,
    count: options.Count = None,
    index: options.Index = None,
    heartbeat: options.Heartbeat = 60.0,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Continue a text through a KV cache; say how fast, and how large the cache is.

    For many texts at once, see `turbojax serve`.
    """
    from turbojax._environment import environment
    from turbojax.app.generate import run as generation
    from turbojax.app.text_model import prompt_tokens as tokens_of
    from turbojax.app.text_model import read_text
    from turbojax.models.generation.sampling import Sampling

    programs.use(compilation_cache, "turbojax generate")
    with (
        terminal.one_line_errors(
            "turbojax generate", smaller="--batch-size or --prefill-batch-size"
        ),
        options.together(coordinator, count, index, heartbeat) as is_first,
    ):
        if as_json and stream:
            raise ValueError("--json prints the text as part of an object: it takes no --stream")
        _check_source(prompt, file, model, chat, system, random_weights, prompt_tokens)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        pooled = generation.parse_prefill(prefill, prefill_window, prefill_block_size)
        stops = [generation.unescape(x) for x in stop or ()]
        generation.check_options(
            max_new_tokens=max_new_tokens,
            cache=cache,
            stop_strings=stops,
            batch_size=batch_size,
            prefill_batch_size=prefill_batch_size,
            prompt_tokens=prompt_tokens,
        )
        content = str(prompt) if file is None else read_text(file.read_bytes())
        found = options.find(model, random_weights, weights, dtype, max_length, adapters, mesh)
        one = None
        if random_weights is None:
            one = tokens_of(found, content, chat=chat, system=system)
        length = prompt_tokens or _PROMPT_TOKENS if one is None else len(one)
        at_a_time = min(batch_size, prefill_batch_size or batch_size)
        sizes = (batch_size, at_a_time, length, max_new_tokens)
        _check_fit(found, *sizes, cache, uncompressed_layers)
        source = found.load()
        as_it_comes = _is_terminal() if stream is None else stream
        report = generation.run(
            source,
            generation.random_prompts(found.config, batch_size, length)
            if one is None
            else generation.copies(one, batch_size),
            max_new_tokens=max_new_tokens,
            cache=cache,
            uncompressed_layers=uncompressed_layers,
            sampling=sampling,
            stop_strings=stops,
            prefill_batch_size=prefill_batch_size,
            implementation=implementation,
            pooled_prefill=pooled,
            show=_show if as_it_comes and not as_json and is_first else None,
        )
    if not is_first:
        return
    if as_json:
        typer.echo(json.dumps({**environment(), **report.to_json()}, indent=2))
        return
    if not as_it_comes:
        _show(report.text)
    typer.echo(f"\n{report.summary()}")


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _show(piece: str) -> None:
    # Output to a pipe is buffered.
    typer.echo(piece, nl=False)
    sys.stdout.flush()


def _check_source(
    prompt: str | None,
    file: Path | None,
    model: str | None,
    chat: bool,
    system: str | None,
    random_weights: str | None,
    prompt_tokens: int | None,
) -> None:
    """Raises ValueError unless the options say one thing about what to continue."""
    if random_weights is not None:
        if not (prompt is None and file is None and model is None and not chat):
            raise ValueError(
                "--random-weights takes no prompt, no --file, no --model and no --chat"
            )
    elif (prompt is None) == (file is None):
        raise ValueError("give a prompt or a --file, one of them")
    elif prompt_tokens is not None:
        raise ValueError("--prompt-tokens is for --random-weights")
    if system is not None and not chat:
        raise ValueError("--system is for --chat")


def _check_fit(
    found: "FoundModel",
    batch_size: int,
    at_a_time: int,
    length: int,
    max_new_tokens: int,
    cache: str,
    uncompressed_layers: int,
) -> None:
    """Raises ValueError if prompts and texts are too long, or need more memory than there is."""
    from turbojax.app import startup
    from turbojax.app.generate.run import cache_kind

    config, total = found.config, length + max_new_tokens
    if total > config.max_length:
        raise ValueError(
            f"a prompt of {length} tokens and {max_new_tokens=} must be at most the model's "
            f"{config.max_length} tokens together"
        )
    kind = cache_kind(cache, config, found.axes, uncompressed_layers)
    rows, of_tokens = _check_batch(found, batch_size, at_a_time)
    # From here on, the numbers of one device.
    batch_size, at_a_time = batch_size // rows, -(-at_a_time // rows)
    startup.check_memory(
        {
            "weights": found.weight_bytes,
            f"{cache} caches for {batch_size:,} sequences of {total:,} tokens": startup.cache_bytes(
                config, found.dtype, batch_size, total, kind
            )
            // of_tokens,
            "logits": 4 * batch_size * config.vocab_size,
            "prompts": 4 * batch_size * length,
            f"{at_a_time:,} prompts of {length:,} tokens that run": startup.prompt_bytes(
                config, found.dtype, at_a_time, length
            ),
        },
        "smaller --batch-size, --prefill-batch-size or --max-new-tokens, or another --cache",
    )


def _check_batch(found: "FoundModel", batch_size: int, at_a_time: int) -> tuple[int, int]:
    """Into how many parts a mesh splits sequences, and the cache of each.

    Raises:
      ValueError: if it cannot split so many sequences evenly.
    """
    if found.axes is None:
        return 1, 1
    rows = found.axes.size("batch")
    if batch_size % rows or at_a_time % rows:
        raise ValueError(
            f"--batch-size {batch_size} and {at_a_time} prompts at a time must be multiples of "
            f"data={rows} of --mesh"
        )
    heads = 1 if found.config.latent is not None else found.axes.size("heads")
    return rows, heads * found.axes.size("sequence")
