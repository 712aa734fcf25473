"""Decode over pages of latents, for Hopper: absorbed multi-head latent attention.

Roofline, H200, 64 sequences of 8,192 tokens: 1,152 bytes a token in 16 bits, 644 in e4m3, 388 in
turbo4, so 140, 79 and 47 us; 2 * N * (576 + 512) operations, 92 us for 16 heads (as for 64) and 185
for 128. Target: 0.8 of the larger. Seen: 16 bits 145 and 222 us, e4m3 153 and 284, turbo4 145 and
307, not bound by expansion itself; one such sequence, 16 heads, 7.7 us and 2.9 of the join.

A token has one latent of 512 channels, key and value of all heads, and 64 rotary channels that all
keys share. N heads are N queries of the same token, so a program takes 64 rows of them at once.

A program has three warpgroups. The first finds weights of 64 tokens, in two halves (`softmax`), and
hands them on in shared memory. Both the first and the second sum, each its half of the latent's
channels, so that their 64 x 256 sums fit in registers. The third copies into two slots of 64
tokens, each of which serves as keys and, transposed by the matrix unit's descriptor, as values.
What is stored in fewer bits is expanded into them by the third, and by the second while the first
finds weights. (Four warpgroups, one of which only finds weights, would keep the matrix unit busier,
but ptxas does not compile a product of 128 sums a thread where a thread starts with 128 registers.)

Sequences are cut into as many equal parts as fill the GPU, and `join` adds up what was found: bits
of a query depend on what its sequence holds, and on the sizes of the call, not on other sequences.

Roofline in full and versions: `docs/kernels/latent.md`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import LOG2_E, Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.hopper.latent import join, softmax, tiles
from pallas_kernels.mosaic.hopper.latent.tiles import (
    HALF,
    HALVES,
    LATENT,
    ROPE,
    TILE,
    TOKENS,
    Inputs,
    Settings,
    Work,
    first_row,
    place,
    settings,
)
from pallas_kernels.mosaic.hopper.paged_prompt import nonfinite
from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import pieces
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments
from pallas_kernels.mosaic.pipeline import COLUMN, ROW, ROWS, SCALAR
from pallas_kernels.mosaic.products import wgmma

# Expansion ----------------------------------------------------------------------------------------
# Two warpgroups share a tile of 64 tokens: a warp of each has eight of 16 tokens, all in one page.
# For half a token at a time each lane loads eight channels, 4 or 8 bytes, and stores 16 bytes where
# the matrix unit finds them. What is loaded stays in registers until its slot is free, so loads run
# ahead of it.
#
# What is stored are the codes' numbers, which 16 bits hold exactly, times a power of two. A token's
# factor is left for its scores and weights, so that a number takes two or three instructions; its
# rotary channels are divided by it.

SHARES = 2  # warpgroups that expand a tile
# Smallest factor of a token, so that what is divided by it stays finite.
_SMALLEST = {"bfloat16": 2.0**-60, "float16": 2.0**-9}


class Codes:
    """How a warpgroup expands tiles to `dtype`, ``"bfloat16"`` or ``"float16"``."""

    def __init__(self, x: Inputs, codec: Codec, dtype: str) -> None:
        self.x, self.codec, self.dtype = x, codec, dtype
        self.words = codec.bits // 4
        """Words of eight channels."""

    def tokens(self, share: int) -> range:
        """A share of a warp's 16 tokens."""
        size = TOKENS // SHARES
        return range(share * size, (share + 1) * size)

    def load(self, work: Work, j: jax.Array, share: int) -> list[jax.Array]:
        """Begins to load share 0 or 1 of a tile; returns what `store` takes."""

        def f(refs: Any, *numbers: Any) -> tuple[Any, Any]:
            arrays = [Pointer.to(ref) for ref in refs]
            words, factor = self.loaded(arrays, [lane.scalar(n) for n in numbers], share)
            zero = lane.number(0.0)
            return fragments.carrier(words), fragments.of_rows([[factor, zero], [zero, zero]])

        refs = (self.x.latent, self.x.rope, self.x.scale, self.x.tables)
        types = ((plgpu.RefType(),) * len(refs), SCALAR, SCALAR, SCALAR)
        count = len(self.tokens(share)) * (HALVES * self.words + 1)
        out = (
            pipeline.array((ROWS, 2 * count), jnp.int32),
            pipeline.array((ROWS, _EIGHT), jnp.float32),
        )
        return list(pipeline.inline(f, types, out)(refs, work.b, j, work.length))

    def loaded(
        self, arrays: list[Pointer], numbers: list[Int], share: int
    ) -> tuple[list[Int], Float]:
        """A lane's words of a share, and the factor of the share's token with the lane's number.

        `arrays` are latents, rotary parts, scales, tables; `numbers` as for `tiles.first_row`. Of
        four tokens' rotary parts, 128 bytes each, a lane has 16 bytes.
        """
        latent, rope, scale, tables = arrays
        _, own = place()
        tokens = self.tokens(share)
        first = first_row(tables, numbers, self.x) + tokens.start
        factor = scale.times(first + own.minimum(len(tokens) - 1), 4).float()
        size = LATENT * self.codec.bits // 8
        at = latent.times(first, size).at(own * (4 * self.words))
        words: list[Int] = []
        for i in range(len(tokens)):
            for half in range(HALVES):
                words += at.at(i * size + half * size // HALVES).words(self.words)
        at = rope.times(first, 2 * ROPE).at(own * 16)
        for i in range(0, len(tokens), 4):
            words += at.at(i * 2 * ROPE).words(4)
        return words, factor

    def store(self, loaded: list[jax.Array], slot: jax.Array, y: "Memory", share: int) -> None:
        """Stores a share of a tile to a slot, and the factors of its tokens."""
        latent, rope, units = y.latent.at[slot], y.rope.at[slot], y.unit.at[slot]

        def f(words: Any, factor: Any, *targets: Any) -> None:
            own = fragments.by_row(factor)[0][0]
            self.stored(fragments.scalars(words), own, [Pointer.to(x) for x in targets], share)

        tiles = pipeline.tile_type(latent), pipeline.tile_type(rope)
        types = (_MATRIX, _MATRIX, *tiles, plgpu.RefType())
        pipeline.inline(f, types)(*loaded, latent, rope, units)

    def stored(self, words: list[Int], factor: Float, slot: list[Pointer], share: int) -> None:
        """`slot` are latents, rotary parts and factors."""
        latent, rope, units = slot
        warp, own = place()
        tokens = self.tokens(share)
        unit = factor * self.codec.unit if self.codec.centroids else factor
        power = None
        if self.dtype == "float16":
            power, unit = _power(unit)
        # A token of zeros divides its rotary channels, too.
        least = _SMALLEST[self.dtype]
        unit = (unit < least).where(least, unit)
        with lane.when(own < len(tokens)):
            units.at((warp * TOKENS + tokens.start + own) * 4).store(unit)
        for i, token in enumerate(tokens):
            times = None if power is None else lane.from_lane(power, lane.integer(i))
            for half in range(HALVES):
                begin = (i * HALVES + half) * self.words
                at = latent.at(offset(warp, token, half, own))
                found = self.numbers(words[begin : begin + self.words])
                if times is not None:
                    found = [lane.half.multiply(x, times) for x in found]
                at.store_words(found)
        self._store_rope(words[-len(tokens) :], lane.reciprocal(unit), rope, share)

    def _store_rope(self, words: list[Int], inverse: Float, rope: Pointer, share: int) -> None:
        warp, own = place()
        for i in range(0, len(words), 4):
            times = lane.from_lane(inverse, (own >> 3) + i)
            x = [v * times for word in words[i : i + 4] for v in lane.half.unpack(word, self.dtype)]
            packed = [lane.half.pack(x[k], x[k + 1], self.dtype) for k in range(0, _EIGHT, 2)]
            row = (own >> 3) + (self.tokens(share).start + i)
            at = (warp * TOKENS + row) * (2 * ROPE) + ((own ^ row) & 7) * 16
            rope.at(at).store_words(packed)

    def numbers(self, words: list[Int]) -> list[Int]:
        """What eight codes stand for, as four words, exactly."""
        if self.codec.centroids:
            one, half = (lane.half.constant(x, self.dtype) for x in (_ONES[self.dtype], -0.5))
            assert self.codec.middle == 63.5
            found = []
            for four in _bytes(words[0], self.codec):
                for selector in (0x4140, 0x4342):
                    x = lane.permute_bytes(four, _HIGH[self.dtype], selector)
                    x = lane.half.subtract(x, one, self.dtype)
                    found.append(lane.half.subtract(x, half, self.dtype))
            return found
        if self.dtype == "float16":
            return [half for word in words for half in lane.half.from_e4m3(word)]
        return [half for word in words for half in _bfloat16_of_e4m3(word)]


# The upper byte of 128 and of 1024, to which a lower one adds a number below 128; and these and 64.
_HIGH = {"bfloat16": 0x43434343, "float16": 0x64646464}
_ONES = {"bfloat16": 192.0, "float16": 1088.0}


def _bytes(word: Int, codec: Codec) -> list[Int]:
    """The centroids of a word's eight codes as bytes, see `expand.centroids`."""
    table = [
        lane.integer(int.from_bytes(bytes(codec.centroids[i : i + 4]), "little"))
        for i in range(0, 16, 4)
    ]
    flipped = word ^ 0x88888888
    # A selector with its highest bit set gives the sign of a byte, which is 0.
    return [
        lane.permute_bytes(table[0], table[1], low) | lane.permute_bytes(table[2], table[3], high)
        for low, high in ((word, flipped), (word >> 16, flipped >> 16))
    ]


def _bfloat16_of_e4m3(word: Int) -> list[Int]:
    """Four finite e4m3 as two words of two bfloat16.

    Exponents and mantissas go where bfloat16 has them, which is 2**-120 of the number.
    """
    word = lane.permute_bytes(word, 0, 0x3120)
    factor = lane.half.constant(2.0**120, "bfloat16")
    pairs = ((word << 8), (word << 4)), (word, word >> 4)
    numbers = [(sign & 0x80008000) | (rest & 0x07F007F0) for sign, rest in pairs]
    return [lane.half.multiply(x, factor, "bfloat16") for x in numbers]


def _power(x: Float) -> tuple[Int, Float]:
    """A positive number as a power of two, in both halves of a word as float16, and the rest.

    The power is one that float16 has, and at most 2**7, for NaN too: e4m3 times it are finite.
    """
    exponent = ((x.as_int() >> 23) & 0xFF).maximum(127 - 24).minimum(127 + 7)
    power = (exponent << 23).as_float()
    return lane.half.pack(power, power), x * ((exponent * -1 + 254) << 23).as_float()


def offset(warp: Int, token: int, half: int, own: Int) -> Int:
    """Where a lane's 16 bytes of a token (of its warp's 16) and half of the channels go in a slot.

    Eight rows of 64 channels lie together, pieces of 16 bytes interleaved.
    """
    row, blocks = token % _EIGHT, HALF // 64
    block = (warp * 2 + token // _EIGHT) * blocks + (own >> 3)
    return block * 1024 + ((own ^ row) & 7) * 16 + (half * TILE * HALF * 2 + row * 128)


# Results ------------------------------------------------------------------------------------------


def channels(
    x: jax.Array, out: Ref, base: jax.Array, first: jax.Array, rows: int, channel: jax.Array
) -> None:
    """Stores the channels of `x`, float32 ``[64, n]``, to `out`, ``[.., rows, H]``, at `channel`.

    `base` is the number of the sequence's first row in `out`, and `first` that of the first row of
    `x` in the sequence; rows past the sequence's `rows` are not stored.
    """
    width, dtype = out.shape[-1], jnp.dtype(out.dtype)

    def f(x: Any, out: Any, *numbers: Any) -> None:
        start, row, column = (lane.scalar(n) for n in numbers)
        own, t = fragments.row_and_place()
        for half, values in enumerate(fragments.by_row(x)):
            at = row + own + (_EIGHT * half)
            with lane.when(at < rows):
                target = Pointer.to(out).times(start + at, width * dtype.itemsize)
                target = target.at((column + t * 2) * dtype.itemsize)
                for i in range(0, len(values), 2):
                    pair, here = values[i : i + 2], target.at(4 * i * dtype.itemsize)
                    if dtype.itemsize == 2:
                        here.store(lane.half.pack(pair[0], pair[1], dtype.name))
                    else:
                        here.store_words([v.as_int() for v in pair])

    kinds = (plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR, SCALAR, SCALAR)
    pipeline.inline(f, kinds)(x, out, base, first, channel)


def numbers(x: jax.Array, out: Ref, base: jax.Array, first: jax.Array, rows: int) -> None:
    """Stores a number of each row, float32 ``[64]``, to ``[.., rows]``; see `channels`."""

    def f(x: Any, out: Any, *numbers: Any) -> None:
        start, row = (lane.scalar(n) for n in numbers)
        own, t = fragments.row_and_place()
        for half, value in enumerate(fragments.scalars(x)):
            at = row + own + (_EIGHT * half)
            with lane.when(t.equals(0) & (at < rows)):
                Pointer.to(out).times(start + at, 4).store(value)

    pipeline.inline(f, (ROW, plgpu.RefType(), SCALAR, SCALAR))(x, out, base, first)


# Memory -------------------------------------------------------------------------------------------

STAGES = 2  # tiles of tokens: all that there is room for


class Memory(NamedTuple):
    """Shared memory, and the barriers of its slots."""

    q: Ref
    q_rope: Ref
    latent: Ref
    rope: Ref
    p: Ref
    factor: Ref
    unit: Any  # factors of tokens of codes, else None
    nonfinite: Any  # see that module; None of codes, whose factors tell it
    q_ready: Ref
    q_free: Ref
    ready: Ref
    free: Ref
    p_ready: Ref
    p_free: Ref


def memory(x: Inputs, s: Settings) -> Memory:
    copies, dtype = pieces(x.rope.shape[1], TILE), x.q.dtype
    # Copies of the rotary part, and of each half; or the warpgroups that expand.
    arrivals = copies * (1 + HALVES) if s.codec is None else SHARES
    return Memory(
        q=pipeline.tile((HALVES, ROWS, HALF), dtype),
        q_rope=pipeline.tile((ROWS, ROPE), dtype),
        latent=pipeline.tile((STAGES, HALVES, TILE, HALF), dtype),
        rope=pipeline.tile((STAGES, TILE, ROPE), dtype),
        p=pipeline.tile((HALVES, ROWS, TILE // HALVES), dtype),
        factor=plgpu.SMEM((ROWS,), jnp.float32),
        unit=None if s.codec is None else plgpu.SMEM((STAGES, TILE), jnp.float32),
        nonfinite=nonfinite.memory(HALVES) if s.codec is None else None,
        q_ready=plgpu.Barrier(num_arrivals=1 + HALVES),
        q_free=plgpu.Barrier(),
        ready=plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
        p_ready=plgpu.Barrier(num_barriers=HALVES),
        p_free=plgpu.Barrier(),
    )


__all__ = ["Settings", "attend", "settings"]

_MATRIX = plgpu.Layout.WGMMA
_EIGHT = 8


# What copies --------------------------------------------------------------------------------------


def _copy_queries(work: Work, x: Inputs, y: Memory) -> None:
    plgpu.barrier_wait(y.q_free)
    size = min(ROWS, x.q.shape[1])
    rows, to = pl.ds(work.first, size), pl.ds(0, size)
    for i in range(HALVES):
        source = x.q.at[work.b, rows, pl.ds(i * HALF, HALF)]
        plgpu.copy_gmem_to_smem(source, y.q.at[i, to], y.q_ready)
    plgpu.copy_gmem_to_smem(x.q_rope.at[work.b, rows], y.q_rope.at[to], y.q_ready)


def _copy_tile(work: Work, j: jax.Array, slot: jax.Array, x: Inputs, y: Memory) -> None:
    """Copies a tile of tokens that needs no expansion, page by page."""
    pool, page_size, _ = x.rope.shape
    size, ready = min(page_size, TILE), y.ready.at[slot]
    within = lax.rem(j * TILE, jnp.int32(page_size)) if page_size > TILE else 0
    for i in range(pieces(page_size, TILE)):
        first = j * TILE + i * size
        entry = lax.div(first, jnp.int32(page_size))
        page = x.tables[work.b, jnp.minimum(entry, x.tables.shape[1] - 1)]
        # Past the end are numbers outside the pool, whose copies give zeros.
        page = jnp.where(first < work.length, page, pool)
        rows, to = pl.ds(within, size), pl.ds(i * size, size)
        plgpu.copy_gmem_to_smem(x.rope.at[page, rows], y.rope.at[slot, to], ready)
        for half in range(HALVES):
            source = x.latent.at[page, rows, pl.ds(half * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, y.latent.at[slot, half, to], ready)


def _copy(work: Work, slot: jax.Array, x: Inputs, y: Memory, s: Settings) -> jax.Array:
    """Copies a program's tiles to shared memory as room comes free; returns the next slot."""

    def begin(j: jax.Array, slot: jax.Array) -> None:
        if s.codec is None:
            _copy_tile(work, j, slot, x, y)
        # The queries' memory becomes free later than the first tile's.
        pl.when(j == work.tiles.begin)(lambda: _copy_queries(work, x, y))
        if s.l2_prefetch:
            pl.when(j + s.l2_prefetch < work.tiles.end)(
                lambda: tiles.ask_for(work, j + s.l2_prefetch, x)
            )

    def copied(j: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(y.free.at[slot])
        begin(j, slot)
        return pipeline.next_slot(slot, STAGES)

    if s.codec is None:
        return lax.fori_loop(work.tiles.begin, work.tiles.end, copied, slot)
    codes = Codes(x, s.codec, jnp.dtype(x.q.dtype).name)

    def expanded(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot, *words = carry
        plgpu.barrier_wait(y.free.at[slot])
        begin(j, slot)
        return pipeline.next_slot(slot, STAGES), *_expand(codes, words, 0, work, j, slot, y)

    first = codes.load(work, work.tiles.begin, 0)
    return lax.fori_loop(work.tiles.begin, work.tiles.end, expanded, (slot, *first))[0]


def _expand(
    codes: Codes,
    words: list[jax.Array],
    share: int,
    work: Work,
    j: jax.Array,
    slot: jax.Array,
    y: Memory,
) -> list[jax.Array]:
    """Stores a share of tile `j`, which was loaded before, and begins to load the next tile's."""
    codes.store(words, slot, y, share)
    words = codes.load(work, j + 1, share)
    plgpu.commit_smem()
    plgpu.barrier_arrive(y.ready.at[slot])
    return words


# What attends -------------------------------------------------------------------------------------


def _scores(slot: jax.Array, y: Memory) -> jax.Array:
    kind = pipeline.array((ROWS, TILE), jnp.float32)

    def start(q: Any, k: Any, *total: Any) -> Any:
        return wgmma.start(q, k, swizzle=128, a_swizzle=128, total=total[0] if total else None)

    pairs = [(y.q.at[i], y.latent.at[slot, i]) for i in range(HALVES)]
    pairs.append((y.q_rope, y.rope.at[slot]))
    found: tuple[jax.Array, ...] = ()
    for q, k in pairs:
        kinds = pipeline.tile_type(q), pipeline.tile_type(k), *(_MATRIX for _ in found)
        found = (pipeline.inline(start, kinds, kind)(q, k, *found),)
    scores = _added(*found)
    if y.unit is not None:
        unit = pipeline.load(y.unit.at[slot], COLUMN)
        scores = scores * pipeline.along(unit, scores.shape, 1)
    return scores


def _units(slot: jax.Array, y: Memory, half: int, count: jax.Array | None) -> jax.Array:
    """Factors of half of a tile's tokens; 0 past the first `count`, if not None, and for NaN."""
    size = TILE // HALVES
    unit = pipeline.load(y.unit.at[slot, pl.ds(half * size, size)], COLUMN)
    if count is None:
        return unit
    is_there = pipeline.iota(COLUMN, size) + half * size < count
    return jnp.where(is_there & (jnp.abs(unit) < jnp.inf), unit, 0.0)


def _hide(
    scores: jax.Array, j: jax.Array, slot: jax.Array, work: Work, y: Memory, s: Settings
) -> jax.Array:
    """``-inf`` where a row does not see a token of a tile, and NaN in rows that see a NaN.

    Values that are not finite become 0 in shared memory, because a weight of 0 must cancel them;
    those of codes are finite, and `_units` of tokens that are not finite are 0.
    """
    count, words = work.length - j * TILE, None
    if s.codec is None:
        for i in range(HALVES):
            nonfinite.clean(y.latent.at[slot, i], y.nonfinite.at[i], count)
        plgpu.commit_smem()
        words = [y.nonfinite[0, i] | y.nonfinite[1, i] for i in range(TILE // nonfinite.BITS)]
    last = work.token_of() + (work.begin - j * TILE)
    key = pipeline.along(pipeline.iota(COLUMN, TILE), scores.shape, 1)
    seen, first = key <= pipeline.along(last, scores.shape, 0), jnp.zeros_like(last)
    if s.window is not None:
        first = last - s.window
        seen = seen & (key >= pipeline.along(first, scores.shape, 0))
    scores = jnp.where(seen, scores, -jnp.inf)
    return scores if words is None else nonfinite.spoil(scores, words, first, last)


def _attend(
    work: Work, slot: jax.Array, results: tuple[Ref, Ref], y: Memory, s: Settings
) -> jax.Array:
    """The weights of a program's rows, and the first half of their channels; the slot after."""
    factor = abs(s.scale) * LOG2_E

    def hand_over(half: int, p: jax.Array) -> None:
        """Hands weights of half of a tile's tokens to the warpgroup that sums the other half."""
        y.p[half] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(y.p_ready.at[half])

    def step(j: jax.Array, carry: tuple[jax.Array, ...], is_edge: bool) -> tuple[jax.Array, ...]:
        o, m, l, slot = carry
        plgpu.barrier_wait(y.ready.at[slot])
        count = work.length - j * TILE if is_edge else None

        def weighted(p: jax.Array, half: int) -> jax.Array:
            if s.codec is not None:
                p = p * pipeline.along(_units(slot, y, half, count), p.shape, 1)
            return p.astype(y.p.dtype)

        found = _scores(slot, y)
        if s.scale < 0:
            found = -found
        if is_edge:
            found = _hide(found, j, slot, work, y, s)
        m, alpha, l = softmax.maxima(found, m, l, factor)
        p, l = softmax.weights(found, m, l, factor, 0)
        o, p = softmax.rescaled(o, alpha), weighted(p, 0)
        o = _add(o, p, y.latent.at[slot, 0], 0)
        plgpu.barrier_wait(y.p_free)
        y.factor[...] = alpha
        hand_over(0, p)
        p, l = softmax.weights(found, m, l, factor, 1)
        p = weighted(p, 1)
        o = _add(o, p, y.latent.at[slot, 0], 1)
        hand_over(1, p)
        o = _added(o)
        plgpu.barrier_arrive(y.free.at[slot])
        return o, m, l, pipeline.next_slot(slot, STAGES)

    edge, plain = (functools.partial(step, is_edge=x) for x in (True, False))
    tiles, o = work.tiles, pipeline.full(0.0, (ROWS, HALF), _MATRIX)
    carry = (o, pipeline.full(-jnp.inf, (ROWS,), ROW), pipeline.full(0.0, (ROWS,), ROW), slot)
    pl.when(work.is_any)(lambda: plgpu.barrier_wait(y.q_ready))
    if s.window is not None:
        carry = lax.fori_loop(tiles.begin, tiles.inner, edge, carry)
    carry = lax.fori_loop(tiles.inner, tiles.outer, plain, carry)
    o, m, l, slot = lax.fori_loop(tiles.outer, tiles.end, edge, carry)
    pl.when(work.is_any)(lambda: plgpu.barrier_arrive(y.q_free))
    l = softmax.total(l)
    nothing = (work.token_of() >= work.real) | (l == 0)
    # A constant plus a scalar is a row array that loops can carry.
    broken = jnp.where(work.is_broken, jnp.nan, 0.0)
    share = jnp.where(nothing, 0.0, 1.0 / l) + broken
    plgpu.barrier_wait(y.p_free)
    y.factor[...] = share
    plgpu.commit_smem()
    plgpu.barrier_arrive(y.p_ready.at[0])
    lse = jnp.where(nothing, -jnp.inf, m * (1 / LOG2_E) + jnp.log(l)) + broken
    _store(o, share, jnp.int32(0), work, results[0])
    numbers(lse, results[1], work.base, work.first, work.rows)
    return slot


# What both do -------------------------------------------------------------------------------------


def _add(o: jax.Array, p: Any, values: Ref, half: int) -> jax.Array:
    """Starts to add weights `p` of half of a tile's tokens times its values ``[64, 256]`` to `o`.

    The result must not be touched before `_added`, but by another such call.
    """

    def f(o: Any, p: Any, values: Any) -> Any:
        given = {"a_swizzle": pipeline.swizzle_of(TILE // 2, dtype)} if is_memory else {}
        return wgmma.start(
            p,
            values,
            swizzle=128,
            total=o,
            rows_are_depth=True,
            first=half * (TILE // 32),
            **given,
        )

    dtype, is_memory = values.dtype, not isinstance(p, jax.Array)
    kinds = _MATRIX, pipeline.tile_type(p) if is_memory else _MATRIX, pipeline.tile_type(values)
    return pipeline.inline(f, kinds, pipeline.array(o.shape, jnp.float32))(o, p, values)


def _added(o: jax.Array) -> jax.Array:
    plgpu.wgmma_wait(0)
    # Nothing that reads it comes before the wait.
    kind = pipeline.array(o.shape, jnp.float32)
    return pipeline.inline(mgpu.optimization_barrier, (_MATRIX,), kind)(o)


def _store(o: jax.Array, share: jax.Array, half: jax.Array, work: Work, out: Ref) -> None:
    share = pipeline.along(share, o.shape, 0)
    # Rows that see nothing may have summed tokens of other rows.
    o = jnp.where(share == 0, 0.0, o * share)
    channels(o, out, work.base, work.first, work.rows, half * HALF)


# What sums the other half -------------------------------------------------------------------------


def _follow(work: Work, slot: jax.Array, out: Ref, x: Inputs, y: Memory, s: Settings) -> jax.Array:
    """Computes the second half of the channels of a program's rows; returns the slot after.

    While the first warpgroup finds a tile's weights, this one expands its share of the next tile.
    """
    codes = None if s.codec is None else Codes(x, s.codec, jnp.dtype(x.q.dtype).name)

    def factors() -> jax.Array:
        plgpu.barrier_wait(y.p_ready.at[0])
        return pipeline.load(y.factor, ROW)

    def expanded(words: list[jax.Array], j: jax.Array, slot: jax.Array) -> list[jax.Array]:
        if codes is None:
            return words

        def do(words: list[jax.Array]) -> list[jax.Array]:
            plgpu.barrier_wait(y.free.at[slot])
            return _expand(codes, words, 1, work, j, slot, y)

        return lax.cond(j < work.tiles.end, do, lambda words: words, words)

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o, slot, *words = carry
        following = pipeline.next_slot(slot, STAGES)
        words = expanded(words, j + 1, following)
        plgpu.barrier_wait(y.ready.at[slot])
        o = softmax.rescaled(o, factors())
        o = _add(o, y.p.at[0], y.latent.at[slot, 1], 0)
        plgpu.barrier_wait(y.p_ready.at[1])
        o = _added(_add(o, y.p.at[1], y.latent.at[slot, 1], 1))
        plgpu.barrier_arrive(y.free.at[slot])
        plgpu.barrier_arrive(y.p_free)
        return o, following, *words

    begin, end = work.tiles.begin, work.tiles.end
    words = [] if codes is None else expanded(codes.load(work, begin, 1), begin, slot)
    o = pipeline.full(0.0, (ROWS, HALF), _MATRIX)
    o, slot, *_ = lax.fori_loop(begin, end, step, (o, slot, *words))
    share = factors()
    plgpu.barrier_arrive(y.p_free)
    _store(o, share, jnp.int32(1), work, out)
    return slot


# The call -----------------------------------------------------------------------------------------


def _kernel(
    *refs: Ref, names: tuple[str, ...], s: Settings, heads: int, total: int, parts: int
) -> None:
    *inputs, out_ref, lse_ref = refs
    count = len(inputs) - len(names)
    x = Inputs(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))
    me, is_whole = lax.axis_index("warpgroup"), parts == 1
    share = pipeline.TileScheduler(total * (parts if x.parts is None else x.parts[0]))

    def body(**given: Ref) -> None:
        y = Memory(**given)

        def each(step: Any) -> None:
            """Calls ``step(work, slot)`` for each piece of work that is not empty."""

            def one(number: jax.Array, slot: jax.Array) -> jax.Array:
                work = Work(number, x, heads, s)
                if is_whole:
                    return step(work, slot)
                return lax.cond(work.is_any, functools.partial(step, work), lambda at: at, slot)

            share.loop(one)

        def consume() -> None:
            pipeline.free_at_first(STAGES, (y.free,))

            @pl.when(me == 0)
            def _() -> None:
                plgpu.barrier_arrive(y.q_free)
                each(lambda work, slot: _attend(work, slot, (out_ref, lse_ref), y, s))

            @pl.when(me == 1)
            def _() -> None:
                plgpu.barrier_arrive(y.p_free)
                each(lambda work, slot: _follow(work, slot, out_ref, x, y, s))

        def produce() -> None:
            each(lambda work, slot: _copy(work, slot, x, y, s))

        pipeline.divide(me, HALVES, s.registers, consume, produce)

    pl.run_scoped(body, collective_axes="warpgroup", **memory(x, s)._asdict())


def attend(
    query_latent: jax.Array,
    query_rope: jax.Array,
    latent: jax.Array,
    scale: jax.Array | None,
    rope: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_length: jax.Array | None,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to pages of latents.

    `query_latent` is ``[B, T, N, 512]`` and `query_rope` ``[B, T, N, 64]``, both bfloat16 or
    float16; query `t` of `n` real ones is at position ``length - n + t``. Pages of 16, 32, 64 or
    128 tokens hold `latent` ``[P, page_size, 512]`` of the same dtype or float8_e4m3fn, or uint8
    codes ``[P, page_size, 256]``; `scale` float32 ``[P, page_size]`` of each token's latent, None
    for 16 bits; and `rope` ``[P, page_size, 64]`` in the queries' dtype.

    int32: `block_tables` ``[B, max_pages]``, all within the pool; `lengths` ``[B]``, tokens held,
    negative for a sequence that cannot be read, whose results are NaN; `query_length` ``[B]``, the
    real queries, None if all are. Returns ``[B, T, N, 512]`` in the queries' dtype and the float32
    log-sum-exp ``[B, T, N]``.
    """
    batch, tokens, heads, _ = query_latent.shape
    if settings.tokens != tokens:
        raise ValueError(f"settings.tokens={settings.tokens} must be {tokens}, as query_latent has")
    count = tokens * heads
    pad = ((0, 0), (0, -count % _EIGHT), (0, 0))
    q, q_rope = (jnp.pad(a.reshape(batch, count, -1), pad) for a in (query_latent, query_rope))
    rows, places = q.shape[1], pl.cdiv(q.shape[1], ROWS)
    parts = tiles.most_parts(block_tables.shape[1] * rope.shape[1], tokens, settings)
    shapes = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, rows), jnp.float32),
    ]
    if parts > 1:
        shapes = [
            jax.ShapeDtypeStruct((parts, batch, rows, *last), jnp.float32)
            for last in ((LATENT,), ())
        ]
    total = batch * places
    given = {"query_lengths": query_length, "scale": scale}
    if total * parts > settings.programs and parts > 1:
        # Programs would go through parts that no sequence has.
        given["parts"] = tiles.count_parts(lengths, query_length, settings)
    given = {name: x for name, x in given.items() if x is not None}
    kernel = functools.partial(
        _kernel, names=tuple(given), s=settings, heads=heads, total=total, parts=parts
    )
    run = pipeline.launch(
        kernel,
        "turbojax_latent_hopper",
        tuple(shapes),
        total * parts,
        settings.programs,
        approx_math=True,
        # Rows are reduced by shuffles: there is no room for more.
        reduction_scratch_bytes=0,
    )
    arrays = (q, q_rope, latent, rope, block_tables, lengths, *given.values())
    out, lse = run(*arrays)
    if parts > 1:
        return join.join(out, lse, lengths, query_length, query_latent.shape, q.dtype, settings)
    out = out[:, :count].reshape(query_latent.shape)
    return out, lse[:, :count].reshape(batch, tokens, heads)
