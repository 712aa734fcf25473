"""Prefill attention on quantized operands (TurboAttention, Algorithm 1), for Hopper.

Roofline, for 2 sequences of 8,192 tokens, 32 query heads on 8 of 128 channels, not causal: 2.2 T
operations, 1.11 ms at the 1,980 T/s of an H100's 8-bit matrix units; the exponentials and the 8
instructions for each score take as long, bytes 0.08 ms. Three units are equally busy, so they must
work at the same time. Target: 900 T/s. Seen on an H200, kernel alone: fp8 906, causal 959, int8_fp8
883 and 920, cuDNN on e4m3 917 and 860. What bounds it: the turns of two warpgroups at the
exponentials, 855 cycles each of which the unit needs 512, and 5,000 cycles a tile beside its steps.

A program takes tiles of 128 queries of one head in turn. One warpgroup copies queries, keys and
values to shared memory, and quantizes queries that came as they are; two attend with 64 queries
each, with head dim 64 three.

Roofline in full and versions: `docs/kernels/attention.md`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic import pipeline, quantize, schedule, softmax
from pallas_kernels.mosaic.hopper import segments as packing
from pallas_kernels.mosaic.hopper.segments import Segments
from pallas_kernels.mosaic.hopper.tiles import Settings, Span, Work
from pallas_kernels.mosaic.pipeline import COLUMN, ROW, ROWS, SCALAR
from pallas_kernels.mosaic.products import wgmma
from pallas_kernels.mosaic.softmax import Exponential

__all__ = ["Exponential", "Segments", "Settings", "attention"]

_MATRIX = plgpu.Layout.WGMMA
# Whether ids are compared only in tiles with several segments: twice the code of a masked tile.
_SPLITS = True
# A number for each of a warpgroup's rows.
_COLUMN = pipeline.array((ROWS,), jnp.float32, ROW)
# Tiles whose queries are in shared memory: this one's and the next one's.
_QUERY_SLOTS = 2
# Channels whose sums and products fit together into the registers.
_PART = 128
# Registers of a thread that attends and of one that copies, by how many warpgroups attend.
_REGISTERS = {2: (240, 24), 3: (160, 32)}


class _Found(NamedTuple):
    """What attending to a tile gives; `ahead` as in `_Consumer`, of the next tile."""

    parts: tuple[jax.Array, ...]  # unnormalized outputs, in parts of the channels
    maxima: jax.Array
    sums: jax.Array
    slot: jax.Array  # the one after the last
    ahead: tuple[jax.Array, ...] = ()


class _Inputs(NamedTuple):
    """What the kernel reads, see `attention`; `q_scale` is None if the kernel quantizes queries.

    With segments: `query_ids` ``[B, tiles, consumers, 64]``, `key_ids` ``[B, Sp]`` in the order of
    the keys, `bounds` ``[B, 4, tiles]`` (`segments.Bounds`), `order` ``[B * tiles]``
    (`segments.order`). With `own`, int32 ``[B, tiles, 2, consumers, 64]``, which say from which key
    each query sees, and up to which, the last two as well. `bias` is ``[B or 1, N or 1, T or 1,
    S]``, `S` rounded up to `biases.MULTIPLE`, and `table` that of `schedule.causal`.
    """

    q: Ref
    k: Ref
    k_scale: Ref
    v: Ref
    v_scale: Ref
    query_lengths: Ref
    key_lengths: Ref
    q_scale: Ref | None = None
    shifts: Ref | None = None
    query_ids: Ref | None = None
    key_ids: Ref | None = None
    bounds: Ref | None = None
    order: Ref | None = None
    own: Ref | None = None
    sinks: Ref | None = None
    slopes: Ref | None = None
    bias: Ref | None = None
    table: Ref | None = None


class _Memory(NamedTuple):
    """Shared memory, and the barriers of its slots.

    If the kernel quantizes queries, they are copied to `raw`, and `q_scale` has the scales of each
    slot, after what `quantize` keeps there.
    """

    q: Ref
    k: Ref
    v: Ref
    out: Ref
    lse: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    q_free: Ref
    k_free: Ref
    v_free: Ref
    raw: Ref | None = None
    raw_ready: Ref | None = None
    q_scale: Ref | None = None
    tensor_core_order: Ref | None = None
    query_ids: Ref | None = None
    key_ids: Ref | None = None
    own: Ref | None = None


def _copy_ids(work: Work, place: jax.Array, x: _Inputs, y: _Memory) -> None:
    """Copies the segments of a tile's queries, or the bounds of their keys."""
    for ref, target in ((x.query_ids, y.query_ids), (x.own, y.own)):
        if ref is not None:
            assert target is not None
            source = ref.at[work.b, work.tile]
            plgpu.copy_gmem_to_smem(source, target.at[place], y.q_ready.at[place])


def _copy_queries(work: Work, place: jax.Array, x: _Inputs, y: _Memory, s: Settings) -> None:
    """Copies a tile's codes of queries to shared memory, as room comes free."""
    plgpu.barrier_wait(y.q_free.at[place])
    for i in range(s.consumers):
        rows = pl.ds(work.first + i * ROWS, ROWS)
        source = x.q.at[work.b, work.head, rows]
        plgpu.copy_gmem_to_smem(source, y.q.at[place, i], y.q_ready.at[place])
    _copy_ids(work, place, x, y)


def _copy_raw(work: Work, x: _Inputs, y: _Memory, s: Settings) -> None:
    """Copies a tile's queries that are not quantized yet."""
    assert y.raw is not None
    assert y.raw_ready is not None
    source = x.q.at[work.b, pl.ds(work.first, s.rows), work.head]
    plgpu.copy_gmem_to_smem(source, y.raw, y.raw_ready)


def _quantize_queries(work: Work, place: jax.Array, x: _Inputs, y: _Memory, s: Settings) -> None:
    """Quantizes the queries that were copied last, once there is room."""
    assert y.raw is not None
    assert y.raw_ready is not None
    assert y.q_scale is not None
    tile = quantize.Tile(
        s.rows, y.raw.shape[1], s.block_q, y.raw.dtype.name, is_int8=y.q.dtype == jnp.int8
    )
    plgpu.barrier_wait(y.raw_ready)
    plgpu.barrier_wait(y.q_free.at[place])
    _copy_ids(work, place, x, y)
    plain, codes = plgpu.RefType(), y.q.at[place]
    pipeline.inline(
        functools.partial(quantize.quantize, tile=tile),
        (plain, pipeline.tile_type(codes), plain, SCALAR, SCALAR),
    )(y.raw, codes, y.q_scale, place, work.query_length - work.first)
    plgpu.commit_smem()
    plgpu.barrier_arrive(y.q_ready.at[place])


def _copy_keys(work: Work, slot: jax.Array, x: _Inputs, y: _Memory, s: Settings) -> jax.Array:
    """Copies a tile's keys and values to shared memory as room comes free; the next slot."""

    def block(j: jax.Array, slot: jax.Array) -> jax.Array:
        tokens = pl.ds(j * s.tile, s.tile)
        plgpu.barrier_wait(y.k_free.at[slot])
        source = x.k.at[work.b, work.h, tokens]
        plgpu.copy_gmem_to_smem(source, y.k.at[slot], y.k_ready.at[slot])
        if x.key_ids is not None:
            assert y.key_ids is not None
            source = x.key_ids.at[work.b, tokens]
            plgpu.copy_gmem_to_smem(source, y.key_ids.at[slot], y.k_ready.at[slot])
        plgpu.barrier_wait(y.v_free.at[slot])
        source = x.v.at[work.b, work.h, slice(None), tokens]
        plgpu.copy_gmem_to_smem(source, y.v.at[slot], y.v_ready.at[slot])
        return pipeline.next_slot(slot, s.stages)

    return lax.fori_loop(work.blocks.begin, work.blocks.end, block, slot)


def _start_scores(q: Ref, k: Ref, s: Settings) -> jax.Array:
    dtype = jnp.float32 if s.mode == "fp8" else jnp.int32
    swizzle = pipeline.swizzle_of(k.shape[-1], k.dtype)

    def f(q: Any, k: Any) -> Any:
        return wgmma.start(q, k, swizzle=swizzle, a_swizzle=swizzle)

    types = (pipeline.tile_type(q), pipeline.tile_type(k))
    return pipeline.inline(f, types, pipeline.array((ROWS, s.tile), dtype))(q, k)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """What the steps of one warpgroup share; a block is a tile of keys.

    `first` is the position of the first query relative to that of the first key, `ids` are the
    segments of its queries and of the keys in each slot, `own` the bounds of its queries' keys, and
    `slope` is the head's. `bias` is with the number of the head's first row and the first query's.
    `ahead` has the products of the first block, if they are on their way already, and `start_next`
    starts those of the program's next tile, whose first keys come to a slot.
    """

    q: Ref
    buffers: tuple[Ref, Ref]
    ready: tuple[Ref, Ref]
    free: tuple[Ref, Ref]
    query_free: Ref
    scales: tuple[Ref, Ref]
    at: tuple[jax.Array, jax.Array]
    factor: jax.Array
    first: jax.Array
    length: jax.Array
    blocks: Span
    ping_pong: pipeline.PingPong
    s: Settings
    ids: tuple[Ref, Ref] | None = None
    segments: packing.Bounds | None = None
    slope: jax.Array | None = None
    own: tuple[Ref, Ref] | None = None
    bias: tuple[Ref, jax.Array, jax.Array] | None = None
    ahead: tuple[jax.Array, ...] = ()
    start_next: Callable[[jax.Array], jax.Array] | None = None

    def wait_for_key(self, j: jax.Array, slot: jax.Array) -> None:
        """Waits until the keys of block `j`, if it exists, are in shared memory."""

        @pl.when(j < self.blocks.end)
        def _() -> None:
            plgpu.barrier_wait(self.ready[0].at[slot])

    def scores(self, slot: jax.Array) -> jax.Array:
        """Starts the first product of a block."""
        return _start_scores(self.q, self.buffers[0].at[slot], self.s)

    def output(self, p: jax.Array, slot: jax.Array, part: int | None = None) -> jax.Array:
        """Starts the second product of a block, or of a part of the channels."""
        v = self.buffers[1].at[slot]
        if part is not None:
            v = v.at[pl.ds(part * _PART, _PART)]
        dtype = jnp.int32 if self.s.mode == "int8" else jnp.float32
        swizzle = pipeline.swizzle_of(v.shape[-1], v.dtype)

        def f(p: Any, v: Any) -> Any:
            return wgmma.start(p, v, swizzle=swizzle)

        types = (plgpu.Layout.WGMMA_8BIT, pipeline.tile_type(v))
        return pipeline.inline(f, types, pipeline.array((ROWS, v.shape[0]), dtype))(p, v)

    def factors(self, j: jax.Array) -> tuple[jax.Array, ...]:
        """The factors of the scores for each part of block `j` with its own key scale."""
        parts, scales = self.s.tile // self.s.block_kv, self.scales[0]
        return tuple(self.factor * scales[(*self.at, j * parts + i)] for i in range(parts))

    def added(self, j: jax.Array, after: int = 0) -> tuple[jax.Array, ...]:
        """Starts to load the bias of block ``j + after``, if both exist: its words."""
        if self.bias is None:
            return ()
        j = j + after
        ref, line, query = self.bias
        stop = jnp.where(j < self.blocks.end, jnp.int32(ref.shape[3]), 0)
        return (biases.of_scores(ref, line, query, j * self.s.tile, stop, self.s.tile),)

    def multiplied(self, slot: jax.Array) -> None:
        """Releases the slot's keys, and if there are no segments the ids."""
        if self.ids is None:
            plgpu.barrier_arrive(self.free[0].at[slot])

    def seen(
        self,
        scores: jax.Array,
        j: jax.Array,
        factors: tuple[jax.Array, ...],
        slot: jax.Array,
        is_masked: bool,
        added: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Scores of block `j` in `slot` as the softmax takes them, and their factors."""
        if self.ids is None:
            return self.changed(scores, j, factors, (), is_masked, added)
        if not is_masked:
            plgpu.barrier_arrive(self.free[0].at[slot])
            return self.changed(scores, j, factors, (), is_masked, added)
        rows, columns = self.ids

        def of_several() -> jax.Array:
            ids = pipeline.load(rows, ROW), pipeline.load(columns.at[slot], COLUMN)
            plgpu.barrier_arrive(self.free[0].at[slot])
            return self.changed(scores, j, factors, ids, is_masked, added)[0]

        def of_one() -> jax.Array:
            plgpu.barrier_arrive(self.free[0].at[slot])
            return self.changed(scores, j, factors, (), is_masked, added)[0]

        if not _SPLITS:
            return of_several(), (jnp.float32(1.0),)
        assert self.segments is not None
        key = j * self.s.tile
        is_one = (key >= self.segments.full_start) & (key + self.s.tile <= self.segments.full_stop)
        return lax.cond(is_one, of_one, of_several), (jnp.float32(1.0),)

    def changed(
        self,
        scores: jax.Array,
        j: jax.Array,
        factors: tuple[jax.Array, ...],
        ids: tuple[jax.Array, ...],
        is_masked: bool,
        added: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """As `seen`; `ids` are the segments of rows and columns, if not all are the same."""
        if not is_masked and not self.s.changes_scores:
            return scores, factors
        key = j * self.s.tile
        limits = (self.first - key, self.length - key) if is_masked else ()
        linear = () if self.slope is None else (self.slope, self.first - key)
        own: tuple[jax.Array, ...] = ()
        if is_masked and self.own is not None:
            own = (*(pipeline.load(ref, ROW) for ref in self.own), key)
        given = [factors, limits, ids, linear, own, added]
        kind = None if self.bias is None else biases.Bias.of(self.bias[0])

        def f(scores: Any, *rest: Any) -> Any:
            parts = []
            for part in given:
                parts.append(rest[: len(part)])
                rest = rest[len(part) :]
            factors, *others = parts
            limits, *optional, words = (part or None for part in others)
            if words is not None:
                optional.append((*words, kind))
            return softmax.seen(scores, factors, limits, self.s.policy, *optional)

        scalars = [[SCALAR] * len(part) for part in (factors, limits, linear)]
        of_ids = [ROW, COLUMN] if ids else []
        of_own = [ROW, ROW, SCALAR] if own else []
        types = (_MATRIX, *scalars[0], *scalars[1], *of_ids, *scalars[2], *of_own)
        types = (*types, *[_MATRIX] * len(added))
        found = pipeline.inline(f, types, pipeline.array(scores.shape, jnp.float32))
        scores = found(scores, *factors, *limits, *ids, *linear, *own, *added)
        return scores, (jnp.float32(1.0),)

    def softmax(
        self, scores: jax.Array, m: jax.Array, l: jax.Array, factors: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        self.ping_pong.wait()

        def f(scores: Any, m: Any, l: Any, *factors: Any) -> tuple[Any, ...]:
            return softmax.step(scores, m, l, factors, self.s.policy)

        types = (_MATRIX, ROW, ROW, *[SCALAR] * len(factors))
        weights = pipeline.array(scores.shape, jnp.float32)
        return pipeline.inline(f, types, (weights, *[_COLUMN] * 4))(scores, m, l, *factors)

    def maxima(
        self, scores: jax.Array, m: jax.Array, factors: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        def f(scores: Any, m: Any, *factors: Any) -> tuple[Any, ...]:
            return softmax.maxima(scores, m, factors, self.s.policy)

        types = (_MATRIX, ROW, *[SCALAR] * len(factors))
        return pipeline.inline(f, types, (_COLUMN,) * 3)(scores, m, *factors)

    def to_floats(self, scores: jax.Array) -> jax.Array:
        if scores.dtype == jnp.float32:
            return scores
        kind = pipeline.array(scores.shape, jnp.float32)
        return pipeline.inline(softmax.to_floats, (_MATRIX,), kind)(scores)

    def arguments(
        self, scores: jax.Array, m: jax.Array, factors: tuple[jax.Array, ...]
    ) -> jax.Array:
        def f(scores: Any, m: Any, *factors: Any) -> Any:
            return softmax.arguments(scores, m, factors, self.s.policy)

        types = (_MATRIX, ROW, *[SCALAR] * len(factors))
        return pipeline.inline(f, types, pipeline.array(scores.shape, jnp.float32))(
            scores, m, *factors
        )

    def pack(self, weights: jax.Array) -> jax.Array:
        dtype = jnp.int8 if self.s.mode == "int8" else jnp.float8_e4m3fn
        p = pipeline.array(weights.shape, dtype, plgpu.Layout.WGMMA_8BIT)
        f = functools.partial(softmax.pack, policy=self.s.policy)
        return pipeline.inline(f, (_MATRIX,), p)(weights)

    def merge(
        self, o: jax.Array, product: jax.Array, alpha: jax.Array, unit: jax.Array
    ) -> jax.Array:
        is_int8 = self.s.mode == "int8"
        kind = pipeline.array(o.shape, o.dtype)
        types = (_MATRIX, _MATRIX, ROW, ROW)

        def f(o: Any, product: Any, alpha: Any, unit: Any) -> Any:
            return softmax.accumulate(o, product, alpha, unit if is_int8 else None, self.s.policy)

        return pipeline.inline(f, types, kind)(o, product, alpha, unit)

    def value_unit(self, unit: jax.Array, j: jax.Array) -> jax.Array:
        """An int8 block's unit of weights times the scale of its values."""
        if self.s.mode != "int8":
            return unit
        return jnp.where(unit == 0, 0.0, unit * self.scales[1][(*self.at, j)])

    def first_scores(self, slot: jax.Array) -> tuple[Any, ...]:
        """The first block's factors, words of its bias, and its products."""
        factors = self.factors(self.blocks.begin)
        added = self.added(self.blocks.begin)
        if self.ahead:
            [scores] = self.ahead
        else:
            self.wait_for_key(self.blocks.begin, slot)
            scores = self.scores(slot)
        plgpu.wgmma_wait(0)
        self.multiplied(slot)
        return factors, added, scores

    def over_rest(self, step: Callable[..., Any], carry: tuple[jax.Array, ...]) -> Any:
        """Calls ``step(j, carry, is_masked)`` for all blocks but the first."""
        blocks = self.blocks
        masked, plain = (functools.partial(step, is_masked=x) for x in (True, False))
        if self.s.hides_first:
            carry = lax.fori_loop(blocks.begin + 1, blocks.inner, masked, carry)
        carry = lax.fori_loop(blocks.inner, blocks.outer, plain, carry)
        return lax.fori_loop(blocks.outer, blocks.end, masked, carry)

    def run(self, slot: jax.Array) -> _Found:
        """Attends to all blocks, from `slot` on: output in parts, maxima, sums, next slot."""
        s, blocks = self.s, self.blocks
        head_dim = self.buffers[1].shape[1]

        factors, added, scores = self.first_scores(slot)
        m, l = pipeline.full(-jnp.inf, (ROWS,), ROW), pipeline.full(0.0, (ROWS,), ROW)
        alpha, unit = pipeline.full(1.0, (ROWS,), ROW), pipeline.full(0.0, (ROWS,), ROW)

        def first(is_masked: bool) -> tuple[jax.Array, ...]:
            y, c = self.seen(scores, blocks.begin, factors, slot, is_masked, added)
            return self.softmax(y, m, l, c)

        p, m, l, next_alpha, next_unit = lax.cond(
            blocks.full_first, lambda: first(False), lambda: first(True)
        )
        following = pipeline.next_slot(slot, s.stages)
        self.wait_for_key(blocks.begin + 1, following)
        plgpu.barrier_wait(self.ready[1].at[slot])
        self.ping_pong.hand_on()
        p = self.pack(p)
        o = pipeline.full(0.0, (ROWS, head_dim), _MATRIX)
        dtype = jnp.int32 if s.mode == "int8" else jnp.float32
        product = pipeline.full(0, (ROWS, head_dim), _MATRIX, dtype)

        def step(j: jax.Array, carry: tuple[jax.Array, ...], is_masked: bool) -> Any:
            o, product, alpha, unit, m, l, next_alpha, next_unit, p, before, slot, *added = carry
            following = pipeline.next_slot(slot, s.stages)
            factors = self.factors(j)
            value_unit = self.value_unit(next_unit, j - 1)
            scores = self.scores(slot)
            # While the scores are on their way.
            o = self.merge(o, product, alpha, unit)
            product = self.output(p, before)
            plgpu.wgmma_wait(1)
            self.multiplied(slot)
            alpha, unit = next_alpha, value_unit
            scores, factors = self.seen(scores, j, factors, slot, is_masked, tuple(added))
            following_added = self.added(j, 1)  # on its way until the next scores are there
            p, m, l, next_alpha, next_unit = self.softmax(scores, m, l, factors)
            # Loops over which the compiler moves no instructions: the softmax stays before them.
            self.wait_for_key(j + 1, following)
            plgpu.barrier_wait(self.ready[1].at[slot])
            self.ping_pong.hand_on()
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free[1].at[before])
            p = self.pack(p)
            carry = (o, product, alpha, unit, m, l, next_alpha, next_unit, p, slot, following)
            return *carry, *following_added

        carry = (o, product, alpha, unit, m, l, next_alpha, next_unit, p, slot, following)
        carry = (*carry, *self.added(blocks.begin, 1))
        carry = self.over_rest(step, carry)
        o, product, alpha, unit, m, l, next_alpha, next_unit, p, slot, following, *_ = carry
        plgpu.barrier_arrive(self.query_free)
        unit_of_last = self.value_unit(next_unit, blocks.end - 1)
        o = self.merge(o, product, alpha, unit)
        product = self.output(p, slot)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free[1].at[slot])
        return _Found((self.merge(o, product, next_alpha, unit_of_last),), m, l, following)

    def run_in_halves(self, slot: jax.Array) -> _Found:
        """As `run`, the channels in two halves: 256 are too many for registers beside the sums."""
        s, blocks = self.s, self.blocks

        def first(is_masked: bool) -> tuple[jax.Array, ...]:
            y, c = self.seen(scores, blocks.begin, factors, slot, is_masked, added)
            return self.softmax(
                y, pipeline.full(-jnp.inf, (ROWS,), ROW), pipeline.full(0.0, (ROWS,), ROW), c
            )

        factors, added, scores = self.first_scores(slot)
        p, m, l, alpha, unit = lax.cond(
            blocks.full_first, lambda: first(False), lambda: first(True)
        )
        following = pipeline.next_slot(slot, s.stages)
        self.wait_for_key(blocks.begin + 1, following)
        plgpu.barrier_wait(self.ready[1].at[slot])
        self.ping_pong.hand_on()
        p = self.pack(p)
        left = right = pipeline.full(0.0, (ROWS, _PART), _MATRIX)

        def step(j: jax.Array, carry: tuple[jax.Array, ...], is_masked: bool) -> Any:
            """Outputs of block ``j - 1``, scores of `j`."""
            left, right, alpha, unit, m, l, p, before, slot = carry
            following = pipeline.next_slot(slot, s.stages)
            factors = self.factors(j)
            value_unit = self.value_unit(unit, j - 1)
            added = self.added(j)
            scores = self.scores(slot)
            product = self.output(p, before, 0)
            plgpu.wgmma_wait(1)
            self.multiplied(slot)
            scores, factors = self.seen(scores, j, factors, slot, is_masked, added)
            weights, m, l, next_alpha, unit = self.softmax(scores, m, l, factors)
            # A loop, over which the compiler moves no instructions, as in `run`.
            self.wait_for_key(j + 1, following)
            self.ping_pong.hand_on()
            plgpu.wgmma_wait(0)
            left = self.merge(left, product, alpha, value_unit)
            product = self.output(p, before, 1)
            plgpu.barrier_wait(self.ready[1].at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free[1].at[before])
            right = self.merge(right, product, alpha, value_unit)
            p = self.pack(weights)
            return left, right, next_alpha, unit, m, l, p, slot, following

        carry = (left, right, alpha, unit, m, l, p, slot, following)
        carry = self.over_rest(step, carry)
        left, right, alpha, unit, m, l, p, slot, following = carry
        plgpu.barrier_arrive(self.query_free)
        unit = self.value_unit(unit, blocks.end - 1)
        halves = []
        for part, o in enumerate((left, right)):
            product = self.output(p, slot, part)
            plgpu.wgmma_wait(0)
            halves.append(self.merge(o, product, alpha, unit))
        plgpu.barrier_arrive(self.free[1].at[slot])
        return _Found(tuple(halves), m, l, following)

    def weigh(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        types = (_MATRIX, *[ROW] * 4)
        weights = pipeline.array(args[0].shape, jnp.float32)
        f = functools.partial(softmax.weigh, policy=self.s.policy)
        return pipeline.inline(f, types, (weights, _COLUMN, _COLUMN))(*args)

    def run_overlapped(self, slot: jax.Array) -> _Found:
        """As `run`, but computes the next block's scores during the exponentials of this one.

        Those of the next tile's first block are under way while this tile's outputs are stored.

        The compiler moves instructions freely between asynchronous products, but not across a loop:
        the waits for memory, which are loops, stand where it must not.
        """
        s, blocks = self.s, self.blocks
        head_dim = self.buffers[1].shape[1]

        def first(is_masked: bool) -> tuple[jax.Array, ...]:
            y, c = self.seen(scores, blocks.begin, factors, slot, is_masked, added)
            top, m, alpha = self.maxima(y, pipeline.full(-jnp.inf, (ROWS,), ROW), c)
            return self.arguments(y, m, c), top, m, alpha

        factors, added, scores = self.first_scores(slot)
        x, top, m, alpha = lax.cond(blocks.full_first, lambda: first(False), lambda: first(True))
        following = pipeline.next_slot(slot, s.stages)
        self.wait_for_key(blocks.begin + 1, following)
        o, l = pipeline.full(0.0, (ROWS, head_dim), _MATRIX), pipeline.full(0.0, (ROWS,), ROW)

        def step(j: jax.Array, carry: tuple[jax.Array, ...], is_masked: bool) -> Any:
            """Weights of block ``j - 1``, scores of `j`."""
            o, l, x, top, m, alpha, before, slot = carry
            factors = self.factors(j)
            added = self.added(j)
            self.ping_pong.wait()
            scores = self.scores(slot)
            weights, l, unit = self.weigh(x, top, m, alpha, l)
            plgpu.barrier_wait(self.ready[1].at[before])
            self.ping_pong.hand_on()
            plgpu.wgmma_wait(0)
            product = self.output(self.pack(weights), before)
            self.multiplied(slot)

            @pl.when(factors[0] < 0)  # never: a loop that keeps maxima out of the products
            def _() -> None:
                plgpu.barrier_wait(self.ready[0].at[slot])

            scores, factors = self.seen(scores, j, factors, slot, is_masked, added)
            top, m, next_alpha = self.maxima(scores, m, factors)
            scores = self.to_floats(scores)  # where they are, while outputs are on their way
            unit = self.value_unit(unit, j - 1)
            following = pipeline.next_slot(slot, s.stages)
            self.wait_for_key(j + 1, following)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free[1].at[before])
            o = self.merge(o, product, alpha, unit)
            # Now, because this moves them to the registers that the product frees.
            x = self.arguments(scores, m, factors)
            return o, l, x, top, m, next_alpha, slot, following

        carry = (o, l, x, top, m, alpha, slot, following)
        carry = self.over_rest(step, carry)
        o, l, x, top, m, alpha, slot, following = carry
        plgpu.barrier_arrive(self.query_free)
        self.ping_pong.wait()
        weights, l, unit = self.weigh(x, top, m, alpha, l)
        plgpu.barrier_wait(self.ready[1].at[slot])
        self.ping_pong.hand_on()
        product = self.output(self.pack(weights), slot)
        unit = self.value_unit(unit, blocks.end - 1)
        assert self.start_next is not None
        ahead = self.start_next(following)
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(self.free[1].at[slot])
        return _Found((self.merge(o, product, alpha, unit),), m, l, following, (ahead,))


def _query_scale(
    work: Work,
    start: jax.Array,
    place: jax.Array,
    me: jax.Array,
    x: _Inputs,
    y: _Memory,
    s: Settings,
) -> jax.Array:
    if y.q_scale is not None:
        return y.q_scale[quantize.PARTS + place, me]
    assert x.q_scale is not None
    block = jnp.minimum(lax.div(start, jnp.int32(s.block_q)), x.q_scale.shape[2] - 1)
    return x.q_scale[work.b, work.head, block]


def _line(bias: Ref, work: Work) -> jax.Array:
    return biases.Bias.of(bias).line(work.b, work.head)


def _attend(
    work: Work,
    place: jax.Array,
    slot: jax.Array,
    me: jax.Array,
    x: _Inputs,
    y: _Memory,
    s: Settings,
    ahead: tuple[jax.Array, ...],
    is_last: jax.Array,
) -> _Found:
    """Runs `_Consumer.run` or one of its variants for a warpgroup's part of a tile.

    `ahead` is as in `_Consumer`; `is_last` says whether this is the program's last tile.
    """
    start = work.first + me * ROWS
    # With a soft cap scores are scaled to the exponential's units after it.
    unit = 1.0 if s.soft_cap is not None else s.exponential.unit
    if not ahead:
        plgpu.barrier_wait(y.q_ready.at[place])

    def start_next(slot: jax.Array) -> jax.Array:
        @pl.when(~is_last)  # else products of whatever the memory holds, which nobody reads
        def _() -> None:
            plgpu.barrier_wait(y.q_ready.at[1 - place])
            plgpu.barrier_wait(y.k_ready.at[slot])

        return _start_scores(y.q.at[1 - place, me], y.k.at[slot], s)

    consumer = _Consumer(
        q=y.q.at[place, me],
        buffers=(y.k, y.v),
        ready=(y.k_ready, y.v_ready),
        free=(y.k_free, y.v_free),
        query_free=y.q_free.at[place],
        scales=(x.k_scale, x.v_scale),
        at=(work.b, work.h),
        factor=_query_scale(work, start, place, me, x, y, s) * (abs(s.scale) * unit),
        first=work.position(start),
        length=work.length,
        blocks=work.blocks,
        ping_pong=pipeline.PingPong(y.tensor_core_order, me, s.consumers),
        s=s,
        ids=None if y.query_ids is None else (y.query_ids.at[place, me], y.key_ids),
        segments=work.segments,
        slope=None if x.slopes is None else x.slopes[work.head] * s.exponential.unit,
        own=None if y.own is None else (y.own.at[place, 0, me], y.own.at[place, 1, me]),
        bias=None if x.bias is None else (x.bias, _line(x.bias, work), start),
        ahead=ahead,
        start_next=start_next,
    )
    if y.v.shape[1] > _PART:
        return consumer.run_in_halves(slot)
    return (consumer.run_overlapped if _is_overlapped(y, s) else consumer.run)(slot)


def _is_overlapped(y: _Memory, s: Settings) -> bool:
    return s.intra_warpgroup_overlap and y.v.shape[1] <= _PART


def _store(
    work: Work,
    me: jax.Array,
    found: _Found,
    x: _Inputs,
    y: _Memory,
    results: tuple[Ref, Ref],
    s: Settings,
) -> None:
    (halves, m, l, *_), (out_ref, lse_ref) = found, results
    start = work.first + me * ROWS
    v_scale = jnp.float32(1.0) if s.mode == "int8" else x.v_scale[work.b, work.h, 0]
    channels, width = out_ref.shape[3], y.out.shape[-1]
    rows = pl.ds(start, ROWS)
    sinks = () if x.sinks is None else (x.sinks[work.head],)
    for half, o in enumerate(halves):
        count = min(o.shape[1], channels - half * o.shape[1])

        def f(o: Any, m: Any, l: Any, last: Any, scale: Any, *sink: Any, n: int = count) -> Any:
            return softmax.finish(o, m, l, last, scale, s.policy, n, width, *sink)

        *parts, residual = pipeline.inline(
            f,
            (_MATRIX, ROW, ROW, SCALAR, SCALAR, *[SCALAR] * len(sinks)),
            (*[pipeline.array((ROWS, width), o.dtype)] * (count // width), _COLUMN),
        )(o, m, l, work.query_length - start, v_scale, *sinks)
        for i, part in enumerate(parts):
            # Waits as late as possible until the last results have left the memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            is_first = half == i == 0
            if is_first:
                y.lse[me] = residual
            y.out[me] = part.astype(y.out.dtype)
            plgpu.commit_smem()
            there = pl.ds(half * o.shape[1] + i * width, width)
            plgpu.copy_smem_to_gmem(y.out.at[me], out_ref.at[work.b, rows, work.head, there])
            if is_first:
                plgpu.copy_smem_to_gmem(y.lse.at[me], lse_ref.at[work.b, work.head, rows])


def _out_width(channels: int, dtype: Any) -> int:
    """Channels of the output that are stored at once: at most 16 KiB of a warpgroup's rows."""
    return min(channels, 2**14 // ROWS // jnp.dtype(dtype).itemsize)


def writes(channels: int, head_dim: int, dtype: Any) -> int:
    """How many channels the kernel writes: the real ones if copies can, else all of `head_dim`."""
    is_one_copy = channels == _out_width(channels, dtype) and head_dim <= _PART
    return channels if is_one_copy and channels * jnp.dtype(dtype).itemsize % 32 == 0 else head_dim


def _kernel(*refs: Ref, s: Settings, tiles: int, names: tuple[str, ...]) -> None:
    """One persistent program, which takes some of the tiles in turn; `names` of its inputs."""
    *inputs, out_ref, lse_ref = refs
    x = _Inputs(**dict(zip(names, inputs, strict=True)))
    batch, _, heads, _ = out_ref.shape
    me, share = (
        lax.axis_index("warpgroup"),
        pipeline.TileScheduler(
            batch * heads * tiles, zigzag=s.is_causal or s.has_segments, table=x.table
        ),
    )
    quantizes = x.q_scale is None

    def work(i: jax.Array) -> Work:
        lengths = (x.query_lengths, x.key_lengths)
        return Work(share.number(i), tiles, heads, x.k, lengths, s, x.shifts, x.bounds, x.order)

    def body(y: _Memory) -> None:
        def consume(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot, *ahead = carry
            place, is_last = lax.rem(i, jnp.int32(_QUERY_SLOTS)), i == share.count - 1
            found = _attend(work(i), place, slot, me, x, y, s, tuple(ahead), is_last)
            # Computed anew, so that the tile's place takes no registers in the meantime.
            _store(work(pipeline.anew(i)), me, found, x, y, (out_ref, lse_ref), s)
            return found.slot, *found.ahead

        def start_to_consume() -> None:
            for i in range(_QUERY_SLOTS):
                plgpu.barrier_arrive(y.q_free.at[i])
            pipeline.free_at_first(s.stages, (y.k_free, y.v_free))
            pipeline.PingPong(y.tensor_core_order, me, s.consumers).begin()
            carry: tuple[jax.Array, ...] = (jnp.int32(0),)
            if _is_overlapped(y, s):
                for barrier in (y.q_ready, y.k_ready):
                    plgpu.barrier_wait(barrier.at[0])
                carry = (*carry, _start_scores(y.q.at[0, me], y.k.at[0], s))
            lax.fori_loop(jnp.int32(0), share.count, consume, carry)
            plgpu.wgmma_wait(0)
            plgpu.wait_smem_to_gmem(0)

        def produce(i: jax.Array, slot: jax.Array) -> jax.Array:
            place, tile = lax.rem(i, jnp.int32(_QUERY_SLOTS)), work(i)
            if not quantizes:
                _copy_queries(tile, place, x, y, s)
                return _copy_keys(tile, slot, x, y, s)
            _quantize_queries(tile, place, x, y, s)

            @pl.when(i + 1 < share.count)
            def _() -> None:
                _copy_raw(work(i + 1), x, y, s)

            return _copy_keys(tile, slot, x, y, s)

        def start_to_produce() -> None:
            if quantizes:
                _copy_raw(work(jnp.int32(0)), x, y, s)
            share.by_index(produce)

        registers = _REGISTERS[s.consumers]
        pipeline.divide(me, s.consumers, registers, start_to_consume, start_to_produce)

    _allocate(body, x, out_ref, s)


def _allocate(f: Callable[[_Memory], None], x: _Inputs, out: Ref, s: Settings) -> None:
    quantizes, warpgroups, head_dim = x.q_scale is None, s.consumers, x.k.shape[3]
    of_each, with_ids = (warpgroups, ROWS), int(x.query_ids is not None)
    with_own = int(x.own is not None)
    width = _out_width(out.shape[3], out.dtype)
    if with_ids + with_own and head_dim > _PART:  # to have room for them
        width //= 2
    memory = _Memory(
        q=pipeline.tile((_QUERY_SLOTS, *of_each, head_dim), x.k.dtype),
        k=pipeline.tile((s.stages, s.tile, head_dim), x.k.dtype),
        v=pipeline.tile((s.stages, head_dim, s.tile), x.v.dtype),
        out=pipeline.tile((*of_each, width), out.dtype),
        lse=plgpu.SMEM(of_each, jnp.float32),
        # The warpgroup that quantizes arrives once, and each copy does.
        q_ready=plgpu.Barrier(
            num_arrivals=(1 if quantizes else warpgroups) + with_ids + with_own,
            num_barriers=_QUERY_SLOTS,
        ),
        k_ready=plgpu.Barrier(num_arrivals=1 + with_ids, num_barriers=s.stages),
        v_ready=plgpu.Barrier(num_barriers=s.stages),
        q_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_QUERY_SLOTS),
        k_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=s.stages),
        v_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=s.stages),
    )
    if quantizes:
        memory = memory._replace(
            raw=plgpu.SMEM((s.rows, head_dim), x.q.dtype),
            raw_ready=plgpu.Barrier(),
            q_scale=plgpu.SMEM((quantize.PARTS + _QUERY_SLOTS, warpgroups), jnp.float32),
        )
    if s.ping_pong:
        memory = memory._replace(tensor_core_order=pipeline.PingPong.memory(s.consumers))
    if with_ids:
        memory = memory._replace(
            query_ids=plgpu.SMEM((_QUERY_SLOTS, *of_each), jnp.int32),
            key_ids=plgpu.SMEM((s.stages, s.tile), jnp.int32),
        )
    if with_own:
        memory = memory._replace(own=plgpu.SMEM((_QUERY_SLOTS, 2, *of_each), jnp.int32))
    given = {name: kind for name, kind in memory._asdict().items() if kind is not None}
    pl.run_scoped(lambda **refs: f(_Memory(**refs)), collective_axes="warpgroup", **given)


def attention(
    q: jax.Array,
    q_scale: jax.Array | None,
    k: jax.Array,
    k_scale: jax.Array,
    v: jax.Array,
    v_scale: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    *,
    tokens: int,
    channels: int,
    dtype: jax.typing.DTypeLike,
    settings: Settings,
    shifts: jax.Array | None = None,
    segments: Segments | None = None,
    key_bounds: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends with 8-bit operands: ``[B, T, N, channels]`` and float32 log-sum-exps ``[B, T, N]``.

    Shapes, with `Tp` and `Sp` padded to whole blocks and `H` 64, 128 or 256: `q` ``[B, N, Tp, H]``
    (it includes the sign of a negative scale), `k` ``[B, K, Sp, H]``, `v` ``[B, K, H, Sp]``; scales
    float32 ``[B, N, Tp / block_q]`` and ``[B, K, Sp / block_kv]``, `v_scale` in the e4m3 modes one
    number per head; lengths int32 ``[B]``. `Sp` is a multiple of `settings.tile`.

    If `q_scale` is None, `q` is bfloat16 or float16 ``[B, T, N, H]`` and the kernel quantizes it;
    then `H` is 64 or 128 and `settings.block_q` divides its tile.

    The tokens of `k` are permuted within groups of 16: place ``8 h + 2 t + r`` holds token
    ``4 t + 2 h + r`` (`t` in 0..3; `h`, `r` in 0..1). Thread `t` of four holds these columns of the
    scores, and as the next product's operand tokens ``4 t .. 4 t + 3``: so no weight changes
    threads.

    `tokens` is `T`, `channels` is as `writes` gives it, and `shifts`, int32 ``[B]``, say by how
    much a query's position exceeds that of the key with the same index. Ids of `segments` are in
    the order of tokens, for keys too; or else `key_bounds`, int32 ``[B, T]`` twice, say from which
    key each query sees, and up to which. `sinks`, float32 ``[N]``, are scores that have a weight
    and no value; scores fall by `slopes`, float32 ``[N]``, times the distance. `bias`, ``[B or 1, N
    or 1, T or 1, S']`` of which `S'` is `S` rounded up to `biases.MULTIPLE`, is added to scores and
    hides keys where it is ``-inf``. What `settings` say of segments, slopes and a bias is
    overwritten here.
    """
    s = dataclasses.replace(
        settings,
        has_segments=segments is not None or key_bounds is not None,
        has_slopes=slopes is not None,
        has_bias=bias is not None,
    )
    batch = q.shape[0]
    heads = q.shape[2 if q_scale is None else 1]
    tiles = pl.cdiv(tokens, s.rows)
    written = -(-tokens // 8) * 8  # copies take multiples of eight tokens
    given = {
        "q": q,
        "k": k,
        "k_scale": k_scale,
        "v": v,
        "v_scale": v_scale,
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
        "q_scale": q_scale,
        "shifts": shifts,
        "sinks": sinks,
        "slopes": slopes,
        "bias": bias,
    }
    if segments is not None:
        given |= _of_segments(segments, query_lengths, key_lengths, k.shape[2], shifts, s)
    if key_bounds is not None:
        given |= _of_key_bounds(key_bounds, query_lengths, k.shape[2], shifts, s)
    is_plain = s.window is None and shifts is None and "order" not in given
    if s.is_causal and is_plain and tokens <= k.shape[2]:
        table = schedule.causal(batch * heads, tiles, min(s.programs, batch * heads * tiles))
        given["table"] = None if table is None else jnp.asarray(table)
    given = {name: x for name, x in given.items() if x is not None}
    run = pipeline.launch(
        functools.partial(_kernel, s=s, tiles=tiles, names=tuple(given)),
        "turbojax_attention_hopper",
        (
            jax.ShapeDtypeStruct((batch, written, heads, channels), dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * s.rows), jnp.float32),
        ),
        batch * heads * tiles,
        s.programs,
        consumers=s.consumers,
    )
    out, lse = run(*given.values())
    return out[:, :tokens], jnp.swapaxes(lse[:, :, :tokens], 1, 2)


def _of_segments(
    x: Segments,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    size: int,
    shifts: jax.Array | None,
    s: Settings,
) -> dict[str, jax.Array]:
    """The arrays that the kernel reads for segments, with `size` keys."""
    batch = x.queries.shape[0]
    queries = packing.padded(x.queries, s.rows).reshape(batch, -1, s.consumers, ROWS)
    keys = packing.padded(x.keys, size).reshape(batch, -1, 4, 2, 2)  # t, h, r
    bounds = packing.bounds(x.queries, query_lengths, s.rows, x.keys, key_lengths, s.tile)
    return {
        "query_ids": queries,
        "key_ids": jnp.swapaxes(keys, 2, 3).reshape(batch, size),
        "bounds": bounds,
        "order": packing.order(bounds, s.rows, shifts, s.policy.left, s.policy.right),
    }


def _of_key_bounds(
    x: tuple[jax.Array, jax.Array],
    query_lengths: jax.Array,
    size: int,
    shifts: jax.Array | None,
    s: Settings,
) -> dict[str, jax.Array]:
    """The arrays that the kernel reads for bounds of each query's keys, of `size` keys."""
    own = [packing.padded(a, s.rows).reshape(a.shape[0], -1, s.consumers, ROWS) for a in x]
    bounds = packing.of_key_bounds(x, query_lengths, s.rows, size, s.tile)
    order = packing.order(bounds, s.rows, shifts, s.policy.left, s.policy.right)
    return {"own": jnp.stack(own, axis=2), "bounds": bounds, "order": order}
