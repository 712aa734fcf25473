"""Attention over a ring of devices, each of which holds a part of every sequence.

Queries stay; keys and values go round, as what attention multiplies: codes with their scales, which
are made once, or 16-bit numbers. In every step a device sends on what it has got and, meanwhile,
attends to it. In step `i` the keys of device ``d - i`` are on device `d`. Of the pairs of a chunk
of queries and one of keys that meet there, causality and windows leave some (`plan`, static); a
step has as many calls as the device that has most of them, and a step without any is left out: keys
go on to the next one at once. Parts are in float32 with their log-sum-exps and are merged in the
order of the steps, which begin with a device's own keys: the same inputs give the same bits.

In the backward pass keys and values go round once more, as they are, and their gradients with them,
summed in float32 in the order of the steps; after the last one they go home. What travels at a step
is not needed before its end, so that it overlaps with the step's attention.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from turbojax._gradient import refuse_gradients
from turbojax.attention.options import Options, Visibility
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.sinks import sink_gradient, with_sinks
from turbojax.numerics import rows
from turbojax.parallel.zigzag import Order, chunks
from turbojax.remat import ATTENTION_LSE, named_results
from turbojax.sharding.axes import Names

Kind = Literal["full", "diagonal", "masked"]
"""``"full"``: every query sees every key, on all devices; ``"diagonal"``: a chunk meets itself;
``"masked"``: positions decide."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of attention, made by all devices at once.

    For each device: which of its own chunks attends (`queries`), to which of the visiting chunks
    (`keys`), and whether there is such a pair; otherwise it attends to nothing. `kind` says which
    keys are seen.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_real: tuple[bool, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the ring, in which the keys of device ``d - shift`` are on device `d`.

    In the first step each chunk has attended to its own keys before the `calls`, which are in
    order.
    """

    shift: int
    calls: tuple[Call, ...]


def best_order(visibility: Visibility, size: int) -> Order:
    """The order in which all devices have equal work; the natural one if it makes no difference.

    Without a causal mask the work is equal anyway. In a causal window of `w` of `S` tokens each
    query past the first `w` sees `w` keys. Up to half the tokens, zig-zag order would also give
    some device two such chunks: in both orders the most work that a device has is then
    ``1 / (1 - w / (2 S))`` times the mean, 1.05 for a tenth of the tokens and 1.33 for half of
    them. `size` is the tokens of all devices.
    """
    if not visibility.is_causal:
        return "natural"
    window = size if visibility.window is None else visibility.window[0] + 1
    return "natural" if 2 * window <= size else "zigzag"


def plan(order: Order, devices: int, size: int, visibility: Visibility) -> tuple[Step, ...]:
    """The steps of a ring, the first with shift 0; `size` is the tokens of a chunk."""
    held = chunks(order, devices)
    steps = []
    for shift in range(devices):
        calls = _calls(held, shift, size, visibility)
        if calls or shift == 0:
            steps.append(Step(shift, calls))
    return tuple(steps)


def _calls(
    held: tuple[tuple[int, ...], ...], shift: int, size: int, visibility: Visibility
) -> tuple[Call, ...]:
    devices = len(held)
    by_device = []
    for device in range(devices):
        own, visiting = held[device], held[(device - shift) % devices]
        by_device.append(
            [
                (q, k, is_full)
                for q in reversed(range(len(own)))  # the late chunk sees most: it is first
                for k in range(len(visiting))
                for is_any, is_full in [_seen(own[q], visiting[k], size, visibility)]
                if own[q] != visiting[k] and is_any
            ]
        )
    calls = []
    for number in range(max(len(pairs) for pairs in by_device)):
        chosen = [pairs[number] if number < len(pairs) else None for pairs in by_device]
        real = [pair for pair in chosen if pair is not None]
        filled = [real[0] if pair is None else pair for pair in chosen]
        calls.append(
            Call(
                queries=tuple(q for q, _, _ in filled),
                keys=tuple(k for _, k, _ in filled),
                is_real=tuple(pair is not None for pair in chosen),
                kind="full" if all(is_full for _, _, is_full in real) else "masked",
            )
        )
    return tuple(calls)


def _seen(query: int, key: int, size: int, visibility: Visibility) -> tuple[bool, bool]:
    """Whether any query of a chunk sees any key of another, and whether all see all."""
    # The least and the greatest difference of a query's and a key's position.
    apart = (query - key) * size
    least, most = apart - (size - 1), apart + (size - 1)
    if visibility.is_causal and most < 0:
        return False, False
    is_full = least >= 0 or not visibility.is_causal
    if visibility.window is None:
        return True, is_full
    left, right = visibility.window
    return least <= left and -most <= right, is_full and most <= left and -least <= right


_Part = tuple[jax.Array, jax.Array]

Packed = Any
"""A pytree of arrays ``[B, ...]``: keys and values as attention multiplies them."""


class Pair(NamedTuple):
    """Chunks that meet in one call, of `C` tokens each.

    `kind` says which keys are seen, unless positions say more. Lengths of real queries and keys are
    int32 ``[B]``, None if all are. `modifiers` has segments of the chunks and slopes, and the
    offsets of both chunks where `kind` is ``"masked"`` or there are slopes. `levels` of pooled
    attention are ``[B or 1, N or 1, rows, columns]``.
    """

    kind: Kind
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    modifiers: ScoreModifiers
    levels: jax.Array | None = None


Operands = tuple[jax.Array, jax.Array, jax.Array]
"""Query ``[B, C, N, H]``, key and value ``[B, C, K, H]`` of chunks that meet."""


class Op(Protocol):
    """What a ring asks of an op; static under `jit`."""

    @property
    def blocks(self) -> tuple[int, int]:
        """Queries and keys of a block; chunks are whole blocks."""

    @property
    def options(self) -> Options:
        """Of the call."""

    def pack(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> Packed:
        """Keys and values ``[B, C, K, H]`` as they travel in the forward pass."""

    def attend(self, operands: Operands, packed: Packed, pair: Pair) -> _Part:
        """float32 ``[B, C, N, H]`` and the log-sum-exp ``[B, C, N]``, without sinks.

        Key and value only give shapes and dtypes; their content is in `packed`.
        """

    def gradient(
        self, operands: Operands, results: tuple[jax.Array, ...], pair: Pair
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Float32 gradients of query, key and value, and of slopes if there are any.

        `results` are of attention to all keys: the output, the log-sum-exp (``-inf`` for queries
        that see no key at all) and the cotangents of both.
        """


@dataclasses.dataclass(frozen=True)
class Ring:
    """Attention of one op over a ring; static under `jit`. `dtype` is that of the output."""

    op: Op
    axis_name: Names
    order: Order
    steps: tuple[Step, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What a call has besides queries, keys and values; on every device its own part.

    Lengths are int32 ``[B]`` of whole sequences. `modifiers` has segments ``[B, T]`` of this
    device's tokens, slopes and sinks. `levels` are ``[B or 1, N or 1, rows, columns]``: rows of
    this device's queries, in their order, columns of all keys in natural order.
    """

    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    modifiers: ScoreModifiers = NO_MODIFIERS
    levels: jax.Array | None = None


jax.tree_util.register_dataclass(
    Arrays, data_fields=["query_lengths", "key_lengths", "modifiers", "levels"], meta_fields=[]
)


def attend(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Attention of this device's queries to the keys of all; differentiable in reverse mode.

    ``[B, T, N, Hv]`` in the ring's dtype, and the float32 log-sum-exp ``[B, T, N]``.
    """
    differentiate_once = refuse_gradients(
        lambda *saved: _backward(ring, *saved),
        "the gradient of attention over a ring",
        because="only first derivatives are supported",
    )

    @jax.custom_vjp
    def call(*operands: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _forward(ring, *operands)

    def forward(*operands: Any) -> Any:
        out, residual, kept = call(*operands)
        out, kept = named_results(out, kept)
        residual = checkpoint_name(residual, ATTENTION_LSE)
        return (out, residual, kept), (*operands, out, kept)

    def backward(saved: Any, cotangents: Any) -> Any:
        return differentiate_once(*saved, *cotangents[:2])

    call.defvjp(forward, backward)
    out, residual, _ = call(query, key, value, arrays)
    return out, residual


class _Chunks:
    """Which chunks this device has, and how they are cut out of arrays."""

    def __init__(self, ring: Ring, arrays: Arrays, tokens: int) -> None:
        self.ring, self.arrays = ring, arrays
        devices = jax.lax.axis_size(ring.axis_name)
        held = chunks(ring.order, devices)
        self.devices, self.parts = devices, len(held[0])
        self.size = tokens // self.parts
        self.device = jax.lax.axis_index(ring.axis_name)
        self.held = jnp.asarray(held, jnp.int32)

    def numbers(self, shift: int) -> jax.Array:
        """int32 ``[parts]``: the numbers of the chunks that are here after so many steps."""
        return self.held[(self.device - shift) % self.devices]

    def cut(self, x: jax.Array) -> jax.Array:
        """``[B, T, ...]`` as ``[parts, B, C, ...]``."""
        x = x.reshape(x.shape[0], self.parts, self.size, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        x = jnp.swapaxes(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def sent(self, x: Any, by: int) -> Any:
        """What device ``d - by`` has, on device `d`."""
        moves = [(d, (d + by) % self.devices) for d in range(self.devices)]
        return jax.tree.map(lambda y: jax.lax.ppermute(y, self.ring.axis_name, moves), x)

    def number(self, table: tuple[int, ...]) -> int | jax.Array:
        """This device's entry."""
        if len(set(table)) == 1:
            return table[0]
        return jnp.asarray(table, jnp.int32)[self.device]

    def lengths(self, lengths: jax.Array | None, number: jax.Array) -> jax.Array | None:
        """int32 ``[B]``: real tokens of a chunk."""
        if lengths is None:
            return None
        return jnp.clip(lengths - number * self.size, 0, self.size)


def take(x: jax.Array, index: int | jax.Array) -> jax.Array:
    """``x[index]``."""
    if isinstance(index, int):
        return x[index]
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def put(x: jax.Array, index: int | jax.Array, change: jax.Array) -> jax.Array:
    """`x` with `change` at an index of its first axis."""
    return jax.lax.dynamic_update_index_in_dim(x, change, index, 0)


def folded(x: Any) -> Any:
    """Arrays ``[parts, B, ...]`` as ``[parts * B, ...]``."""
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), x)


def _unfolded(x: Any, parts: int) -> Any:
    return jax.tree.map(lambda y: y.reshape(parts, -1, *y.shape[1:]), x)


def _own_pair(here: _Chunks, batch: int) -> Pair:
    """Each chunk with itself: all in one call, as if they were of different sequences."""
    arrays, numbers = here.arrays, here.numbers(0)

    def lengths(of_all: jax.Array | None) -> jax.Array | None:
        if of_all is None:
            return None
        return jnp.clip(of_all[None] - numbers[:, None] * here.size, 0, here.size).reshape(-1)

    modifiers = arrays.modifiers
    queries, keys = modifiers.query_segment_ids, modifiers.key_value_segment_ids
    levels = None
    if arrays.levels is not None:
        table = [_levels(here, i, numbers[i]) for i in range(here.parts)]
        table = [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in table]
        levels = jnp.concatenate(table) if here.parts > 1 else table[0]
    return Pair(
        "diagonal",
        lengths(arrays.query_lengths),
        lengths(arrays.key_lengths),
        ScoreModifiers(
            query_segment_ids=None if queries is None else folded(here.cut(queries)),
            key_value_segment_ids=None if keys is None else folded(here.cut(keys)),
            alibi_slopes=modifiers.alibi_slopes,
        ),
        levels,
    )


def _pair(here: _Chunks, step: Step, call: Call, segments: Any, batch: int) -> Pair:
    """The chunks of one call of a step; the keys' segments are ``[parts, B, C]``."""
    arrays, modifiers = here.arrays, here.arrays.modifiers
    q, k = here.number(call.queries), here.number(call.keys)
    of_queries, of_keys = take(here.numbers(0), q), take(here.numbers(step.shift), k)
    key_lengths = here.lengths(arrays.key_lengths, of_keys)
    if not all(call.is_real):
        there = jnp.asarray(call.is_real)[here.device]
        whole = jnp.full(batch, here.size, jnp.int32)
        key_lengths = jnp.where(there, whole if key_lengths is None else key_lengths, 0)
    offsets: dict[str, Any] = {}
    if call.kind == "masked" or modifiers.alibi_slopes is not None:
        for name, number in (("query_offset", of_queries), ("key_offset", of_keys)):
            offsets[name] = jnp.broadcast_to(number * here.size, (batch,))
    if modifiers.query_segment_ids is not None:
        offsets["query_segment_ids"] = take(here.cut(modifiers.query_segment_ids), q)
        offsets["key_value_segment_ids"] = take(segments, k)
    return Pair(
        call.kind,
        here.lengths(arrays.query_lengths, of_queries),
        key_lengths,
        ScoreModifiers(alibi_slopes=modifiers.alibi_slopes, **offsets),
        None if arrays.levels is None else _levels(here, q, of_keys),
    )


def _levels(here: _Chunks, query_chunk: int | jax.Array, key_chunk: jax.Array) -> jax.Array:
    """The levels of one chunk of this device's queries and one of all keys."""
    op, levels = here.ring.op, here.arrays.levels
    assert levels is not None
    count, columns = (here.size // block for block in op.blocks)
    of_rows = jax.lax.dynamic_slice_in_dim(levels, query_chunk * count, count, axis=2)
    return jax.lax.dynamic_slice_in_dim(of_rows, key_chunk * columns, columns, axis=3)


def _merged(state: _Part, part: _Part) -> _Part:
    """Outputs and log-sum-exps of attention to two parts of the keys, in this order.

    ``lse' = log(exp(lse) + exp(lse_p))`` and ``o' = o exp(lse - lse') + o_p exp(lse_p - lse')``.
    """
    largest = jnp.maximum(state[1], part[1])
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(state[1] - largest), jnp.exp(part[1] - largest)
    total = weights[0] + weights[1]
    nothing = total == 0
    safe = jnp.where(nothing, 1, total)
    # A part that saw nothing has no weight, and is 0.
    out = state[0] * (weights[0] / safe)[..., None] + part[0] * (weights[1] / safe)[..., None]
    return out, jnp.where(nothing, -jnp.inf, largest + jnp.log(safe))


def _with_part(states: list[_Part], part: _Part, index: int | jax.Array) -> list[_Part]:
    """The states of all chunks of queries, one of them merged with another part of the keys."""
    if isinstance(index, int):
        return [_merged(x, part) if i == index else x for i, x in enumerate(states)]
    # All other chunks get a part that saw nothing: one pass over each, without branches.
    return [
        _merged(x, (jnp.where(index == i, part[0], 0.0), jnp.where(index == i, part[1], -jnp.inf)))
        for i, x in enumerate(states)
    ]


def _forward(
    ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, arrays: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`attend`, and the log-sum-exp as the backward pass needs it: ``-inf`` without a key."""
    here, op, batch = _Chunks(ring, arrays, query.shape[1]), ring.op, query.shape[0]
    q, k, v = (here.cut(x) for x in (query, key, value))
    pair = _own_pair(here, batch)
    packed = op.pack(folded(k), folded(v), pair.key_lengths)
    own = _unfolded(op.attend((folded(q), folded(k), folded(v)), packed, pair), here.parts)
    states = list(zip(*own, strict=True))
    segments = arrays.modifiers.key_value_segment_ids
    visiting: Any = (
        _unfolded(packed, here.parts),
        None if segments is None else here.cut(segments),
    )
    following = [*ring.steps[1:], None]
    for step, after in zip(ring.steps, following, strict=True):
        coming = None if after is None else here.sent(visiting, after.shift - step.shift)
        for call in step.calls:
            pair = _pair(here, step, call, visiting[1], batch)
            i, j = here.number(call.queries), here.number(call.keys)
            chunk = jax.tree.map(lambda x, j=j: take(x, j), visiting[0])
            part = op.attend((take(q, i), k[0], v[0]), chunk, pair)
            states = _with_part(states, part, i)
        if after is not None:
            # Merged now: if XLA fused this with later merges, all parts would be kept until then.
            states = jax.lax.optimization_barrier(states)
        visiting = coming
    out, residual = (here.joined(jnp.stack(x)) for x in zip(*states, strict=True))
    return _with_sinks(here, out, residual)


def _with_sinks(
    here: _Chunks, out: jax.Array, residual: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    sinks = here.arrays.modifiers.sinks
    dtype = here.ring.dtype
    if sinks is None:
        return out.astype(dtype), residual, residual
    with_them, total = with_sinks(out, residual, sinks, _real(here, out))
    return with_them.astype(dtype), total, jnp.where(residual == -jnp.inf, -jnp.inf, total)


def _real(here: _Chunks, x: jax.Array) -> jax.Array:
    """Which of the queries ``[B, T, ...]`` are no padding: bool ``[B, T]``."""
    if here.arrays.query_lengths is None:
        return jnp.ones(x.shape[:2], bool)
    places = here.numbers(0)[:, None] * here.size + jnp.arange(here.size, dtype=jnp.int32)[None]
    return places.reshape(1, -1) < here.arrays.query_lengths[:, None]


def _backward(
    ring: Ring,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: Arrays,
    out: jax.Array,
    residual: jax.Array,
    d_out: jax.Array,
    d_residual: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Arrays]:
    """Gradients of the operands of `_forward`; see this module."""
    here, op, batch = _Chunks(ring, arrays, query.shape[1]), ring.op, query.shape[0]
    of_rows = (query, out, residual, d_out, d_residual)
    q, *results = (here.cut(x) for x in of_rows)
    k, v = here.cut(key), here.cut(value)
    whole = (folded(q), folded(k), folded(v))
    own = op.gradient(whole, tuple(folded(results)), _own_pair(here, batch))
    d_q, *d_visiting = _unfolded(own[:3], here.parts)
    d_slopes = own[3]
    segments = arrays.modifiers.key_value_segment_ids
    visiting: Any = (k, v, None if segments is None else here.cut(segments))
    following = [*ring.steps[1:], None]
    for step, after in zip(ring.steps, following, strict=True):
        coming = None if after is None else here.sent(visiting, after.shift - step.shift)
        for call in step.calls:
            pair = _pair(here, step, call, visiting[2], batch)
            i, j = here.number(call.queries), here.number(call.keys)
            of_call = tuple(take(x, i) for x in results)
            operands = (take(q, i), take(visiting[0], j), take(visiting[1], j))
            d = op.gradient(operands, of_call, pair)
            d_q = put(d_q, i, take(d_q, i) + d[0])
            d_visiting = [
                put(x, j, take(x, j) + y) for x, y in zip(d_visiting, d[1:3], strict=True)
            ]
            if d_slopes is not None and d[3] is not None:
                d_slopes = d_slopes + d[3]
        by = -step.shift if after is None else after.shift - step.shift
        d_visiting = here.sent(d_visiting, by) if by else d_visiting
        visiting = coming
    d_sinks = None
    if arrays.modifiers.sinks is not None:
        d_sinks = _of_sinks(here, out, residual, d_out, d_residual)
    d_k, d_v = d_visiting
    return (
        here.joined(d_q).astype(query.dtype),
        here.joined(d_k).astype(key.dtype),
        here.joined(d_v).astype(value.dtype),
        Arrays(modifiers=ScoreModifiers(alibi_slopes=d_slopes, sinks=d_sinks)),
    )


def _of_sinks(
    here: _Chunks, out: jax.Array, residual: jax.Array, d_out: jax.Array, d_residual: jax.Array
) -> jax.Array:
    """This device's share of the sinks' gradient."""
    sinks = here.arrays.modifiers.sinks
    assert sinks is not None
    d_out = rows.without_blind(d_out, residual)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_residual
    total = jnp.where(residual == -jnp.inf, sinks[None, None], residual)
    return sink_gradient(total, sinks, delta, _real(here, out))
