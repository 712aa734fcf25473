"""Running a model through a KV cache: prefill, one step, teacher-forced scoring, generation."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.caches import PooledAttention, kinds
from turbojax.models.decoder import Decoder, for_length, unstack, warn_of_long_factors
from turbojax.models.generation.caching import ModelCacheKind, ModelCaches, init_caches
from turbojax.models.generation.padding import (
    Prompts,
    align,
    cache_bucket,
    check_pad_token,
    check_prompts,
    check_tokens,
    host_int32,
    prompt_bucket,
    prompts_of_width,
)
from turbojax.models.generation.sampling import (
    GREEDY,
    NOTHING,
    Sampling,
    kind_of,
    sampling_rows,
)
from turbojax.models.generation.steps import (
    choose,
    decode_step,
    joined,
    next_tokens,
    parts,
    run_prompts,
)
from turbojax.models.generation.stopping import Endings, check_stops
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.models.transformer import Transformer
from turbojax.models.vision.soft_tokens import Images, SoftTokens, soft_tokens

Progress = Callable[[int], None]
"""Called with the number of tokens done since the last call."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Sequences in progress: a model, its caches, and the logits of the next token.

    Attributes:
      decoder: the model's weights; of LongRoPE with the factors for these caches.
      caches: KV caches of all layers.
      logits: float32 ``[B, V]``, scores of the token that follows.
      lengths: int32 ``[B]``, tokens seen.
      longest: the largest of `lengths`, known without waiting for the device.
      implementation: what attends, see `start`.
    """

    decoder: Decoder | QuantizedDecoder
    caches: ModelCaches
    logits: jax.Array
    lengths: jax.Array
    longest: int
    implementation: str | None = None

    @property
    def has_room(self) -> bool:
        """Whether the caches take another token."""
        return self.longest < self.caches.max_length

    def step(self, tokens: Any) -> "Session":
        """Feeds one token per sequence. Returns before the device is done.

        Args:
          tokens: int ``[B]``. The caches of `self` are donated: continue with the result only.
            Tokens that are on the device are not checked, because that would mean waiting for it:
            one that is not in the vocabulary gives NaN in its sequence's logits.

        Raises:
          TypeError: if `tokens` are not integers.
          ValueError: if a cache is full, `tokens` has another shape, or, where it is not an array
            of jax, one is not in the vocabulary.
        """
        if not isinstance(tokens, jax.Array):
            tokens = check_tokens(tokens, self.decoder.config.vocab_size)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens.dtype={tokens.dtype} must be an integer type")
        if tokens.shape != self.lengths.shape:
            raise ValueError(f"{tokens.shape=} must be {self.lengths.shape}, one per sequence")
        if not self.has_room:
            raise ValueError(_why_full(self.longest, self.caches))
        caches, logits, lengths = decode_step(
            self.decoder, self.caches, tokens, self.lengths, implementation=self.implementation
        )
        return dataclasses.replace(
            self, caches=caches, logits=logits, lengths=lengths, longest=self.longest + 1
        )


def start(
    model: Transformer | Decoder | QuantizedDecoder,
    tokens: Any,
    *,
    max_length: int,
    cache: ModelCacheKind = "exact",
    lengths: Any = None,
    prefill_batch_size: int | None = None,
    implementation: str | None = None,
    pooled_prefill: PooledAttention | None = None,
    images: Images | None = None,
) -> Session:
    """Runs prompts through the model and fills its caches.

    A model with LongRoPE takes its long factors if `max_length` is more than the length it was
    trained with before, and its short ones otherwise, for all sequences and to their end: cached
    keys cannot be rotated anew. A `UserWarning` says where a prompt alone would have other factors.

    Args:
      model: the model, quantized or not. A `Transformer` is unstacked first, which holds its layers
        twice as long as the session lives: for large models give ``unstack(model, consume=True)``.
        With a decoder that is split over a mesh the prompts' number is a multiple of the devices
        over which sequences are split.
      tokens: int ``[B, T]``, prompts padded on the right. With `images` they hold the places of
        these, see `turbojax.models.Images`.
      max_length: tokens each sequence will hold at most.
      cache: what `init_caches` takes: ``"exact"``, ``"turbo4"``, a `TurboConfig`,
        `UncompressedEdges`, a tuple with one for every layer, ...
      lengths: optional int ``[B]``, the prompts' lengths, at least 1; `T` if not given.
      prefill_batch_size: how many prompts run at a time; all if not given. Fewer need less memory
        besides the caches.
      implementation: what runs attention and cache: a name that `prefill`, `append` and `decode`
        take, for pages one of `turbojax.paged_attention`, or for the exact cache ``"xla"``,
        ``"cudnn"``, ``"mosaic_gpu"`` or ``"repeatable"``, which is None for others; None to choose.
      pooled_prefill: how the prompts attend to themselves, instead of exactly (or, for a
        compressed cache, with its codes). It has an `implementation` of its own. Their keys and
        values are cached one by one, and decoding attends to all of them.
      images: of all prompts, for a model that reads images: what `VisionModel.images` returns.
        A token of an image sees all of it. The prompts of this call attend exactly then, whatever
        the cache; later tokens attend to what the cache holds, as always.

    Returns:
      The session after the prompts.

    Raises:
      TypeError: if tokens or lengths are not integers, or `images` of another type.
      ValueError: if a shape does not fit, a token is not in the vocabulary, a length is outside
        ``1..T``, a prompt is longer than `max_length`, that is more than the model's,
        `prefill_batch_size` is not positive, or the prompts have not the places of these images.
      NotImplementedError: if the implementation asked for cannot run this, or images are to attend
        with `pooled_prefill`.
    """
    _check_not_pooled(images, pooled_prefill)
    prompts = check_prompts(model.config, tokens, lengths, max_length, prefill_batch_size, images)
    warn_of_long_factors(model.config, int(prompts.lengths.min()), max_length, stacklevel=2)
    options = (prefill_batch_size, implementation, pooled_prefill)
    return _run(model, prompts, cache, max_length, max_length, *options)


def start_in_bucket(
    model: Transformer | Decoder | QuantizedDecoder,
    tokens: Any,
    *,
    max_new_tokens: int,
    cache: ModelCacheKind = "exact",
    lengths: Any = None,
    prefill_batch_size: int | None = None,
    implementation: str | None = None,
    pooled_prefill: PooledAttention | None = None,
    images: Images | None = None,
) -> Session:
    """`start` for so many new tokens, with sizes that other calls share, see `generate`.

    Errors, warnings and LongRoPE's factors are as for a `max_length` of the prompts' size plus
    `max_new_tokens`, but the caches may hold more tokens. With `pooled_prefill` prompts keep their
    size, because its levels depend on that.
    """
    tokens, limit = host_int32("tokens", tokens), model.config.max_length
    size = tokens.shape[-1] if tokens.ndim else 1
    asked = size + max_new_tokens
    _check_not_pooled(images, pooled_prefill)
    prompts = check_prompts(model.config, tokens, lengths, asked, prefill_batch_size, images)
    # The warning points at the caller of what calls this, such as `generate`.
    warn_of_long_factors(model.config, int(prompts.lengths.min()), asked, stacklevel=3)
    if pooled_prefill is None:
        size = int(prompts.lengths.max())
        prompts = prompts_of_width(prompts, prompt_bucket(size, limit))
    room = cache_bucket(size, max_new_tokens, limit)
    options = (prefill_batch_size, implementation, pooled_prefill)
    return _run(model, prompts, cache, asked, room, *options)


def _check_not_pooled(images: Images | None, pooled: PooledAttention | None) -> None:
    """Raises NotImplementedError if prompts with images are to attend by pooled attention."""
    if images is not None and pooled is not None:
        raise NotImplementedError(
            "pooled_prefill must be None with images: pooled attention is causal, and the tokens "
            "of an image see all of it"
        )


def _run(
    model: Transformer | Decoder | QuantizedDecoder,
    prompts: Prompts,
    cache: ModelCacheKind,
    max_length: int,
    room: int,
    prefill_batch_size: int | None,
    implementation: str | None,
    pooled: PooledAttention | None,
) -> Session:
    """Runs checked prompts through a model for `max_length` tokens, with caches for `room`."""
    decoder = for_length(unstack(model) if isinstance(model, Transformer) else model, max_length)
    batch, lengths = len(prompts.tokens), prompts.lengths
    caches = init_caches(decoder, batch, room, cache)
    logits = []
    for first, rows in parts(batch, prefill_batch_size, decoder.axes):
        # Cut on the host: on the device every length would be a program of its own.
        part, caches = run_prompts(
            decoder,
            caches,
            prompts.tokens[rows],
            lengths[rows],
            np.int32(first),
            _images_of(prompts, rows),
            implementation=implementation,
            pooled=pooled,
        )
        logits.append(part)
    return Session(
        decoder,
        caches,
        logits[0] if len(logits) == 1 else joined(logits, decoder.axes),
        jax.device_put(lengths, None if decoder.axes is None else decoder.axes.sharding("B")),
        int(lengths.max()),
        implementation,
    )


def _images_of(prompts: Prompts, rows: slice | np.ndarray) -> SoftTokens | None:
    """The images of some of the prompts, in their places."""
    if prompts.images is None or prompts.places is None:
        return None
    # A program of its own: that of the prompts does not depend on how many images there are.
    return _soft_tokens(prompts.images, prompts.places[rows])


_soft_tokens = jax.jit(soft_tokens)


def score(session: Session, tokens: Any, progress: Progress | None = None) -> jax.Array:
    """Teacher-forced decoding: the logits that precede each given token.

    Args:
      session: a started session; its caches are donated.
      tokens: int ``[B, T]``, the true continuation.
      progress: called after each token.

    Returns:
      float32 ``[B, T, V]``.

    Raises:
      TypeError: if tokens are not integers.
      ValueError: if their shape does not fit, one is not in the vocabulary, or a cache is full.
    """
    tokens = _checks.as_int32("tokens", tokens)
    batch = session.lengths.shape[0]
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.shape[0] != batch:
        raise ValueError(f"{tokens.shape=} must be [{batch}, T], T at least 1")
    if _checks.is_concrete(tokens):
        check_tokens(tokens, session.decoder.config.vocab_size)
    logits = []
    for t in range(tokens.shape[1]):
        logits.append(session.logits)
        if t + 1 < tokens.shape[1]:
            session = session.step(tokens[:, t])
        if progress is not None:
            jax.block_until_ready(session.logits)
            progress(1)
    return jnp.stack(logits, axis=1)


def stream(
    session: Session,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    stop_tokens: Iterable[int] = (),
    stop_strings: Iterable[str] = (),
    tokenizer: Tokenizer | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    pad_token: int = 0,
    drawn: int = 0,
) -> Iterator[np.ndarray]:
    """Generates token by token, until all sequences have ended.

    Args:
      session: a started session; its caches are donated.
      max_new_tokens: tokens per sequence, at most.
      sampling: how tokens are chosen, see `generate`.
      stop_tokens: see `generate`.
      stop_strings: see `generate`.
      tokenizer: see `generate`.
      prompts: the tokens of every sequence so far. Only `stop_strings` use them, for tokenizers
        with which a token's text depends on the tokens before.
      pad_token: yielded in place of the next token of a sequence that has ended.
      drawn: new tokens that every sequence has so far, so that a continued session does not draw
        with the random numbers of its beginning again.

    Returns:
      Yields int32 ``[B]``, the next token of each sequence.

    Raises:
      TypeError: if a stop token is not an integer, or a stop text not text.
      ValueError: if a number or the number of prompts does not fit. While yielding: where the
        logits of a sequence that has not ended hold NaN, so that there is no next token: for
        instance where fp8 pages cannot hold a layer's keys or values.
    """
    _checks.check_sizes(max_new_tokens=max_new_tokens)
    _checks.check_integer("drawn", drawn)
    if drawn < 0:
        raise ValueError(f"{drawn=} must be at least 0")
    batch = session.lengths.shape[0]
    prompts = [[]] * batch if prompts is None else prompts
    if len(prompts) != batch:
        raise ValueError(f"{len(prompts)} prompts must be {batch}, one per sequence")
    check_pad_token(pad_token)
    endings = Endings(prompts, stop_tokens, stop_strings, tokenizer)
    # Each row has random numbers of its own, which depend on its place and on nothing else.
    options = [
        dataclasses.replace(sampling, seed=(sampling.seed + row) % 2**32) for row in range(batch)
    ]
    return _stream(session, max_new_tokens, options, endings, pad_token, drawn)


def _stream(
    session: Session,
    max_new_tokens: int,
    options: Sequence[Sampling],
    endings: Endings,
    pad_token: int,
    drawn: int,
) -> Iterator[np.ndarray]:
    launches = _Launches(session, max_new_tokens, options, drawn)
    known = 0
    for chosen in launches:
        for tokens in np.atleast_2d(chosen)[: max_new_tokens - known]:
            tokens = np.where(endings.ended, np.int32(pad_token), tokens)
            nothing = ~endings.ended & (tokens == NOTHING)
            if np.any(nothing):
                raise ValueError(_why_nothing(launches.caches, np.flatnonzero(nothing).tolist()))
            endings.add(tokens)
            known += 1
            yield tokens
            if endings.ended.all():
                return
    if known < max_new_tokens:
        raise ValueError(_why_full(launches.longest, launches.caches))


# Tokens of a launch. More let the host rest longer, and where sequences end, more are for nothing.
_TOGETHER = 4


class _Launches:
    """New tokens of all sequences, on the device: int32 ``[B]``, then ``[n, B]`` of each launch.

    The device has the next launch before the host gets the tokens of one, and runs while the host
    prepares. Where they end the last sequence, that launch is for nothing. The first tokens wait
    for none: its program may have to be compiled. It ends with `most` tokens or more, or where
    `caches`, after the latest launch, are full.
    """

    def __init__(
        self, session: Session, most: int, options: Sequence[Sampling], drawn: int
    ) -> None:
        self.caches, self.longest = session.caches, session.longest
        self._session, self._most = session, most
        self._kind, self._rows = kind_of(options), sampling_rows(options, drawn)

    def __iter__(self) -> Iterator[jax.Array]:
        launches = self._launch()
        yield next(launches)
        waiting = next(launches, None)
        while waiting is not None:
            following = next(launches, None)
            yield waiting
            waiting = following

    def _launch(self) -> Iterator[jax.Array]:
        decoder, lengths = self._session.decoder, self._session.lengths
        chosen, fed = choose(self._session.logits, self._rows, kind=self._kind, axes=decoder.axes)
        yield chosen
        made = 1
        while made < self._most and self.longest < self.caches.max_length:
            # Without room for all, one by one: another program, for the last tokens of a context.
            has_room = self.longest + _TOGETHER <= self.caches.max_length
            count = _TOGETHER if has_room else 1
            self.caches, chosen, fed, lengths = next_tokens(
                decoder,
                self.caches,
                fed,
                lengths,
                dataclasses.replace(self._rows, index=self._rows.index + np.int32(made)),
                count=count,
                kind=self._kind,
                implementation=self._session.implementation,
            )
            made, self.longest = made + count, self.longest + count
            yield chosen


def generate(
    model: Transformer | Decoder | QuantizedDecoder,
    tokens: Any,
    *,
    max_new_tokens: int,
    cache: ModelCacheKind = "exact",
    lengths: Any = None,
    attention_mask: jax.Array | np.ndarray | None = None,
    sampling: Sampling = GREEDY,
    stop_tokens: Iterable[int] = (),
    stop_strings: Iterable[str] = (),
    tokenizer: Tokenizer | None = None,
    pad_token: int = 0,
    on_token: Callable[[np.ndarray], None] | None = None,
    prefill_batch_size: int | None = None,
    implementation: str | None = None,
    pooled_prefill: PooledAttention | None = None,
    images: Images | None = None,
) -> jax.Array:
    """Continues prompts through a KV cache.

    A sequence ends with a token of `stop_tokens`, or with the one that completes a text of
    `stop_strings`; both are part of the result, and `pad_token` fills up what is left of its row.
    Generation is over when all sequences have ended, or have `max_new_tokens`.

    XLA compiles two programs, for the prompts and for new tokens, anew for each batch size, size of
    prompts and size of caches, the second also for each way of `sampling` (greedy, drawn,
    restricted). So that few calls compile, the longest prompt's length, to which all are padded,
    and `max_new_tokens` are rounded up to a few sizes, see `turbojax.models.generation.padding`: by
    less than 64 tokens or a quarter. Caches take memory for the sum of both, at most for the
    model's `max_length`. Texts are those of exact sizes, as `start` and `stream` give them, but for
    rounding: where tokens are equally likely to the last bit. A launch of the device gives four
    tokens of every sequence, so up to seven are for nothing once all have ended.

    Args:
      model: the model, see `start`.
      tokens: int ``[B, T]``, prompts padded on the right, or with an `attention_mask` anywhere.
      max_new_tokens: tokens to add at most, at least 1; prompt and new tokens together must be at
        most the model's `max_length`.
      cache: what `init_caches` takes: ``"exact"``, ``"turbo4"``, a `TurboConfig`,
        `UncompressedEdges`, a tuple with one for every layer, ...
      lengths: optional int ``[B]``, the prompts' lengths.
      attention_mask: instead of `lengths`, bool or 0 and 1 ``[B, T]``, true at real tokens; see
        `align`.
      sampling: how tokens are chosen, by default the most likely one. Row b of the batch draws
        with the seed ``sampling.seed + b`` (modulo ``2**32``), so that equal prompts get different
        texts, and no row's text depends on the others.
      stop_tokens: tokens that end a sequence, such as a tokenizer's `eos_token_ids`.
      stop_strings: texts that end a sequence, wherever in the tokens they begin and end. One that
        is written like a special token, such as ``"<|im_end|>"``, is a stop token, too.
      tokenizer: what turns tokens into the text in which `stop_strings` are looked for.
      pad_token: fills the result after a sequence's end; any int32, -1 for instance.
      on_token: called with each step's tokens, int32 ``[B]``, as soon as they are known.
      prefill_batch_size: how many prompts run at a time, see `start`.
      implementation: what runs attention and cache, see `start`.
      pooled_prefill: how the prompts attend to themselves, see `start`.
      images: of all prompts, see `start`.

    Returns:
      int32 ``[B, max_new_tokens]``.

    Raises:
      TypeError: if tokens, lengths, mask, stops or images are of the wrong kind.
      ValueError: if a shape or a number does not fit, a prompt is longer than the model's context
        allows, the mask has holes, the prompts have not the places of these images, or where logits
        hold NaN, see `stream`.
      NotImplementedError: see `start`.
    """
    _checks.check_sizes(max_new_tokens=max_new_tokens)
    # Before the prompts run, which may take long.
    ends, texts = check_stops(stop_tokens, stop_strings, tokenizer)
    check_pad_token(pad_token)
    if attention_mask is not None:
        if lengths is not None:
            raise ValueError("give lengths or an attention_mask, one of them")
        tokens, lengths = align(tokens, attention_mask)
    tokens, limit = host_int32("tokens", tokens), model.config.max_length
    if lengths is not None and tokens.ndim == 2 and tokens.shape[1] + max_new_tokens > limit:
        # Padding takes no part: a batch that fits without it fits.
        lengths = np.asarray(_checks.check_lengths("lengths", lengths, *tokens.shape))
        tokens = tokens[:, : max(int(lengths.max()), 1)]
    size = tokens.shape[-1] if tokens.ndim else 1
    if size + max_new_tokens > limit:
        raise ValueError(
            f"{size + max_new_tokens} tokens, {size} of the longest prompt and {max_new_tokens} "
            f"new ones, must be at most the model's context, max_length={limit}"
        )
    session = start_in_bucket(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        cache=cache,
        lengths=lengths,
        prefill_batch_size=prefill_batch_size,
        implementation=implementation,
        pooled_prefill=pooled_prefill,
        images=images,
    )
    new = stream(
        session,
        max_new_tokens,
        sampling=sampling,
        stop_tokens=ends,
        stop_strings=texts,
        tokenizer=tokenizer,
        prompts=_rows(tokens, lengths) if texts else None,
        pad_token=pad_token,
    )
    result = np.full((tokens.shape[0], max_new_tokens), pad_token, np.int32)
    for i, step in enumerate(new):
        result[:, i] = step
        if on_token is not None:
            on_token(step)
    return jax.device_put(result)


def _rows(tokens: np.ndarray, lengths: Any) -> list[list[int]]:
    """The prompts, without padding; a session's lengths may be on other processes' devices."""
    if lengths is None:
        return [row.tolist() for row in tokens]
    return [row[:length].tolist() for row, length in zip(tokens, np.asarray(lengths), strict=True)]


def _why_full(longest: int, caches: ModelCaches) -> str:
    return f"the cache is full: {longest=} of {caches.max_length} tokens"


def _why_nothing(caches: ModelCaches, rows: list[int]) -> str:
    message = f"the logits of sequences {rows} hold NaN: there is no next token"
    # Of several kinds some cannot have lost anything.
    reasons = (kinds.kind_of(layer).why_nan(layer) for layer in caches.layers)
    reason = next((reason for reason in reasons if reason is not None), None)
    return message if reason is None else f"{message}; {reason}"
