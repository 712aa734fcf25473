"""Text in, text out: what `turbojax generate` does around a model."""

import codecs
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, models
from turbojax.models import generation
from turbojax.models.config import DTYPES

TOKENIZER_NAME = "tokenizer.json"
WEIGHTS = ("float", "int4")
BYTES = 256
# Tokens of the prompt that the first new one is decoded after.
_CONTEXT = 4


class Codec(Protocol):
    """Translates between text and a model's tokens."""

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a prompt.

        Raises:
          ValueError: if the text has none, or is not what the codec reads.
        """
        ...

    def decoder(self, prompt: list[int]) -> Callable[[int | None], str]:
        """A function from each token after the prompt to the text it completes; None ends it."""
        ...


class ByteCodec:
    """Token i is the byte of value i, and byte 0 begins a text: the embedded model's way."""

    def encode(self, text: bytes) -> list[int]:
        """The beginning of a file, then the bytes."""
        return [models.BEGINNING_OF_FILE, *text]

    def decoder(self, prompt: list[int]) -> Callable[[int | None], str]:
        """See `Codec`; bytes that are no UTF-8 show as replacement characters."""
        del prompt  # a byte means the same after any other
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(token: int | None) -> str:
            return utf8.decode(b"", True) if token is None else utf8.decode(bytes([token]))

        return decode


class NumberCodec:
    """Tokens as decimal numbers: for models without a tokenizer."""

    def encode(self, text: bytes) -> list[int]:
        """The numbers of a text like ``"1 17 4"``."""
        try:
            tokens = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(
                f"there is no {TOKENIZER_NAME}, so the text must be token numbers: {error}"
            ) from error
        if not tokens:
            raise ValueError("the text must hold at least one token")
        return tokens

    def decoder(self, prompt: list[int]) -> Callable[[int | None], str]:
        """See `Codec`."""
        del prompt  # so does a number
        return lambda token: "" if token is None else f"{token} "


class TokenizerCodec:
    """A Hugging Face `tokenizer.json`.

    Raises:
      ImportError: if the package `tokenizers` is not installed.
      ValueError: if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"{path} needs the package tokenizers: pip install 'turbojax[text]'"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from error

    def encode(self, text: bytes) -> list[int]:
        """The tokens of UTF-8 text, special ones included."""
        tokens = self._tokenizer.encode(text.decode("utf-8")).ids
        if not tokens:
            raise ValueError("the text must hold at least one token")
        return tokens

    def decoder(self, prompt: list[int]) -> Callable[[int | None], str]:
        """See `Codec`; text is held back as long as its last character is incomplete."""
        # A token alone may lose its leading space, so it is decoded after those before it.
        shown, waiting = prompt[-_CONTEXT:], list[int]()

        def decode(token: int | None) -> str:
            nonlocal shown, waiting
            waiting += [] if token is None else [token]
            before = self._tokenizer.decode(shown)
            text = self._tokenizer.decode(shown + waiting)
            if token is not None and text.endswith("\N{REPLACEMENT CHARACTER}"):
                return ""
            shown, waiting = waiting or shown, []
            return text[len(before) :]

        return decode


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model to generate with, and how to read and write its tokens."""

    decoder: models.Decoder | models.QuantizedDecoder
    codec: Codec


@dataclasses.dataclass(frozen=True)
class GenerationReport:
    """What one run of `generate` did.

    Attributes:
      cache: name of the cache.
      batch_size: sequences.
      prompt_tokens: of each.
      new_tokens: of each.
      text: what the first sequence was continued with.
      cache_bytes: of all layers and sequences.
      compression_ratio: bytes of bfloat16 caches of the same capacity over these.
      prefill_seconds: compilation included.
      tokens_per_second: new tokens of all sequences, without the first step, which is compiled;
        None if there were too few to tell.
    """

    cache: str
    batch_size: int
    prompt_tokens: int
    new_tokens: int
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
      ValueError: if there is no such name, a number does not fit, or it is given in vain.
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


def load_text_model(path: str, dtype: np.dtype | None = None) -> TextModel:
    """Loads a checkpoint with what reads its text.

    Args:
      path: ``"embedded"`` or a checkpoint's folder, quantized or not. A vocabulary of 256 tokens is
        bytes; otherwise the folder's `tokenizer.json` is used, and without one tokens are numbers.
      dtype: of weights and computation. By default float32 on a CPU, where it is the fast one, and
        otherwise that of the checkpoint.

    Raises:
      ImportError: if there is a `tokenizer.json` and the package `tokenizers` is missing.
      OSError, ValueError, NotImplementedError: see `models.load`.
    """
    if dtype is None and jax.default_backend() == "cpu":
        dtype = jnp.dtype(jnp.float32)
    tokenizer = Path(path) / TOKENIZER_NAME
    # Before the weights are read, which takes longer.
    codec: Codec | None = TokenizerCodec(tokenizer) if tokenizer.is_file() else None
    model = models.load(path, dtype=dtype)
    if codec is None:
        codec = ByteCodec() if model.config.vocab_size == BYTES else NumberCodec()
    if isinstance(model, models.QuantizedDecoder):
        return TextModel(model, codec)
    return TextModel(models.unstack(model, consume=True), codec)


def random_text_model(
    shape: str, dtype: np.dtype | None = None, weights: str = "float"
) -> TextModel:
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
    make = models.random_decoder if weights == "float" else models.random_quantized_decoder
    return TextModel(make(models.SHAPES[shape], dtype=dtype or jnp.bfloat16), NumberCodec())


def copies(tokens: list[int], batch_size: int) -> np.ndarray:
    """One prompt for every sequence, int32 ``[batch_size, len(tokens)]``."""
    _checks.check_sizes(batch_size=batch_size)
    return np.tile(np.array([tokens], np.int32), (batch_size, 1))


def random_prompts(config: models.LlamaConfig, batch_size: int, length: int) -> np.ndarray:
    """Random tokens, int32 ``[batch_size, length]``."""
    _checks.check_sizes(batch_size=batch_size, prompt_tokens=length)
    rng = np.random.default_rng(0)
    return rng.integers(config.vocab_size, size=(batch_size, length), dtype=np.int32)


def than_bfloat16(ratio: float) -> str:
    """How a cache compares with one of bfloat16 that is `ratio` times as large."""
    if ratio == 1:
        return "as large as bfloat16"
    if ratio > 1:
        return f"{ratio:.2f}x smaller than bfloat16"
    return f"{1 / ratio:.2f}x larger than bfloat16"


def run(
    model: TextModel,
    tokens: np.ndarray,
    *,
    max_new_tokens: int,
    cache: str,
    prefill_batch_size: int | None = None,
    implementation: str | None = None,
    pooled_prefill: models.PooledAttention | None = None,
    show: Callable[[str], None] | None = None,
) -> GenerationReport:
    """Continues prompts greedily and measures it.

    Args:
      model: what generates.
      tokens: int32 ``[B, T]``.
      max_new_tokens: to add to each.
      cache: its name, see `models.cache_by_name`.
      prefill_batch_size: see `models.start`.
      implementation: see `models.start`.
      pooled_prefill: see `models.start`.
      show: called with the first sequence's text, piece by piece.

    Raises:
      ValueError, NotImplementedError: see `models.start` and `models.generate`.
    """
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    decoder, (batch, length) = model.decoder, tokens.shape
    begun = time.perf_counter()
    session = models.start(
        decoder,
        jnp.asarray(tokens),
        max_length=length + max_new_tokens,
        cache=models.cache_by_name(cache, decoder.config.num_kv_heads),
        prefill_batch_size=prefill_batch_size,
        implementation=implementation,
        pooled_prefill=pooled_prefill,
    )
    jax.block_until_ready(session.logits)
    prefilled = time.perf_counter()
    nbytes, ratio = session.caches.nbytes, session.caches.compression_ratio
    decode, pieces, times = model.codec.decoder(tokens[0].tolist()), [], []

    def emit(piece: str) -> None:
        pieces.append(piece)
        if show is not None:
            show(piece)

    for new in generation.stream(session, max_new_tokens):
        times.append(time.perf_counter())
        emit(decode(int(new[0])))
    emit(decode(None))
    # The first token comes with the prefill, the second from a step that was compiled first.
    steps = len(times) - 2
    return GenerationReport(
        cache=cache,
        batch_size=batch,
        prompt_tokens=length,
        new_tokens=max_new_tokens,
        text="".join(pieces),
        cache_bytes=nbytes,
        compression_ratio=ratio,
        prefill_seconds=prefilled - begun,
        tokens_per_second=batch * steps / (times[-1] - times[1]) if steps > 0 else None,
    )
