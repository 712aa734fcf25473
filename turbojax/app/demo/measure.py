"""What the demo measures and shows: quality, memory, speed of decoding through each KV cache."""

import dataclasses
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turbojax import _extras, _writing
from turbojax._environment import environment
from turbojax.caches import CACHE_NAMES, cache_by_name
from turbojax.models import (
    BEGINNING_OF_FILE,
    Decoder,
    QuantizedDecoder,
    Transformer,
    held_out_modules,
)
from turbojax.models.generation import session as generation
from turbojax.models.generation.caching import (
    ModelCacheKind,
    init_caches,
    kinds_of_layers,
    with_uncompressed,
)

Progress = Callable[[str, int], None]
"""Called with the name of a cache and the number of bytes done since the last call."""

# A held-out module whose beginning is ordinary code: a continuation is worth reading.
_DEFAULT_MODULE = "mailbox.py"


def check_caches(caches: tuple[str, ...]) -> None:
    """Raises ValueError if caches are unknown, named twice or none."""
    for name in caches:
        if name not in CACHE_NAMES:
            raise ValueError(f"cache {name!r} must be one of {', '.join(CACHE_NAMES)}")
    if not caches or len(set(caches)) != len(caches):
        raise ValueError(f"{caches=} must name each cache once")


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """What to run: the options of the command; the other caches are compared to the first.

    The first ``prompt_bytes + new_bytes`` bytes of the file are used; in decoding each byte is fed
    its true predecessor.
    """

    file: Path
    prompt_bytes: int = 3072
    new_bytes: int = 256
    generated_bytes: int = 96
    caches: tuple[str, ...] = ("exact", "4bit", "2/4bit")
    uncompressed_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_bytes", "new_bytes", "generated_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_caches(self.caches)

    @property
    def max_length(self) -> int:
        """Tokens a cache must hold: the beginning-of-file token, the prompt, the rest."""
        return 1 + self.prompt_bytes + max(self.new_bytes, self.generated_bytes)


@dataclasses.dataclass(frozen=True)
class CacheResult:
    """One cache's row.

    Attributes:
      bits_per_byte: mean of ``-log2 p(byte)`` over the new bytes.
      agreement: share of the new bytes at which the greedy prediction equals the first cache's.
      nbytes: bytes of the cache, all layers.
      compression_ratio: bytes of a bfloat16 cache of the same capacity over `nbytes`.
      bytes_per_second: decoding speed of one sequence, compilation excluded; None if it was too
        short to tell.
      curve: mean bits per byte after 1, 2, ... new bytes.
    """

    name: str
    bits_per_byte: float
    agreement: float
    nbytes: int
    compression_ratio: float
    bytes_per_second: float | None
    generated: bytes
    curve: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """Everything the demo shows: results in the order asked for, and the whole run's wall time."""

    settings: DemoSettings
    results: tuple[CacheResult, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        settings = dataclasses.asdict(self.settings) | {"file": str(self.settings.file)}
        rows = []
        for result in self.results:
            row = dataclasses.asdict(result)
            row["generated"] = result.generated.decode("utf-8", "replace")
            del row["curve"]
            rows.append(row)
        return {
            "settings": settings,
            **environment(),
            "seconds": self.seconds,
            "results": rows,
        }


def default_file(required_bytes: int = 1) -> Path:
    """A held-out module of the standard library; FileNotFoundError if none is long enough."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in (_DEFAULT_MODULE, *held_out_modules()):
        path = library / name
        if path.is_file() and path.stat().st_size >= required_bytes:
            return path
    raise FileNotFoundError(
        f"no held-out module of at least {required_bytes} bytes in {library}: name a file"
    )


def cache_kind(
    name: str, model: Transformer | Decoder | QuantizedDecoder, uncompressed_layers: int = 0
) -> ModelCacheKind:
    """The cache of a name that `cache_by_name` takes, in the sizes that models are served with.

    The demo computes in float32, which suits CPUs, but an exact cache is in bfloat16: that is what
    the others are worth comparing to. `uncompressed_layers` layers at either end have exact caches
    of bfloat16 too, if the named cache compresses.
    """
    kind = cache_by_name(name, model.config.num_kv_heads)
    if kind == "exact":
        return "bfloat16"
    if kind == "paged":
        return kind
    cache = with_uncompressed(kind, uncompressed_layers, "bfloat16")
    kinds_of_layers(cache, model.config.num_layers)  # raises if there are too few
    return cache


def run(model: Transformer, settings: DemoSettings, progress: Progress | None = None) -> DemoReport:
    """Measures every cache on the file, with a byte-level model.

    `progress` is called as bytes are done.
    """
    begun = time.perf_counter()
    kinds = {
        name: cache_kind(name, model, settings.uncompressed_layers) for name in settings.caches
    }
    if model.config.vocab_size != 256:
        raise ValueError(f"vocab_size={model.config.vocab_size} must be 256: the demo reads bytes")
    if settings.max_length > model.config.max_length:
        raise ValueError(
            f"prompt and new bytes need {settings.max_length} tokens, "
            f"must be at most the model's {model.config.max_length}"
        )
    tokens = _read_tokens(settings)
    results: list[CacheResult] = []
    reference: np.ndarray | None = None
    for name, kind in kinds.items():
        advance = None if progress is None else lambda n, name=name: progress(name, n)
        result, choices = _measure(model, settings, name, kind, tokens, reference, advance)
        reference = choices if reference is None else reference
        results.append(result)
    return DemoReport(
        settings=settings,
        results=tuple(results),
        seconds=time.perf_counter() - begun,
    )


def _read_tokens(settings: DemoSettings) -> np.ndarray:
    """int32 tokens: the beginning of the file, then the prompt and the new bytes."""
    needed = settings.prompt_bytes + settings.new_bytes
    content = settings.file.read_bytes()
    if len(content) < needed:
        raise ValueError(
            f"{settings.file} has {len(content)} bytes, must have at least {needed} "
            "(prompt and new bytes)"
        )
    return np.array([BEGINNING_OF_FILE, *content[:needed]], np.int32)


def _measure(
    model: Transformer,
    settings: DemoSettings,
    name: str,
    kind: ModelCacheKind,
    tokens: np.ndarray,
    reference: np.ndarray | None,
    progress: generation.Progress | None,
) -> tuple[CacheResult, np.ndarray]:
    """One cache's row and its greedy choices."""
    prompt = jnp.asarray(tokens[None, : 1 + settings.prompt_bytes])
    target = tokens[1 + settings.prompt_bytes :]

    def begin() -> generation.Session:
        return generation.start(model, prompt, max_length=settings.max_length, cache=kind)

    session = begin()
    nbytes, ratio = session.caches.nbytes, session.caches.compression_ratio
    clock = _Clock(progress)
    logits = generation.score(session, jnp.asarray(target[None]), clock)[0]
    bits = np.asarray(bits_of(logits, jnp.asarray(target)))
    choices = np.asarray(jnp.argmax(logits, axis=-1))
    generated = bytearray()
    for token in generation.stream(begin(), settings.generated_bytes):
        generated.append(int(token[0]))
        if progress is not None:
            progress(1)
    result = CacheResult(
        name=name,
        bits_per_byte=float(bits.mean()),
        agreement=1.0 if reference is None else float(np.mean(choices == reference)),
        nbytes=nbytes,
        compression_ratio=ratio,
        bytes_per_second=clock.rate(),
        generated=bytes(generated),
        curve=tuple(float(x) for x in np.cumsum(bits) / np.arange(1, len(bits) + 1)),
    )
    return result, choices


@jax.jit
def bits_of(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Bits of each target token, float32 ``[T]``, under logits ``[T, V]``."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(log_p, target[:, None], axis=-1)[:, 0] / math.log(2)


class _Clock:
    """Counts tokens and the time since the first one, whose step was compiled."""

    def __init__(self, progress: generation.Progress | None) -> None:
        self._progress = progress
        self._times: list[float] = []

    def __call__(self, count: int) -> None:
        self._times.append(time.perf_counter())
        if self._progress is not None:
            self._progress(count)

    def rate(self) -> float | None:
        """Tokens per second; None if too few were seen."""
        # The last token of a scoring run needs no step of its own.
        steps = len(self._times) - 2
        return steps / (self._times[-2] - self._times[0]) if steps > 0 else None


# A running mean of fewer bytes jumps about and hides the rest of the picture.
_UNSETTLED = 15


def render(report: DemoReport) -> RenderableType:
    """The report for a terminal."""
    settings = report.settings
    title = (
        f"{settings.file.name}: {settings.prompt_bytes} bytes prefilled, "
        f"{settings.new_bytes} decoded through each cache"
    )
    if settings.uncompressed_layers:
        title += f", {settings.uncompressed_layers} layers at either end uncompressed"
    # Columns are no wider than their names, so that the table fits 80 columns.
    table = Table(title=title, pad_edge=False)
    table.add_column("cache")
    for column in (
        "bits/\nbyte",
        "vs\nfirst",
        "same\nchoice",
        "cache\nbytes",
        "ratio",
        "bytes/s",
    ):
        table.add_column(column, justify="right")
    first = report.results[0]
    for result in report.results:
        table.add_row(
            result.name,
            f"{result.bits_per_byte:.4f}",
            f"{result.bits_per_byte - first.bits_per_byte:+.4f}",
            f"{result.agreement:.1%}",
            f"{result.nbytes:,}",
            f"{result.compression_ratio:.2f}x",
            "-" if result.bytes_per_second is None else f"{result.bytes_per_second:.1f}",
        )
    texts = [_generated_panel(result, first) for result in report.results]
    return Group(table, *texts, footer(report.seconds, "bytes/s"))


def footer(seconds: float, speed: str) -> Text:
    """How long it took and where; on a CPU that the column `speed` does not compare."""
    where = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
    found = Text(f"{seconds:.0f} s in all, {where}", style="dim")
    if jax.default_backend() == "cpu":
        found.append(f"; {speed} do not compare: CPUs widen the exact cache's bfloat16 every step")
    return found


def count_same(some: Sequence[object], others: Sequence[object]) -> int:
    """How many of the first are equal."""
    differs = (i for i, (x, y) in enumerate(zip(some, others, strict=False)) if x != y)
    return next(differs, min(len(some), len(others)))


def _generated_panel(result: CacheResult, first: CacheResult) -> Panel:
    """The freely generated text; what differs from the first cache's stands out."""
    same = count_same(result.generated, first.generated)
    text = Text(result.generated[:same].decode("utf-8", "replace"))
    text.append(result.generated[same:].decode("utf-8", "replace"), style="bold yellow")
    title = f"{result.name} continues"
    if result is not first:
        total = len(result.generated)
        title += (
            f": the same {total} bytes as {first.name}"
            if same == total
            else f": as {first.name} for {same} of {total} bytes"
        )
    return Panel(text, title=title, title_align="left")


def save_plot(report: DemoReport, model: Transformer, path: Path) -> None:
    """Draws memory against context length, and what each cache costs along the text.

    The ending of `path` chooses the format.
    """
    _extras.need_matplotlib()
    # Imported here: it takes a second that a run without a plot need not wait. A bare `Figure`
    # needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, quality = figure.subplots(1, 2)
    lengths = [256 * i for i in range(1, model.config.max_length // 256 + 1)]
    first = report.results[0]
    for result in report.results:
        kind = cache_kind(result.name, model, report.settings.uncompressed_layers)
        sizes = [
            jax.eval_shape(lambda n=n, kind=kind: init_caches(model, 1, n, kind)).nbytes / 2**20
            for n in lengths
        ]
        label = f"{result.name} ({result.compression_ratio:.2f}x)"
        memory.plot(lengths, sizes, label=label)
        cost = [mean - base for mean, base in zip(result.curve, first.curve, strict=True)]
        steps = range(1 + _UNSETTLED, len(cost) + 1)
        quality.plot(
            steps, cost[_UNSETTLED:], label=f"{result.name} ({result.bits_per_byte:.4f} bits/byte)"
        )
    memory.set(title="KV cache of the model", xlabel="context length (bytes of text)")
    memory.set_ylabel("MiB")
    memory.set_ylim(bottom=0)
    quality.set(title=f"Decoding {report.settings.file.name}", xlabel="bytes decoded")
    quality.set_ylabel(f"bits per byte more than {first.name}, running mean")
    # At least this range, so that differences which do not matter do not look large.
    low, high = quality.get_ylim()
    quality.set_ylim(min(low, -0.02), max(high, 0.04))
    for axes in (memory, quality):
        axes.grid(alpha=0.3)
        axes.legend()
    with _writing.replacing(path) as draft:
        figure.savefig(draft, dpi=120)
