"""What commands share: options, tables, and what they do about errors."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement

if TYPE_CHECKING:
    from rich.console import RenderableType

    from turbojax.app.generate.run import FoundModel

Model = Annotated[
    str | None,
    typer.Option(
        help="A folder with a checkpoint, quantized or not. Default: the embedded model.",
        show_default=False,
    ),
]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="Instead of a model, random weights of this shape, whose tokens are numbers: tiny, "
        "llama-3-8b, qwen-3-8b, ... (a wrong name lists all).",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Of --random-weights: float, or int4 for INT4 linear layers. Default: float.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16. Default: float32 on a CPU, otherwise that of the "
        "checkpoint; bfloat16 for random weights.",
        show_default=False,
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Longest sequence, prompt and new tokens together. Default: what the checkpoint says. "
        "Models with LongRoPE have their short factors where no sequence can get longer than these "
        "are for.",
        show_default=False,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to add to each sequence, at most.")]
# Columns: wider than any table.
_WIDEST = 10_000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@contextlib.contextmanager
def one_line_errors(command: str, smaller: str) -> Iterator[None]:
    """Makes what a user can do something about one line on standard error, and exit code 2.

    Args:
      command: what failed, as in ``"turbojax generate"``.
      smaller: options that need less memory if they are smaller.
    """
    import jax

    try:
        yield
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        typer.echo(f"{command}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        typer.echo(f"{command}: out of memory: try a smaller {smaller}", err=True)
        raise typer.Exit(2) from error


def find(
    model: str | None,
    random_weights: str | None,
    weights: str | None,
    dtype: str | None,
    max_length: int | None,
) -> "FoundModel":
    """The model that the options name, not loaded yet.

    Raises:
      ValueError: if two contradict each other.
      OSError, ValueError, NotImplementedError, ImportError: see `text.find_text_model`.
    """
    from turbojax.app.generate import run as text

    kind = text.parse_dtype(dtype)
    if random_weights is None:
        if weights is not None:
            raise ValueError("--weights is for --random-weights")
        return text.find_text_model(model or "embedded", kind, max_length)
    if model is not None:
        raise ValueError("--random-weights takes no --model")
    if max_length is not None:
        raise ValueError("--random-weights takes no --max-length")
    return text.find_random_model(random_weights, kind, weights or "float")


def show(table: "RenderableType") -> None:
    """Prints a table; to a pipe or a file as wide as it is, so that nothing is cut or folded."""
    console = Console()
    if not console.is_terminal:
        # What is measured is never more than there is room for.
        widest = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
        console.width = max(console.width, widest)
    console.print(table)
