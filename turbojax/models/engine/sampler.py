"""Choosing the next tokens of rows that want more than the largest logit.

The engine's model step writes the argmax of every row's logits into the history itself. Where a row
wants something else, the program of this module runs next, reads the logits and overwrites that
token. The host knows what the rows want (`wanted_of`), so each case is a program of its own and the
host reads nothing in between.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.models.engine.placement import SAME, Vocabulary, run_on
from turbojax.models.engine.programs import note_traced
from turbojax.models.engine.requests import MOST_LOGPROBS, Request, TokenLogprobs
from turbojax.models.generation.constraints import WORD, words_of
from turbojax.models.generation.sampling import (
    NO_PENALTIES,
    NOTHING,
    Array,
    Kind,
    SamplingRows,
    kind_of,
    sample,
)

_FEWEST_BIASES, _BUCKET_RATIO = 16, 8
"""Sizes of a row's bias are 16, 128, 1,024 ..: a few programs for any number of entries."""


class Wanted(NamedTuple):
    """What the rows of a step want at most: a static argument, so each value makes another program.

    A tuple for the same reason as `programs.PromptProgram`. `bias` is the size of the arrays of
    logit biases, one of a few, or 0 for none; `mask` says that a row has a constraint.
    """

    kind: Kind = "greedy"
    penalties: bool = False
    bias: int = 0
    mask: bool = False
    logprobs: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the largest logit is wanted."""
        return self == Wanted()

    @property
    def usual(self) -> "Wanted":
        """A value that covers this one; there are few, so their programs can be compiled ahead."""
        if not (self.penalties or self.mask or self.logprobs or self.bias):
            return self
        return self._replace(kind="restrict", penalties=True, logprobs=True)


USUAL = (
    Wanted("draw"),
    Wanted("restrict"),
    Wanted("restrict", penalties=True, logprobs=True),
    Wanted("restrict", penalties=True, mask=True, logprobs=True),
)
"""What `Device.compile` prepares for: covers most requests that want more than the argmax."""


def wanted_of(requests: Iterable[Request]) -> Wanted:
    """What these requests want together."""
    requests = tuple(requests)
    return Wanted(
        kind=kind_of(request.sampling for request in requests),
        penalties=any(request.penalties != NO_PENALTIES for request in requests),
        bias=_bucket(max((len(request.logit_bias) for request in requests), default=0)),
        mask=any(request.constraint is not None for request in requests),
        logprobs=any(request.logprobs is not None for request in requests),
    )


def _bucket(count: int) -> int:
    """The smallest of a few sizes that holds so many entries."""
    size = _FEWEST_BIASES if count else 0
    while size < count:
        size *= _BUCKET_RATIO
    return size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsProcessors:
    """What O rows want besides sampling, by `Wanted`; None for what no row wants.

    A row that wants nothing has penalties 1, 0, 0, no bias and a mask of ones.

    Attributes:
      penalties: float32 ``[O, 3]``: repetition, presence and frequency, see `Penalties`.
      bias_tokens: int32 ``[O, B]``, no token twice in a row; V where there is no entry.
      bias_values: float32 ``[O, B]``, finite or -inf.
      masks: uint32 ``[O, ceil(V / 32)]``, see `ConstraintState.allowed`.
    """

    penalties: Array | None
    bias_tokens: Array | None
    bias_values: Array | None
    masks: Array | None

    def set(self, row: int, request: Request, allowed: np.ndarray | None = None) -> None:
        """Fills in one row, which was as `no_processors` made it; the arrays must be numpy's.

        `allowed` is what `ConstraintState.allowed` returns now; None without a constraint. Raises
        TypeError if it is no array of uint32, and ValueError if it does not fit a row of `masks`,
        if only one of it and a constraint is given, or if the request wants what these rows do not
        hold.
        """
        self._check_holds(request)
        if (request.constraint is None) != (allowed is None):
            raise ValueError(
                f"allowed is {'None' if allowed is None else 'given'}, must be given exactly "
                f"where there is a constraint, which is {request.constraint!r}"
            )
        given = request.penalties
        if self.penalties is not None and given != NO_PENALTIES:
            self.penalties[row] = given.repetition, given.presence, given.frequency
        if request.logit_bias and self.bias_tokens is not None and self.bias_values is not None:
            count = len(request.logit_bias)
            self.bias_tokens[row, :count] = tuple(request.logit_bias)
            self.bias_values[row, :count] = tuple(request.logit_bias.values())
        if self.masks is not None and allowed is not None:
            if (kind := getattr(allowed, "dtype", type(allowed).__name__)) != np.uint32:
                raise TypeError(f"allowed is of {kind}, must be an array of uint32")
            words = self.masks.shape[1]
            if allowed.ndim != 1 or allowed.size > words:
                raise ValueError(f"{allowed.shape=} must be ({words},), or less")
            # A model's table may be padded with tokens that a tokenizer does not have.
            self.masks[row, : allowed.size] = allowed
            self.masks[row, allowed.size :] = 0

    def _check_holds(self, request: Request) -> None:
        """Raises ValueError unless these rows have a place for all that a request wants."""
        room = 0 if self.bias_tokens is None else self.bias_tokens.shape[1]
        for name, missing in (
            ("penalties", self.penalties is None and request.penalties != NO_PENALTIES),
            ("logit_bias", len(request.logit_bias) > room),
            ("constraint", self.masks is None and request.constraint is not None),
        ):
            if missing:
                raise ValueError(f"{name}={getattr(request, name)!r} must be among what is wanted")


def no_processors(count: int, vocab_size: int, wanted: Wanted) -> LogitsProcessors:
    """Rows that want nothing, with numpy arrays for what is wanted, to be filled in."""
    biases = (count, wanted.bias)
    words = (count, words_of(vocab_size))
    plain = dataclasses.astuple(NO_PENALTIES)
    return LogitsProcessors(
        penalties=np.tile(np.array(plain, np.float32), (count, 1)) if wanted.penalties else None,
        bias_tokens=np.full(biases, vocab_size, np.int32) if wanted.bias else None,
        bias_values=np.zeros(biases, np.float32) if wanted.bias else None,
        masks=np.full(words, 0xFFFFFFFF, np.uint32) if wanted.mask else None,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The next tokens of O rows, and their log-probabilities where these are wanted.

    Attributes:
      tokens: int32 ``[O]``; `NOTHING` where there is none.
      logprobs: float32 ``[O]``, of `tokens`; NaN for `NOTHING`.
      top_tokens: int32 ``[O, MOST_LOGPROBS]``, the most likely tokens, most likely first; of
        equally likely ones the smaller first; -1 after the last token of a small vocabulary.
      top_logprobs: float32 ``[O, MOST_LOGPROBS]``, of `top_tokens`.
    """

    tokens: Array
    logprobs: Array | None = None
    top_tokens: Array | None = None
    top_logprobs: Array | None = None

    def logprobs_of(self, row: int, count: int) -> TokenLogprobs:
        """One row's log-probabilities as a request gets them; the arrays should be numpy's.

        A small vocabulary has fewer than `count` tokens.
        """
        if self.logprobs is None or self.top_tokens is None or self.top_logprobs is None:
            raise ValueError("logprobs of these tokens are None, must have been wanted")
        tokens, values = self.top_tokens[row, :count], self.top_logprobs[row, :count]
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return TokenLogprobs(float(self.logprobs[row]), tuple(p for p in pairs if p[0] >= 0))


@functools.partial(jax.jit, static_argnames=("wanted", "vocabulary"), donate_argnames="history")
def choose(
    logits: jax.Array,
    history: jax.Array,
    lengths: Array,
    prompts: Array,
    slots: Array,
    rows: SamplingRows,
    processors: LogitsProcessors,
    *,
    wanted: Wanted,
    vocabulary: Vocabulary | None = None,
) -> tuple[jax.Array, Chosen]:
    """The next token of every row, written behind the tokens that its slot has.

    Log-probabilities are those of `logits` float32 ``[O, V]``. These are then changed by bias,
    penalties and masks, in this order, and tokens are chosen from the result, see `sample`. A row's
    result depends only on the row and on its slot's tokens, not on which `wanted` that covers the
    row is used.

    `history` is int32 ``[S, L]`` and donated: the tokens of each slot, followed by numbers that
    mean nothing. `lengths` int32 ``[S]`` counts the tokens in each slot's pages after this step,
    `prompts` int32 ``[S]`` those of them that are the prompt's. `slots` int32 ``[O]`` has each
    row's slot, none twice; S where a row means nothing. The `index` of `rows` is ignored.
    `processors` are those of `no_processors` for the same `wanted`. Without `vocabulary` the logits
    are on one device.

    Returns the new history, where ``history[slot, lengths[slot]]`` is the row's token if there is
    room, and what was chosen: `NOTHING` where a logit is NaN or no token is left.
    """
    note_traced()
    _check_processors(processors, wanted)
    given = Vocabulary(logits.shape[1]) if vocabulary is None else vocabulary

    def run(
        logits: jax.Array,
        history: jax.Array,
        lengths: Array,
        prompts: Array,
        slots: Array,
        rows: SamplingRows,
        processors: LogitsProcessors,
    ) -> tuple[jax.Array, Chosen]:
        changed = logits = given.gathered(logits)
        if processors.bias_tokens is not None and processors.bias_values is not None:
            changed = biased(changed, processors.bias_tokens, processors.bias_values)
        held = jnp.asarray(lengths).at[slots].get(mode="fill", fill_value=0)
        prompt = jnp.asarray(prompts).at[slots].get(mode="fill", fill_value=0)
        # The host may not know yet how many new tokens there are.
        rows = dataclasses.replace(rows, index=held - prompt)
        if processors.penalties is not None:
            of_rows = history.at[slots].get(mode="fill", fill_value=0)
            changed = penalized(changed, of_rows, held, prompt, processors.penalties)
        if processors.masks is not None:
            changed = masked(changed, processors.masks)
        if changed is not logits:
            # What follows is compiled as for logits that come from outside, and has the same bits.
            changed = jax.lax.optimization_barrier(changed)
        tokens = sample(changed, rows, wanted.kind)
        history = history.at[slots, held].set(tokens, mode="drop")
        if not wanted.logprobs:
            return history, Chosen(tokens)
        return history, Chosen(tokens, *logprobs(logits, tokens))

    specs = (given.spec(2), *[SAME] * 6)
    chosen: tuple[jax.Array, Chosen]
    chosen = run_on(run, given.axes, specs, (SAME, SAME))(
        logits, history, lengths, prompts, slots, rows, processors
    )
    return chosen


def _check_processors(processors: LogitsProcessors, wanted: Wanted) -> None:
    bias = 0 if processors.bias_tokens is None else processors.bias_tokens.shape[1]
    there = processors.penalties is not None, bias, processors.masks is not None
    if there != (wanted.penalties, wanted.bias, wanted.mask):
        raise ValueError(f"processors with penalties, bias, masks = {there} must fit {wanted}")


def biased(logits: jax.Array, tokens: Array, values: Array) -> jax.Array:
    """Logits float32 ``[O, V]`` plus the bias of some tokens.

    `tokens` and `values` are those of `LogitsProcessors`; -inf forbids a token even if its logit is
    +inf. NaN stays NaN, and all other logits keep their bits.
    """
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    old = logits.at[row, tokens].get(mode="fill", fill_value=0)
    # inf - inf would be NaN.
    new = jnp.where((values == -jnp.inf) & ~jnp.isnan(old), -jnp.inf, old + values)
    return logits.at[row, tokens].set(new, mode="drop")


def penalized(
    logits: jax.Array, history: jax.Array, lengths: Array, prompts: Array, penalties: Array
) -> jax.Array:
    """Logits float32 ``[O, V]`` after `Penalties` on tokens that were there before.

    `history` is int32 ``[O, L]``, the rows' tokens. `lengths` and `prompts` are int32 ``[O]``: how
    many of these mean something, and how many belong to the prompt. Logits of tokens that were not
    there, and those of rows without penalties, keep their bits.
    """
    size, places = logits.shape[1], jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    # `NOTHING` may be there, where the host does not know yet that the text failed.
    there = (places < lengths[:, None]) & (history >= 0)
    of_result = there & (places >= prompts[:, None])
    seen = jnp.zeros(logits.shape, jnp.bool_)
    seen = seen.at[row, jnp.where(there, history, size)].set(True, mode="drop")
    counts = jnp.zeros(logits.shape, jnp.int32)
    counts = counts.at[row, jnp.where(of_result, history, size)].add(1, mode="drop")
    repetition, presence, frequency = (penalties[:, i, None] for i in range(3))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    # A repetition of 1 changes no bits by itself, but a compiler may.
    changed = jnp.where(seen & (repetition != 1), repeated, logits)
    less = presence + frequency * counts.astype(jnp.float32)
    return jnp.where((counts > 0) & (less != 0), changed - less, changed)


def masked(logits: jax.Array, masks: Array) -> jax.Array:
    """Logits float32 ``[O, V]`` with -inf where `LogitsProcessors.masks` allows no token.

    NaN stays NaN: it says that something is wrong with the whole row.
    """
    bits = jnp.asarray(masks)[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]
    allowed = (bits & jnp.uint32(1)).astype(jnp.bool_)
    allowed = allowed.reshape(logits.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)


def logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of tokens, and the most likely tokens with theirs, see `Chosen`.

    `tokens` is int32 ``[O]``. Where one of a row's logits ``[O, V]`` is NaN, all its
    log-probabilities are NaN; where one is +inf, those of the other tokens are -inf.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)

    def shifted(x: jax.Array) -> jax.Array:
        # As in `sample`: differences to infinity are no NaN.
        return jnp.where(x == largest, jnp.zeros_like(x), x - largest)

    total = jnp.log(jnp.sum(jnp.exp(shifted(logits)), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)
    of_tokens = jnp.where(tokens == NOTHING, jnp.nan, (shifted(chosen) - total)[:, 0])
    values, top = most_likely(logits, min(MOST_LOGPROBS, logits.shape[1]))
    missing = ((0, 0), (0, MOST_LOGPROBS - top.shape[1]))
    top_tokens = jnp.pad(top, missing, constant_values=-1)
    of_top = jnp.pad(shifted(values) - total, missing, constant_values=-np.inf)
    return of_tokens, top_tokens, of_top


def most_likely(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits as `lax.top_k` orders them, without sorting all of a row.

    A row is cut into chunks, and only the `count` chunks with the largest maxima are searched:
    every token of another chunk comes after `count` tokens of these, as among equal logits the
    smaller token comes first. The size of the chunks makes both searches equally long.

    `logits` are float32 ``[O, V]`` and `count` is at most V. Returns values float32 ``[O, count]``
    and their tokens int32; they mean nothing for a row with NaN.
    """
    size = max(1, math.isqrt(logits.shape[1] // count))
    chunks = -(-logits.shape[1] // size)
    padding = ((0, 0), (0, chunks * size - logits.shape[1]))
    cut = jnp.pad(logits, padding, constant_values=-np.inf).reshape(-1, chunks, size)
    _, best = jax.lax.top_k(jnp.max(cut, axis=-1), count)
    best = jnp.sort(best.astype(jnp.int32), axis=-1)  # the smaller tokens first
    within = jnp.arange(size, dtype=jnp.int32)[None, None]
    tokens = (best[:, :, None] * size + within).reshape(-1, count * size)
    looked_at = jnp.take_along_axis(cut, best[:, :, None], axis=1).reshape(-1, count * size)
    values, place = jax.lax.top_k(looked_at, count)
    return values, jnp.take_along_axis(tokens, place.astype(jnp.int32), axis=-1)
