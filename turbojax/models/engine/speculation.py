"""Speculation: several tokens of a sequence in one pass, those that were guessed and one more.

A guess is what followed the same tokens earlier in the text (prompt lookup), or what a smaller
model says. The model computes logits at all guessed places at once (Leviathan et al., 2023; Chen et
al., 2023), and at each place the next token is chosen from them just as it is without speculation,
with the same random numbers: of the seed and the token's number. Guesses are right as far as they
are what was chosen. So texts have the same distribution as without, and are the same, but for the
rounding of passes of several tokens; a draft model draws with the same numbers, which makes its
guesses the more often right (the coupling by Gumbel noise of Daliri et al., 2024).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention.options import PLAIN
from turbojax.attention.score_modifiers import of_layer
from turbojax.caches import Attend
from turbojax.models.decoder import Decoder
from turbojax.models.engine.placement import SAME, Vocabulary, pool_specs, run_on, vocabulary_of
from turbojax.models.engine.pools import Pools, Windows, append_and_attend, group_of
from turbojax.models.engine.programs import note_traced
from turbojax.models.engine.step import (
    State,
    append_at,
    apply_changes,
    count_dropped,
    pages_at,
)
from turbojax.models.generation.sampling import NOTHING, Array, Kind, SamplingRows
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.programs import on_mesh
from turbojax.models.transformer import Transformer

MOST_GUESSES = 15
"""Guesses at a time: with one more token they are a call for few queries."""


@dataclasses.dataclass(frozen=True)
class NGram:
    """Guesses are what followed the text's last tokens where they stood before (prompt lookup).

    Among earlier places the longest match counts, and among these the latest.

    Attributes:
      tokens: guesses at a time, 1 to 15.
      longest: tokens that are compared, at most.
      shortest: tokens that must match.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if one is not positive, there are too many guesses, or `shortest` is more than
        `longest`.
    """

    tokens: int = 4
    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        _checks.check_sizes(longest=self.longest, shortest=self.shortest)
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} must be at most longest={self.longest}")


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """Guesses come from a smaller model, which reads the same tokens and has pages of its own.

    Attributes:
      model: has the vocabulary of the model that it guesses for.
      tokens: guesses at a time, 1 to 15.

    Raises:
      TypeError: if the model or the number is of another kind.
      ValueError: if there are too few guesses, or too many.
    """

    model: Transformer | Decoder | QuantizedDecoder
    tokens: int = 4

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        if not isinstance(self.model, Transformer | Decoder | QuantizedDecoder):
            raise TypeError(
                f"model is a {type(self.model).__name__}, must be a Transformer, Decoder or "
                "QuantizedDecoder"
            )


Speculation = NGram | Draft


def _check_tokens(tokens: int) -> None:
    _checks.check_sizes(tokens=tokens)
    if tokens > MOST_GUESSES:
        raise ValueError(f"{tokens=} must be at most {MOST_GUESSES} guesses")


@functools.partial(jax.jit, static_argnames=("count", "longest", "shortest"))
def look_up(
    state: State, slots: jax.Array, *, count: int, longest: int, shortest: int
) -> tuple[jax.Array, jax.Array]:
    """What followed each text's last tokens where they stood before, see `NGram`.

    Returns int32 ``[R, count]`` guesses, and int32 ``[R]``: how many of the first ones are real.
    """
    note_traced()
    texts = state.history.at[slots].get(mode="fill", fill_value=0)
    last, size = state.of(state.lengths, slots)[:, None], texts.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)[None]
    run, is_run = jnp.zeros(texts.shape, jnp.int32), jnp.ones(texts.shape, bool)
    for i in range(longest):
        token = jnp.take_along_axis(texts, jnp.maximum(last - i, 0), axis=1)
        shifted = jnp.pad(texts, ((0, 0), (i, 0)))[:, :size]
        is_run = is_run & (shifted == token) & (at >= i) & (last >= i)
        run = run + is_run.astype(jnp.int32)
    is_match = (run >= shortest) & (at < last)
    follow = jnp.minimum(last - at, count)
    # The longest match; of those the ones that enough tokens follow; of those the latest.
    score = (run * (count + 1) + follow) * size + at
    best = jnp.argmax(jnp.where(is_match, score, -1), axis=1).astype(jnp.int32)[:, None]
    there = jnp.take_along_axis(is_match, best, axis=1)
    found = jnp.where(there, jnp.take_along_axis(follow, best, axis=1), 0)[:, 0]
    taken = jnp.minimum(best + 1 + jnp.arange(count, dtype=jnp.int32)[None], size - 1)
    return jnp.take_along_axis(texts, taken, axis=1), found


@functools.partial(
    jax.jit,
    static_argnames=("count", "kind", "windows", "implementation"),
    donate_argnames="caches",
)
def draft(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    slots: jax.Array,
    changes: jax.Array,
    rows: SamplingRows,
    *,
    count: int,
    kind: Kind,
    windows: Windows,
    implementation: str | None,
) -> tuple[Pools, jax.Array, jax.Array]:
    """What a smaller model would go on with: returns its new pools, then guesses as `look_up` does.

    `decoder` and `caches` (donated) are the draft model's; the pools hold the texts at least up to
    their last two tokens. `changes` are as in `apply_changes`; the `index` of `rows` is ignored.
    """
    note_traced()

    def run(
        decoder: Decoder | QuantizedDecoder,
        caches: Pools,
        state: State,
        slots: jax.Array,
        changes: jax.Array,
        rows: SamplingRows,
    ) -> tuple[Pools, jax.Array, jax.Array]:
        vocabulary = vocabulary_of(decoder)
        state = apply_changes(state, changes)
        lengths, left = state.of(state.lengths, slots), state.of(state.left, slots)
        found = jnp.clip(left - 1, 0, count)
        # The token before the last may be one of its own guesses, which it has not read yet.
        first = lengths[:, None] + jnp.arange(-1, 1, dtype=jnp.int32)[None]
        tokens = state.token_at(slots[:, None], first)
        counts, guesses = jnp.where(found > 0, 2, 0), list[jax.Array]()
        for i in range(count):
            ends = lengths + i + 1
            logits, caches = _pass(
                decoder, caches, state, slots, tokens, ends, counts, windows, implementation
            )
            newest = _sampled(logits[:, -1:], state, slots, rows, kind, vocabulary, first=i)[:, 0]
            guesses.append(jnp.maximum(newest, 0))
            tokens, counts = guesses[-1][:, None], (i + 1 < found).astype(jnp.int32)
        return caches, jnp.stack(guesses, axis=1), found

    held, same = pool_specs(caches, decoder.axes), SAME
    drafted: tuple[Pools, jax.Array, jax.Array]
    drafted = on_mesh(run, decoder, (held, *[same] * 4), (held, same, same))(
        caches, state, slots, changes, rows
    )
    return drafted


@functools.partial(jax.jit, static_argnames=("windows", "implementation"), donate_argnames="caches")
def catch_up(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    slots: jax.Array,
    *,
    windows: Windows,
    implementation: str | None,
) -> Pools:
    """Has a draft model read the token before each text's last one, before a step without guesses.

    That may be its own guess that was right, which it has not read yet; `draft` reads it itself.
    """
    note_traced()

    def run(
        decoder: Decoder | QuantizedDecoder,
        caches: Pools,
        state: State,
        slots: jax.Array,
    ) -> Pools:
        lengths = state.of(state.lengths, slots)
        tokens = state.token_at(slots, jnp.maximum(lengths - 1, 0))[:, None]
        counts = jnp.minimum(lengths, 1)
        _, caches = _pass(
            decoder, caches, state, slots, tokens, lengths, counts, windows, implementation
        )
        return caches

    held, same = pool_specs(caches, decoder.axes), SAME
    read: Pools = on_mesh(run, decoder, (held, same, same), held)(caches, state, slots)
    return read


@functools.partial(
    jax.jit, static_argnames=("windows", "implementation"), donate_argnames=("caches", "state")
)
def verify(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    slots: jax.Array,
    changes: jax.Array,
    guesses: jax.Array,
    found: jax.Array,
    *,
    windows: Windows,
    implementation: str | None,
) -> tuple[Pools, State, jax.Array, jax.Array, jax.Array]:
    """The model's pass over each text's last token and its guesses.

    `slots` and `found`, the number of guesses, are int32 ``[R]``, `guesses` int32 ``[R, k]``;
    `caches` and `state` are donated. Returns the new pools and state; float32 ``[R, k + 1, V]``,
    the logits of what comes after each token; int32 ``[R]``, how many tokens were fed, 0 where a
    request has all that it asked for; int32 ``[]``, how many tokens the pools could not store so
    far, counted in one layer of each group.
    """
    note_traced()

    def run(
        decoder: Decoder | QuantizedDecoder,
        caches: Pools,
        state: State,
        slots: jax.Array,
        changes: jax.Array,
        guesses: jax.Array,
        found: jax.Array,
    ) -> tuple[Pools, State, jax.Array, jax.Array, jax.Array]:
        state = apply_changes(state, changes)
        lengths, left = state.of(state.lengths, slots), state.of(state.left, slots)
        counts = jnp.minimum(found + 1, left)
        last = state.token_at(slots, lengths)
        tokens = jnp.concatenate([last[:, None], jnp.maximum(guesses, 0)], axis=1)
        logits, caches = _pass(
            decoder, caches, state, slots, tokens, lengths + counts, counts, windows, implementation
        )
        return caches, state, logits, counts, count_dropped(decoder, caches, windows)

    held, same = pool_specs(caches, decoder.axes), SAME
    of_logits = vocabulary_of(decoder).spec(3)
    verified: tuple[Pools, State, jax.Array, jax.Array, jax.Array]
    verified = on_mesh(run, decoder, (held, *[same] * 5), (held, same, of_logits, same, same))(
        caches, state, slots, changes, guesses, found
    )
    return verified


@functools.partial(jax.jit, static_argnames=("kind", "vocabulary"), donate_argnames="state")
def accept(
    state: State,
    logits: jax.Array,
    slots: jax.Array,
    guesses: jax.Array,
    counts: jax.Array,
    dropped_tokens: jax.Array,
    rows: SamplingRows,
    *,
    kind: Kind,
    vocabulary: Vocabulary | None = None,
) -> tuple[State, jax.Array]:
    """Accepts guesses as long as they are what is chosen, and chooses one token more.

    `logits`, `counts` and `dropped_tokens` are what `verify` returned, `guesses` int32 ``[R, k]``;
    the `index` of `rows` is ignored, `vocabulary` is as in `sampler.choose`, and `state` is
    donated. Returns the new state and int32 ``[R * (k + 3) + 1]``: for each row how many tokens
    were fed, how many are new, and k + 1 tokens, of which the new ones come first; then
    `dropped_tokens`.
    """
    note_traced()
    given = Vocabulary(logits.shape[2]) if vocabulary is None else vocabulary

    def run(
        state: State,
        logits: jax.Array,
        slots: jax.Array,
        guesses: jax.Array,
        counts: jax.Array,
        dropped_tokens: jax.Array,
        rows: SamplingRows,
    ) -> tuple[State, jax.Array]:
        tokens = _sampled(logits, state, slots, rows, kind, given)
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        right = (tokens[:, :-1] == guesses) & (places[:, 1:] < counts[:, None])
        new = 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
        new = jnp.minimum(new, counts)
        lengths = state.of(state.lengths, slots)
        is_new = places < new[:, None]
        at = jnp.where(is_new, lengths[:, None] + 1 + places, state.history.shape[1])
        state = dataclasses.replace(
            state,
            lengths=state.lengths.at[slots].add(new, mode="drop"),
            history=state.history.at[slots[:, None], at].set(tokens, mode="drop"),
            left=state.left.at[slots].add(-new, mode="drop"),
        )
        numbers = jnp.stack([counts, new], axis=1)
        shown = jnp.concatenate([numbers, jnp.where(is_new, tokens, NOTHING)], axis=1)
        return state, jnp.concatenate([shown.ravel(), dropped_tokens[None]])

    same = SAME
    specs = (same, given.spec(3), *[same] * 5)
    accepted: tuple[State, jax.Array]
    accepted = run_on(run, given.axes, specs, (same, same))(
        state, logits, slots, guesses, counts, dropped_tokens, rows
    )
    return accepted


def _sampled(
    logits: jax.Array,
    state: State,
    slots: jax.Array,
    rows: SamplingRows,
    kind: Kind,
    vocabulary: Vocabulary,
    first: int = 0,
) -> jax.Array:
    """The tokens int32 ``[R, T]`` after each text's last one, or `first` places further on."""
    count, size = logits.shape[:2]
    index = state.of(state.lengths, slots) + 1 - state.of(state.prompts, slots) + first
    index = index[:, None] + jnp.arange(size, dtype=jnp.int32)[None]

    def repeated(x: Array) -> jax.Array:
        return jnp.repeat(jnp.asarray(x), size)

    of_tokens = dataclasses.replace(jax.tree.map(repeated, rows), index=index.ravel())
    flat = logits.reshape(count * size, -1)
    return vocabulary.sample(flat, of_tokens, kind).reshape(count, size)


def _pass(
    decoder: Decoder | QuantizedDecoder,
    caches: Pools,
    state: State,
    slots: jax.Array,
    tokens: jax.Array,
    ends: jax.Array,
    counts: jax.Array,
    windows: Windows,
    implementation: str | None,
) -> tuple[jax.Array, Pools]:
    """Some tokens of each sequence through a model.

    `tokens` is int32 ``[R, T]``, of which the first `counts` int32 ``[R]`` are real; `ends` int32
    ``[R]`` is each sequence's length including these. Returns float32 logits ``[R, T, V]`` of the
    device's part of the vocabulary, and the new pools.
    """
    count, size = tokens.shape
    within = jnp.arange(size, dtype=jnp.int32)[None]
    is_real = (within < counts[:, None]).ravel()
    positions = jnp.maximum(ends - counts, 0)[:, None] + within
    owners = jnp.repeat(slots, size)
    tables = state.tables_of(slots)
    lengths = jnp.where(counts > 0, ends, 0)

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        group = group_of(options.local_window_size, windows)
        pages = pages_at(state, owners, positions.ravel(), cache.page_size)
        cache = append_at(cache, key, value, pages[group], positions.ravel(), is_real)
        static, modifiers = options.complete(query.shape[3], implementation), of_layer(query, sinks)
        _, attend_pages = append_and_attend(cache)
        split = query.reshape(count, size, *query.shape[2:])
        where = tables[group], lengths, counts
        out, _ = attend_pages(split, cache, *where, options=static, modifiers=modifiers)
        return out.reshape(1, count * size, *out.shape[2:]), cache

    attended: Attend = attend
    hidden, caches = decoder.hidden(
        tokens.reshape(1, -1), positions.reshape(1, -1), attended, caches
    )
    return decoder.local_logits(hidden[0]).reshape(count, size, -1), caches
