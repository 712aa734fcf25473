"""Prompts in, texts out: what `turbojax generate` does around a model."""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from turbojax import _checks, models
from turbojax.app.text_model import TextModel, than_bfloat16
from turbojax.caches import LATENT_CACHE_NAMES
from turbojax.evaluation import kinds_from_file, layer_files
from turbojax.models.generation import session as generation
from turbojax.models.generation.caching import ModelCacheKind, with_uncompressed
from turbojax.models.generation.sampling import GREEDY
from turbojax.models.generation.stopping import TextStream, check_stop_strings, check_stops
from turbojax.sharding.axes import Axes

# In place of the next token of a sequence that has ended.
_ENDED = -1
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclasses.dataclass(frozen=True)
class GenerationReport:
    """What one run of `generate` did.

    Attributes:
      prompt_tokens: of each sequence.
      new_tokens: of the first sequence. The others have as many, unless tokens are drawn and some
        sequences end sooner.
      finish_reason: of the first: ``"length"``, or ``"stop"`` at a token or text that ends it.
      text: what the first sequence was continued with.
      cache_bytes: of all layers and sequences, as allocated: room for prompt and new tokens is
        rounded up, see `models.generate`.
      compression_ratio: bytes of bfloat16 caches of the same capacity over these.
      prefill_seconds: compilation included.
      tokens_per_second: new tokens of all sequences, without the first step, which is compiled;
        None if there were too few to tell.
    """

    cache: str
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    text: str
    cache_bytes: int
    compression_ratio: float
    prefill_seconds: float
    tokens_per_second: float | None
    uncompressed_layers: int = 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """One line: speed and memory."""
        speed = (
            "too few tokens to time"
            if self.tokens_per_second is None
            else f"{self.tokens_per_second:,.1f} tokens/s"
        )
        edges = ""
        if self.uncompressed_layers:
            edges = f" ({self.uncompressed_layers} layers at either end uncompressed)"
        return (
            f"{speed}, batch {self.batch_size}; {self.cache} cache{edges} "
            f"{self.cache_bytes:,} bytes ({than_bfloat16(self.compression_ratio)})"
        )


def parse_prefill(
    name: str, window: int | None, block_size: int | None
) -> models.PooledAttention | None:
    """How prompts attend, from what a command line says; None for dense attention.

    `name` is ``"dense"`` or a policy of `models.pooled_by_name`, whose defaults stand for a
    `window` or `block_size` of None.
    """
    if name not in ("dense", *models.POLICY_NAMES):
        names = ", ".join(("dense", *models.POLICY_NAMES))
        raise ValueError(f"prefill {name!r} must be one of {names}")
    if name != "dense":
        size = 128 if block_size is None else block_size
        return models.pooled_by_name(name, window=window, block_size=size)
    if window is not None or block_size is not None:
        raise ValueError("prefill window and block size are for pooled attention, not 'dense'")
    return None


def check_options(
    *, max_new_tokens: int, cache: str, stop_strings: Sequence[str], **sizes: int | None
) -> None:
    """Checks what can be checked without a model, which may take minutes to load.

    Arguments as `run`; `sizes` are numbers that must be at least 1 where they are given. Raises
    OSError if `cache` is a file that does not exist, ValueError if an option does not fit.
    """
    given = {name: size for name, size in sizes.items() if size is not None}
    _checks.check_sizes(max_new_tokens=max_new_tokens, **given)
    names = (*models.CACHE_NAMES, *LATENT_CACHE_NAMES)
    if layer_files.is_name(cache):
        layer_files.read_layers(Path(cache))
    elif cache not in names:
        raise ValueError(f"cache {cache!r} must be one of {', '.join(names)}, or a .json file")
    check_stop_strings(stop_strings)


def unescape(text: str) -> str:
    r"""A text of a command line: ``\n``, ``\t``, ``\r`` and ``\\`` are what they are in Python."""
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)


def cache_kind(
    name: str, config: models.TransformerConfig, axes: Axes | None, uncompressed_layers: int
) -> ModelCacheKind:
    """The caches of a name; each device of a mesh has equally many heads of each bit width.

    `name` is one of `models.cache_by_name`, or a file, see `evaluation.kinds_from_file`, which
    excludes `uncompressed_layers` (see `models.UncompressedEdges`).
    """
    if layer_files.is_name(name):
        if uncompressed_layers:
            raise ValueError(f"{uncompressed_layers=} must be 0: {name} says what each layer has")
        return kinds_from_file(Path(name), config)
    devices = 1 if axes is None else axes.size("heads")
    kind = models.cache_by_name(name, config.num_kv_heads, devices)
    return with_uncompressed(kind, uncompressed_layers)


def copies(tokens: list[int], batch_size: int) -> np.ndarray:
    """One prompt for every sequence, int32 ``[batch_size, len(tokens)]``."""
    _checks.check_sizes(batch_size=batch_size)
    return np.tile(np.array([tokens], np.int32), (batch_size, 1))


def random_prompts(config: models.TransformerConfig, batch_size: int, length: int) -> np.ndarray:
    """Random tokens, int32 ``[batch_size, length]``."""
    _checks.check_sizes(batch_size=batch_size, prompt_tokens=length)
    rng = np.random.default_rng(0)
    return rng.integers(config.vocab_size, size=(batch_size, length), dtype=np.int32)


def run(
    model: TextModel,
    tokens: np.ndarray,
    *,
    max_new_tokens: int,
    cache: str,
    uncompressed_layers: int = 0,
    sampling: models.Sampling = GREEDY,
    stop_strings: Sequence[str] = (),
    prefill_batch_size: int | None = None,
    implementation: str | None = None,
    pooled_prefill: models.PooledAttention | None = None,
    show: Callable[[str], None] | None = None,
) -> GenerationReport:
    """Continues prompts and measures it; a text ends where its tokenizer says that texts end.

    `tokens` is int32 ``[B, T]``, and `cache` a name, see `cache_kind`. `stop_strings` end a text
    and are no part of it. `show` is called with the first sequence's text, piece by piece. The
    other arguments are those of `models.start`, `models.generate` and `models.UncompressedEdges`;
    raises what the first two do.
    """
    # Before the prompts run, which may take long.
    _checks.check_sizes(max_new_tokens=max_new_tokens)
    stops, _ = check_stops(model.tokenizer.eos_token_ids, stop_strings, model.tokenizer)
    decoder, (batch, length), ends = model.decoder, tokens.shape, sorted(stops)
    begun = time.perf_counter()
    session = generation.start_in_bucket(
        decoder,
        tokens,
        max_new_tokens=max_new_tokens,
        cache=cache_kind(cache, decoder.config, decoder.axes, uncompressed_layers),
        prefill_batch_size=prefill_batch_size,
        implementation=implementation,
        pooled_prefill=pooled_prefill,
    )
    jax.block_until_ready(session.logits)
    prefilled = time.perf_counter()
    nbytes, ratio = session.caches.nbytes, session.caches.compression_ratio
    prompts = tokens.tolist()
    first = _FirstText(TextStream(model.tokenizer.stream(prompts[0]), stop_strings), ends, show)
    times, counts = [], []
    for new in generation.stream(
        session,
        max_new_tokens,
        sampling=sampling,
        stop_tokens=ends,
        stop_strings=stop_strings,
        tokenizer=model.tokenizer,
        prompts=prompts,
        pad_token=_ENDED,
    ):
        times.append(time.perf_counter())
        counts.append(int(np.sum(new != _ENDED)))
        first.add(int(new[0]))
    first.end()
    # The first token comes with the prefill, the second from a step that was compiled first.
    timed = sum(counts[2:])
    return GenerationReport(
        cache=cache,
        uncompressed_layers=uncompressed_layers,
        batch_size=batch,
        prompt_tokens=length,
        new_tokens=first.tokens,
        finish_reason="stop" if first.stopped else "length",
        text=first.text.text,
        cache_bytes=nbytes,
        compression_ratio=ratio,
        prefill_seconds=prefilled - begun,
        tokens_per_second=timed / (times[-1] - times[1]) if timed else None,
    )


class _FirstText:
    """The first sequence: its text, shown as it comes, how many tokens it has and how it ends."""

    def __init__(
        self, text: TextStream, ends: Sequence[int], show: Callable[[str], None] | None
    ) -> None:
        self.text = text
        self.tokens = 0
        self.stopped = False
        self._ends = ends
        self._show = show

    def add(self, token: int) -> None:
        if token == _ENDED:
            return
        self.tokens += 1
        self.stopped = token in self._ends
        if not self.stopped:
            self._emit(self.text.add(token))
            self.stopped = self.text.stopped

    def end(self) -> None:
        self._emit(self.text.add(None))
        self.stopped |= self.text.stopped

    def _emit(self, piece: str) -> None:
        if piece and self._show is not None:
            self._show(piece)
