"""Text in, text out: what `turbojax generate` does around a model."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, models
from turbojax.models.checkpoint.huggingface import checkpoint_folder
from turbojax.models.config import DTYPES, model_config, stored_dtype
from turbojax.models.generation import session as generation
from turbojax.models.generation.sampling import GREEDY
from turbojax.models.generation.stopping import TextStream, check_stop_strings, check_stops
from turbojax.models.text.chat import chat_tokens
from turbojax.models.text.tokenizer import NumberTokenizer, Tokenizer, load_tokenizer

WEIGHTS = ("float", "int4")
# Stands for the next token of a sequence that has ended.
_ENDED = -1
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model to generate with, and what turns text into its tokens and back."""

    decoder: models.Decoder | models.QuantizedDecoder
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class GenerationReport:
    """What one run of `generate` did.

    Attributes:
      cache: name of the cache.
      batch_size: sequences.
      prompt_tokens: of each.
      new_tokens: of the first; the others have as many, or fewer or more if they are drawn and
        some end.
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
        return (
            f"{speed}, batch {self.batch_size}; {self.cache} cache {self.cache_bytes:,} bytes "
            f"({than_bfloat16(self.compression_ratio)})"
        )


def parse_dtype(name: str | None) -> np.dtype | None:
    """The floating-point dtype of this name; None for None.

    Raises:
      ValueError: if it is no name of `DTYPES`.
    """
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} must be one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def parse_prefill(
    name: str, window: int | None, block_size: int | None
) -> models.PooledAttention | None:
    """How prompts attend, from what a command line says; None for dense attention.

    Args:
      name: ``"dense"``, or a policy of `models.pooled_by_name`.
      window: see there; None for its default.
      block_size: see there; None for its default.

    Raises:
      ValueError: if there is no such name, a number does not fit, or it has no effect.
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


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A model that is known and not loaded, so that what it is to do can be checked before.

    Attributes:
      config: its shape.
      dtype: of weights and computation.
      tokenizer: what reads its text.
      weight_bytes: of its weights in this dtype, about.
      load: loads it.
    """

    config: models.TransformerConfig
    dtype: np.dtype
    tokenizer: Tokenizer
    weight_bytes: int
    load: Callable[[], TextModel]


def find_text_model(
    path: str, dtype: np.dtype | None = None, max_length: int | None = None
) -> FoundModel:
    """Reads all of a checkpoint but its weights.

    Args:
      path: see `load_text_model`.
      dtype: see there.
      max_length: see there.

    Raises:
      ImportError, OSError, ValueError, NotImplementedError: see there; weights are not looked at.
    """
    if dtype is None and jax.default_backend() == "cpu":
        dtype = jnp.dtype(jnp.float32)
    tokenizer = load_tokenizer(path)
    hf = models.read_config(path)
    config = model_config(checkpoint_folder(path), hf, max_length)
    stored = stored_dtype(hf) or jnp.dtype(jnp.bfloat16)
    used = stored if dtype is None else dtype
    size = sum(file.stat().st_size for file in models.weight_files(path))
    if "quantization_config" not in hf:
        size = size * used.itemsize // stored.itemsize

    def load() -> TextModel:
        decoder = models.load_decoder(path, dtype=dtype, max_length=max_length)
        return TextModel(decoder, tokenizer)

    return FoundModel(config, used, tokenizer, size, load)


def load_text_model(
    path: str, dtype: np.dtype | None = None, max_length: int | None = None
) -> TextModel:
    """Loads a checkpoint with what reads its text.

    Args:
      path: ``"embedded"`` or a checkpoint's folder, quantized or not. What reads its text, see
        `load_tokenizer`.
      dtype: of weights and computation. By default float32 on a CPU, where it is the fast one, and
        otherwise that of the checkpoint.
      max_length: longest sequence, by default the checkpoint's; see `models.load`.

    Raises:
      ImportError: if there is a `tokenizer.json` and the package `tokenizers` is missing.
      OSError, ValueError, NotImplementedError: see `models.load_decoder` and `load_tokenizer`.
    """
    return find_text_model(path, dtype, max_length).load()


def find_random_model(
    shape: str, dtype: np.dtype | None = None, weights: str = "float"
) -> FoundModel:
    """A model with random weights, whose tokens are numbers.

    Args:
      shape: a name in `models.SHAPES`.
      dtype: of weights and computation, by default bfloat16.
      weights: ``"float"``, or ``"int4"`` for INT4 weights in the blocks' linear layers.

    Raises:
      ValueError: if there is no such shape, or no such kind of weights.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r} must be one of {', '.join(WEIGHTS)}")
    if shape not in models.SHAPES:
        raise ValueError(f"random weights {shape!r} must be one of {', '.join(models.SHAPES)}")
    config, used = models.SHAPES[shape], jnp.dtype(dtype or jnp.bfloat16)
    make = models.random_decoder if weights == "float" else models.random_quantized_decoder
    tokenizer = NumberTokenizer(config.vocab_size)
    shapes = jax.tree.leaves(jax.eval_shape(lambda: make(config, dtype=used)))
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)
    return FoundModel(
        config, used, tokenizer, size, lambda: TextModel(make(config, dtype=used), tokenizer)
    )


def check_options(
    *, max_new_tokens: int, cache: str, stop_strings: Sequence[str], **sizes: int | None
) -> None:
    """Checks what can be checked without a model, which may take minutes to load.

    Args:
      max_new_tokens: see `run`.
      cache: see `run`.
      stop_strings: see `run`.
      **sizes: numbers that must be at least 1, where they are given.

    Raises:
      ValueError: if one does not fit.
    """
    given = {name: size for name, size in sizes.items() if size is not None}
    _checks.check_sizes(max_new_tokens=max_new_tokens, **given)
    if cache not in models.CACHE_NAMES:
        raise ValueError(f"cache {cache!r} must be one of {', '.join(models.CACHE_NAMES)}")
    check_stop_strings(stop_strings)


def read_text(content: bytes) -> str:
    """UTF-8 as text; other bytes as `Tokenizer.encode` takes them."""
    return content.decode("utf-8", "surrogateescape")


def unescape(text: str) -> str:
    r"""A text of a command line: ``\n``, ``\t``, ``\r`` and ``\\`` are what they are in Python."""
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)


def prompt_tokens(
    model: FoundModel, content: str, *, chat: bool = False, system: str | None = None
) -> list[int]:
    """The tokens of a prompt.

    Args:
      model: whose.
      content: a text to continue, or with `chat` what the user says.
      chat: whether to write it as a conversation, by the checkpoint's template.
      system: the message that precedes a conversation, if there is one.

    Raises:
      ImportError: if a package is missing that this needs.
      ValueError: if there is no token, one is not in the model's vocabulary, there is no template,
        or no `chat` to have a `system`.
    """
    if system is not None and not chat:
        raise ValueError("a system message is for a conversation: it needs chat")
    if chat:
        said = [("system", system), ("user", content)]
        messages = [{"role": role, "content": x} for role, x in said if x is not None]
        tokens = chat_tokens(model.tokenizer, messages)
    else:
        tokens = model.tokenizer.encode(content)
    if not tokens:
        raise ValueError("the text must hold at least one token")
    smallest, largest, size = min(tokens), max(tokens), model.config.vocab_size
    if smallest < 0 or largest >= size:
        raise ValueError(f"tokens in {smallest}..{largest} must be within 0..{size - 1}")
    return tokens


def copies(tokens: list[int], batch_size: int) -> np.ndarray:
    """One prompt for every sequence, int32 ``[batch_size, len(tokens)]``."""
    _checks.check_sizes(batch_size=batch_size)
    return np.tile(np.array([tokens], np.int32), (batch_size, 1))


def random_prompts(config: models.TransformerConfig, batch_size: int, length: int) -> np.ndarray:
    """Random tokens, int32 ``[batch_size, length]``."""
    _checks.check_sizes(batch_size=batch_size, prompt_tokens=length)
    rng = np.random.default_rng(0)
    return rng.integers(config.vocab_size, size=(batch_size, length), dtype=np.int32)


def than_bfloat16(ratio: float) -> str:
    """How a cache compares with one of bfloat16 that is `ratio` times as large."""
    times = f"{max(ratio, 1 / ratio):.2f}"
    if times == "1.00":
        return "as large as bfloat16"
    return f"{times}x {'smaller' if ratio > 1 else 'larger'} than bfloat16"


def run(
    model: TextModel,
    tokens: np.ndarray,
    *,
    max_new_tokens: int,
    cache: str,
    sampling: models.Sampling = GREEDY,
    stop_strings: Sequence[str] = (),
    prefill_batch_size: int | None = None,
    implementation: str | None = None,
    pooled_prefill: models.PooledAttention | None = None,
    show: Callable[[str], None] | None = None,
) -> GenerationReport:
    """Continues prompts and measures it; a text ends where its tokenizer says that texts end.

    Args:
      model: what generates.
      tokens: int32 ``[B, T]``.
      max_new_tokens: to add to each, at most.
      cache: its name, see `models.cache_by_name`.
      sampling: how tokens are chosen, see `models.generate`.
      stop_strings: texts that end a text and are no part of it.
      prefill_batch_size: see `models.start`.
      implementation: see `models.start`.
      pooled_prefill: see `models.start`.
      show: called with the first sequence's text, piece by piece.

    Raises:
      ValueError, NotImplementedError: see `models.start` and `models.generate`.
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
        cache=models.cache_by_name(cache, decoder.config.num_kv_heads),
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
