"""The command `turbojax serve`: its options, and what it prints at the end."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbojax.app import options, programs, terminal

if TYPE_CHECKING:
    from turbojax.app.text_model import FoundModel

File = Annotated[
    Path | None,
    typer.Argument(
        help="JSON lines with prompt, and optionally id, max_new_tokens, stop (a list of texts or "
        "tokens), temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty, "
        "frequency_penalty, logit_bias, logprobs, priority, timeout, n, best_of, and one of "
        "json_schema, regex, grammar. - for standard input."
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Instead of a FILE, answer requests over HTTP at this address, as OpenAI's clients "
        "speak: :8000 for this machine alone, 0.0.0.0:8000 for others, too.",
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(help="Of --http: what clients call the model. Default: the name of its folder."),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="Of --http: what clients must show, one of several if given several times. Default: "
        "what TURBOJAX_API_KEY holds, and nothing without it."
    ),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        help="Of --http: requests that may wait for their turn; others are sent away. "
        "Default: 1024."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="File for the results, new or empty: see --resume. Default: standard output."
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where a run was interrupted: results that are in --out are kept, and their "
        "requests do not run again.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write --out anew: drop the results that it holds.")
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="Run the other requests if lines are bad, and name these. Default: run nothing.",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        help="Of a FILE: tokens to add to each text, at most, where its line does not say. "
        "Default: 128."
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        help="Pages in auto (uncompressed), fp8_e4m3, fp8_e5m2, int8, turbo4, k8v4 and int8_v4 "
        "(keys as fp8_e4m3 or int8, values as turbo4), or as turbo4 with 4, 3 or 2 bits for keys "
        "and values: turbo_k4v2 .."
    ),
]
PageSize = Annotated[int, typer.Option(help="Tokens of a page: 16, 32, 64 or 128.")]
NumPages = Annotated[
    int | None,
    typer.Option(
        help="Pages of the pool. Default: enough for --max-sequences of the longest requests, or "
        "what the memory leaves if that is less."
    ),
]
PoolBytes = Annotated[
    int | None,
    typer.Option(help="Instead, bytes of the pool, all layers; with --mesh of each device's part."),
]
MaxSequences = Annotated[
    int | None,
    typer.Option(
        help="Requests that run at a time. Default: 256 on a GPU, 16 on a CPU, or as many as FILE "
        "has if these are fewer; 8 with --reproducible."
    ),
]
StepTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of prompts that run in a step. Default: 8192 on a GPU, 512 on a CPU; 64 with "
        "--reproducible."
    ),
]
Reproducible = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="Texts depend on nothing but their requests and these options, to the bit; slower.",
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens ahead: ngram (what followed the same tokens before) or draft "
        "(what --draft-model says). Texts stay the same, within rounding."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Of --speculate draft: the folder of a smaller model with the same tokens."),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(help="Of --speculate: tokens that are guessed at a time, up to 15. Default: 4."),
]
CacheResults = Annotated[
    bool,
    typer.Option(
        "--cache-results",
        help="Prompts that begin with another one's result find its pages, too; their text may "
        "then differ by rounding from one that runs alone.",
    ),
]
Implementation = Annotated[
    str | None,
    typer.Option(
        help="What runs attention: xla, triton or mosaic_gpu. Default: the fastest that can."
    ),
]


def serve(
    file: File = None,
    http: Http = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    skip_bad: SkipBad = False,
    served_name: ServedName = None,
    api_key: ApiKey = None,
    max_waiting: MaxWaiting = None,
    model: options.Model = None,
    mesh: options.Mesh = None,
    adapters: options.Adapters = None,
    max_new_tokens: MaxNewTokens = None,
    max_length: options.MaxLength = None,
    kv_dtype: KvDtype = "auto",
    uncompressed_layers: options.UncompressedLayers = 0,
    page_size: PageSize = 64,
    num_pages: NumPages = None,
    pool_bytes: PoolBytes = None,
    max_sequences: MaxSequences = None,
    step_tokens: StepTokens = None,
    reproducible: Reproducible = False,
    speculate: Speculate = None,
    draft_model: DraftModel = None,
    draft_tokens: DraftTokens = None,
    cache_results: CacheResults = False,
    implementation: Implementation = None,
    dtype: options.Dtype = None,
    random_weights: options.RandomWeights = None,
    weights: options.Weights = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Continue many texts at once, of a file or of clients, on one pool of pages.

    Results of a file are JSON lines, in the order in which they end. A bad line of the requests is
    found before anything runs. After an interruption, the same command with --resume goes on.

    With --mesh data=2,model=4 there are two engines, each of which has the model split over four
    devices, and requests go to the one that has least to do.

    With --http HOST:PORT a server runs instead, until Ctrl-C or SIGTERM: it then ends what it has
    begun.
    """
    from turbojax._environment import environment

    programs.use(compilation_cache, "turbojax serve")
    with terminal.one_line_errors(
        "turbojax serve", smaller="--num-pages, --pool-bytes or --max-sequences"
    ):
        of_file: dict[str, Any] = {"--out": out, "--resume": resume, "--overwrite": overwrite}
        of_file |= {"--skip-bad": skip_bad, "--max-new-tokens": max_new_tokens}
        of_server: dict[str, Any] = {"--served-name": served_name, "--api-key": api_key}
        of_server |= {"--max-waiting": max_waiting}
        _check_mode(file, http, of_file, of_server)
        # Before the model is looked at, and loaded, which may take minutes.
        from turbojax.app.serve.settings import Settings

        chosen = Settings(
            kv_dtype=kv_dtype,
            uncompressed_layers=uncompressed_layers,
            page_size=page_size,
            num_pages=num_pages,
            pool_bytes=pool_bytes,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            reproducible=reproducible,
            speculate=speculate,
            draft_tokens=draft_tokens,
            cache_results=cache_results,
            implementation=implementation,
        )

        def find() -> tuple["FoundModel", "FoundModel | None"]:
            found = options.find(model, random_weights, weights, dtype, max_length, adapters, mesh)
            return found, _find_draft(speculate, draft_model, dtype, mesh)

        if file is not None:
            from turbojax.app.serve import files

            report = files.serve_file(
                file,
                files.Output(out, resume, overwrite),
                find,
                chosen,
                skip_bad=skip_bad,
                max_new_tokens=128 if max_new_tokens is None else max_new_tokens,
            )
        else:
            from turbojax.app.serve import http as serving

            report = serving.serve_http(
                serving.Address.parse(str(http)),
                find,
                chosen,
                name=serving.served_name(served_name, model, random_weights),
                keys=serving.api_keys(api_key or ()),
                max_waiting=1024 if max_waiting is None else max_waiting,
            )
    numbers = {**environment(), **report.to_json()}
    last = json.dumps(numbers, indent=2) if as_json else report.summary()
    # If results go to standard output, these numbers go to standard error.
    typer.echo(last, err=file is not None and out is None)


def _check_mode(
    file: Path | None, http: str | None, of_file: dict[str, Any], of_server: dict[str, Any]
) -> None:
    """Raises ValueError unless there is one thing to serve, with options that it has."""
    if (file is None) == (http is None):
        raise ValueError("give a FILE of requests or --http HOST:PORT, one of them")
    others = of_server if http is None else of_file
    for name, value in others.items():
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name} is for {'--http' if http is None else 'a FILE'}")


def _find_draft(
    speculate: str | None, folder: str | None, dtype: str | None, mesh: str | None
) -> Any:
    if (speculate == "draft") != (folder is not None):
        raise ValueError("--speculate draft and --draft-model DIR need each other")
    return None if folder is None else options.find(folder, None, None, dtype, None, mesh=mesh)
