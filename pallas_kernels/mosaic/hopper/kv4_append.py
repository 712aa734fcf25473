"""New tokens to caches of codes with a scale for each token (KV4, K8V4), for Hopper, in one launch.

Roofline: one token of each of 64 sequences, 8 KV heads of 128, moves 0.33 MB, which is nothing: a
launch, and a chain of two loads, a maximum over the warp and the stores. Target: 3 us. Seen on an
H200: 1.8 us for K8V4; 4 sequences of 256 tokens, 1.2 us of memory, 5.2 to 6.5.

A warp takes a vector at a time: a lane four channels and the four that lie half a head later, which
share a word of codes. A sequence of few new tokens is one program's, which reads its length, and
writes the new one after all of its warps have read it; many tokens are shared out to programs, and
lengths are counted by the caller.

The bits are those of `turbojax.caches.token_scaled.codes`: scales are rounded to bfloat16
first, and a code is settled by comparisons of numbers that float32 holds exactly.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from pallas_kernels.layouts import E4M3_MAX, float32
from pallas_kernels.mosaic import lane, lanes, warp
from pallas_kernels.mosaic.lane import Float, Int, Pointer

NAME = "turbojax_kv4_append_hopper"

_LANES, _LARGEST_CODE = 32, 7
_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bits of float32: all but the sign, infinity, one, the smallest normal number.
_MAGNITUDE, _INFINITY, _ONE, _TINY = 0x7FFFFFFF, 0x7F800000, 0x3F800000, 0x00800000
_NAN = 0x7FC00000
# Of one program: vectors of both sides, and warps.
_FEW, _MOST_WARPS, _SHARED_WARPS = 64, 32, 8


@dataclasses.dataclass(frozen=True)
class Settings:
    dtype: str  # of the vectors, ``"bfloat16"``, ``"float16"`` or ``"float32"``
    has_e4m3_keys: bool  # whether keys are e4m3, not 4-bit codes
    tokens: int  # of a sequence in this call, `T`
    heads: int  # `K`
    head_dim: int  # `H`, a multiple of 8
    rows: int  # of a sequence and head, `S`
    max_length: int  # tokens that a sequence may have

    @property
    def vectors(self) -> int:
        return 2 * self.tokens * self.heads

    @property
    def counts(self) -> bool:
        """Whether one program takes a sequence, and so counts its tokens."""
        return self.vectors <= _FEW

    @property
    def warps(self) -> int:
        return min(_MOST_WARPS, -(-self.vectors // 4) * 4) if self.counts else _SHARED_WARPS

    @property
    def shares(self) -> int:
        return 1 if self.counts else -(-self.vectors // (4 * self.warps))


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """One side's arrays: vectors ``[B, T, K, H]``, scales bfloat16 ``[B, K, S]``.

    Codes are ``[B, K, S, H / 2]``, or e4m3 ``[B, K, S, H]``.
    """

    vectors: Pointer
    codes: Pointer
    scales: Pointer
    is_e4m3: bool


def append(
    key: jax.Array,
    value: jax.Array,
    new_lengths: jax.Array,
    arrays: Sequence[jax.Array],
    s: Settings,
) -> list[jax.Array]:
    """Stores the first `new_lengths` tokens of each sequence where there is room for them.

    `key` and `value` are ``[B, T, K, H]``, `new_lengths` int32 ``[B]``, and `arrays` the cache's:
    key codes, key scales, value codes, value scales, int32 lengths ``[B]`` and bool ``[B]``,
    whether tokens were left out. Returns the arrays, in their own memory if they were donated; the
    last two are unchanged unless `Settings.counts`.
    """
    grid = {"share": s.shares, "sequence": key.shape[0]}
    body = functools.partial(_program, s=s)
    given = arrays if s.counts else arrays[:4]
    inputs = [key, value, new_lengths, *arrays[len(given) : 5]]
    written = lanes.update(body, NAME, inputs, given, grid=grid, warpgroups=s.warps // 4)
    return [*written, *arrays[len(given) :]]


def _program(pointers: list[Pointer], ids: list[Int], s: Settings) -> None:
    key, value, asked, *rest = pointers
    lengths = rest[4] if s.counts else rest.pop(0)
    sides = (
        Side(key, rest[0], rest[1], s.has_e4m3_keys),
        Side(value, rest[2], rest[3], is_e4m3=False),
    )
    share, sequence = ids
    held, wanted = (x.at(sequence << 2).word() for x in (lengths, asked))
    room = (lane.integer(s.max_length) - held).minimum(s.tokens)
    accepted = wanted.maximum(0).minimum(room)
    thread = lane.thread()
    own, number = lane.uniform(thread >> 5), thread & (_LANES - 1)
    first = share * s.warps + own

    def write(vector: Int, _: list[Int]) -> list[Int]:
        side, within = vector & 1, vector >> 1
        for i in (0, 1):
            with lane.when(side.equals(i)):
                _write(sides[i], sequence, within, held, accepted, number, s)
        return []

    lane.loop(first, lane.integer(s.vectors), s.shares * s.warps, [], write)
    if s.counts:
        lane.block_barrier()
        with lane.when(thread.equals(0)):
            lengths.at(sequence << 2).store(held + accepted)
        with lane.when(thread.equals(0) & (wanted > accepted)):
            rest[5].at(sequence).store_low(lane.integer(1), 8)


def _write(
    to: Side, sequence: Int, vector: Int, held: Int, accepted: Int, number: Int, s: Settings
) -> None:
    """Stores vector ``token * K + head`` of a sequence."""
    token = vector // s.heads
    head = vector - token * s.heads
    words = range(0, s.head_dim // 8, _LANES)
    places = [number + first for first in words]
    # Lanes past the end read the last channels once more, which changes no maximum.
    inside = [place.minimum(s.head_dim // 8 - 1) for place in places]
    width = _WIDTH[s.dtype]
    index = (sequence * s.tokens + token) * s.heads + head
    row = to.vectors.times(index, s.head_dim * width)
    x = [_load(row.at(place * (4 * width)), s) for place in inside]
    bits = [v.as_int() & _MAGNITUDE for part in x for half in part for v in half]
    top = lane.largest_of_warp(functools.reduce(lambda a, b: a.maximum(b), bits))
    stays = (token < accepted) & (token >= accepted - s.rows)
    at = (sequence * s.heads + head) * s.rows + (held + token).maximum(0) % s.rows
    is_bad = top >= _INFINITY
    scale = (_e4m3_scale if to.is_e4m3 else _code_scale)(is_bad.where(0, top))
    inverse = lane.number(1.0) / scale
    for place, (low, high) in zip(places, x, strict=True):
        with lane.when(stays & (place < s.head_dim // 8)):
            if to.is_e4m3:
                stored = to.codes.times(at, s.head_dim).at(place << 2)
                for half, offset in ((low, 0), (high, s.head_dim // 2)):
                    code = lane.pack_e4m3([v * inverse for v in half])
                    stored.at(offset).store(is_bad.where(0x7F7F7F7F, code))
            else:
                codes = [_code(v, scale, inverse) & 15 for v in (*low, *high)]
                shifts = (0, 8, 16, 24, 4, 12, 20, 28)
                word = lane.total([c << i for c, i in zip(codes, shifts, strict=True)])
                to.codes.times(at, s.head_dim // 2).at(place << 2).store(is_bad.where(0, word))
    with lane.when(stays & number.equals(0)):
        upper = is_bad.where(_NAN, scale.as_int()) >> 16
        to.scales.times(at, 2).store_low(upper, 16)


def _load(at: Pointer, s: Settings) -> tuple[list[Float], list[Float]]:
    """Four channels, and the four that lie half a head later."""
    width = _WIDTH[s.dtype]
    low, high = (
        [v for word in at.at(offset).words(width) for v in warp.numbers(word, s.dtype)]
        for offset in (0, s.head_dim // 2 * width)
    )
    return low, high


def _rounded(x: Float) -> Int:
    """Bits of a positive number, rounded to bfloat16."""
    bits = x.as_int()
    return (bits + (((bits >> 16) & 1) + 0x7FFF)) & -0x10000


def _code_scale(top: Int) -> Float:
    """The scale of 4-bit codes, from the bits of the largest magnitude."""
    bits = _rounded(top.as_float() * float32(1 / _LARGEST_CODE))
    return (bits < _TINY).where(_ONE, bits).as_float()


def _e4m3_scale(top: Int) -> Float:
    """The scale of e4m3: at least the smallest normal number; 1 if the maximum is below that."""
    bits = (top.as_float() * float32(1 / E4M3_MAX)).as_int().maximum(_TINY)
    return (top < _TINY).where(_ONE, _rounded(bits.as_float())).as_float()


def _code(x: Float, scale: Float, inverse: Float) -> Int:
    """``rint(x / scale)``, clipped to -8 .. 7."""
    return warp.settled_code(x, x * inverse, scale, -_LARGEST_CODE - 1, _LARGEST_CODE)
