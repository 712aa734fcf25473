"""New tokens to pages of every format, for Hopper: rotated, encoded and stored in one launch.

Roofline, for 4 sequences of 4,096 tokens, 8 KV heads of 128, H200: turbo4 84 MB, 20 us, and 330
instructions of a lane for 8 channels, 47 us, which are the floor; 16 bits 31 us, 8 bits 23. One
token is a launch and a chain of loads. Target: 70 us, copies 35 and 27, one token of 64 sequences
3. Seen: 78.6 us for turbo4, 2.0 to 2.4 for one token.

A lane has eight channels, so that a vector of 128 bfloat16 is 16 lanes' loads of 16 bytes, and
codes of any width fill whole bytes. Lanes of a warp work on 1 to 16 vectors. Several rounds of them
are loaded before the first is computed.

The bits are those of `turbojax.polar.encode` and `turbojax.caches.paged.formats`: sums in the same
order, squares whose sums do not depend on contraction, norms that comparisons decide.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax

from pallas_kernels.layouts import Codec
from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.hopper.paged import int8
from pallas_kernels.mosaic.hopper.paged.rotation import hadamard
from pallas_kernels.mosaic.lane import Bool, Float, Int, Pointer

NAME = "turbojax_paged_append_hopper"
CHANNELS = 8  # channels of a lane

_LANES = 32
_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
_LARGEST_NORM, _NAN_NORM = 65504.0, 0x7E00
# Sums of squares beyond which norms are 0, or too large for float16, whatever the codes are.
_TINY, _HUGE = 2.0**-60, 2.0**40
_SMALLEST_EXPONENT = (127 - 14) << 23  # of float16's normal numbers, as bits of float32
_EXPONENT, _LOW_BITS = 0x7F800000, 0xFFF


@dataclasses.dataclass(frozen=True)
class Float8:
    """8-bit floats of a vector divided by the pool's scale: e5m2 if `is_e5m2`, else e4m3."""

    is_e5m2: bool

    @property
    def largest(self) -> float:
        """The largest number; larger ones become NaN."""
        return 57344.0 if self.is_e5m2 else 448.0


@dataclasses.dataclass(frozen=True)
class Int8:
    """Integers of 8 bits and a scale, see `int8`."""


Stored = Codec | Float8 | Int8 | None  # how a side is stored; None: unchanged


@dataclasses.dataclass(frozen=True)
class Settings:
    sides: tuple[Stored, Stored]  # how keys, and how values, are stored
    dtype: str  # of the vectors, ``"bfloat16"``, ``"float16"`` or ``"float32"``
    vectors: int  # of a side in this call, ``B * T * K``
    tokens: int  # of a sequence in this call, `T`
    heads: int  # `K`
    head_dim: int  # `H`, a power of two from 16 to 256
    page_size: int  # a power of two
    num_pages: int  # `P`
    entries: int  # of a sequence in the block tables
    rounds: int  # how often a warp takes vectors
    max_length: int | None = None  # sequences with fewer tokens have a new one

    @property
    def lanes(self) -> int:
        return self.head_dim // CHANNELS

    @property
    def together(self) -> int:
        return _LANES // self.lanes

    def vector_bytes(self, side: int) -> int:
        """Bytes of a stored vector of keys, or of values, besides its norm."""
        stored = self.sides[side]
        if stored is None:
            return self.head_dim * _WIDTH[self.dtype]
        return self.head_dim * (stored.bits if isinstance(stored, Codec) else 8) // 8

    @property
    def programs(self) -> int:
        return -(-self.vectors // (lanes.WARPS * self.rounds * self.together))


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    vectors: Pointer  # ``[vectors, H]``
    data: Pointer  # ``[P, K, page_size, W]``
    norms: Pointer | None  # float16 ``[P, K, page_size]``: norms of codes, or scales of int8
    scale: Pointer | None  # float32 ``[]``, of 8-bit floats

    def store(self, at: "Place", store: "Store", vector_bytes: int) -> None:
        """Stores a vector in its place in the pool."""
        norm = None if self.norms is None else self.norms.times(at.index, 2)
        store(self.data.times(at.index, vector_bytes), norm)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    tables: Pointer  # int32 ``[B, entries]``
    lengths: Pointer  # int32 ``[B]``, tokens held before
    new_lengths: Pointer | None  # int32 ``[B]``; None for `Settings.max_length`
    signs: Pointer | None  # float32 ``[H]``, the rotation's, if there are codes
    sides: tuple[Side, ...]
    dropped_tokens: Pointer  # int32 ``[]``


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where a vector goes."""

    index: Int  # among the pool's vectors
    kept: Bool  # whether it is stored there
    is_dropped: Bool  # whether it should be stored and has no place
    # Tokens that are announced but not in the call, counted at one vector of each sequence.
    promised: Int


def append(
    vectors: tuple[jax.Array, jax.Array],
    signs: jax.Array | None,
    scales: tuple[jax.Array | None, jax.Array | None],
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
    data: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array | None, jax.Array | None],
    dropped_tokens: jax.Array,
    s: Settings,
) -> tuple[list[jax.Array], list[jax.Array | None], jax.Array]:
    """Stores tokens, and counts those without a page in the pool.

    For keys and values: `vectors` ``[B * T * K, H]``; `scales` float32 ``[1]`` or None; the pool's
    `data` ``[P, K, page_size, W]`` and `norms` float16 ``[P, K, page_size]`` or None. `signs` are
    float32 ``[H]`` if there are codes. int32: `block_tables` ``[B, entries]``; `lengths` ``[B]``,
    tokens held before; `new_lengths` ``[B]``, how many of the `T` tokens are stored, the first
    ones; `dropped_tokens` ``[1]``. Returns data, norms and `dropped_tokens`, in their own memory if
    they were donated.
    """
    optional = (signs, *scales)
    inputs = [block_tables, lengths, new_lengths, *vectors, *_there(optional)]
    arrays = [*data, *_there(norms), dropped_tokens]
    given = tuple(x is not None for x in (*optional, *norms))

    def body(pointers: list[Pointer], ids: list[Int]) -> None:
        _program(_arrays(pointers, given), ids[0], ids[1], s)

    grid = {"tile": s.programs, "side": 2}
    written = lanes.update(body, NAME, inputs, arrays, grid=grid, warpgroups=1)
    rest = iter(written[2:-1])
    new_norms = [next(rest) if x is not None else None for x in norms]
    return written[:2], new_norms, written[-1]


def _there(arrays: Sequence[jax.Array | None]) -> list[jax.Array]:
    return [x for x in arrays if x is not None]


def _arrays(pointers: list[Pointer], given: tuple[bool, ...]) -> Arrays:
    """Pointers by name, in the order of `append`'s arguments, some of which may be missing."""
    tables, lengths, new_lengths, key, value, *rest = pointers
    others = iter(rest)
    signs, key_scale, value_scale = (next(others) if g else None for g in given[:3])
    key_data, value_data = next(others), next(others)
    key_norms, value_norms = (next(others) if g else None for g in given[3:])
    sides = (
        Side(key, key_data, key_norms, key_scale),
        Side(value, value_data, value_norms, value_scale),
    )
    return Arrays(tables, lengths, new_lengths, signs, sides, next(others))


def _program(a: Arrays, tile: Int, side: Int, s: Settings) -> None:
    thread = lane.thread()
    warp = tile * lanes.WARPS + (thread >> 5)
    for i in range(2):
        with lane.when(side.equals(i)):
            write(a, i, warp, thread & (_LANES - 1), s)


def write(a: Arrays, side: int, warp: Int, number: Int, s: Settings) -> None:
    """Stores a warp's vectors: reads all rounds, then encodes and stores each.

    `side` is 0 for keys and 1 for values, `warp` the number among all warps of the side, `number`
    the lane's.
    """
    of_side, place = a.sides[side], number % s.lanes
    first = warp * (s.rounds * s.together) + number // s.lanes
    rows = [first + i * s.together for i in range(s.rounds)]
    loaded = [load(of_side.vectors, row, place, s) for row in rows]
    places = [find(a, row, s) for row in rows]
    encode = encoder(of_side.scale, s.sides[side], a.signs, place, s)
    for words, at in zip(loaded, places, strict=True):
        store = encode(words)
        with lane.when(at.kept):
            of_side.store(at, store, s.vector_bytes(side))
        if side == 0:
            count_dropped(a.dropped_tokens, at, place)


def load(vectors: Pointer, row: Int, place: Int, s: Settings) -> list[Int]:
    """A lane's channels as stored; past the end those of the last vector."""
    width = _WIDTH[s.dtype]
    start = vectors.times(row.minimum(s.vectors - 1), s.head_dim * width)
    return start.at(place * (CHANNELS * width)).words(CHANNELS * width // 4)


def find(a: Arrays, row: Int, s: Settings) -> Place:
    """The place of vector `row` of a side, as `turbojax.caches.paged.writing` finds it."""
    is_vector = row < s.vectors
    row = row.minimum(s.vectors - 1)
    token = row // s.heads
    head = row - token * s.heads
    sequence = token // s.tokens
    within = token - sequence * s.tokens
    # Where int32 overflows this wraps around to a negative number, which is out of range.
    position = a.lengths.at(sequence << 2).word() + within
    entry = position >> (s.page_size.bit_length() - 1)
    table = a.tables.times(sequence, 4 * s.entries)
    page = table.at(entry.minimum(s.entries - 1).maximum(0) << 2).word()
    has_entry = (position >= 0) & (entry < s.entries)
    has_page = has_entry & (page >= 0) & (page < s.num_pages)
    if a.new_lengths is not None:
        count = a.new_lengths.at(sequence << 2).word()
    else:
        assert s.max_length is not None
        count = (position < s.max_length).where(lane.integer(1), 0)
    wanted = is_vector & (within < count)
    is_first = is_vector & head.equals(0)
    promised = (is_first & within.equals(0)).where((count - s.tokens).maximum(0), 0)
    slot = position & (s.page_size - 1)
    index = (page * s.heads + head) * s.page_size + slot
    return Place(index, wanted & has_page, wanted & ~has_page & is_first, promised)


def count_dropped(dropped_tokens: Pointer, at: Place, place: Int) -> None:
    """Counts tokens that have no place; one lane of one vector of each token does it."""
    number = at.promised + at.is_dropped.where(lane.integer(1), 0)
    with lane.when(place.equals(0) & (number > 0)):
        dropped_tokens.add(number)


Store = Callable[[Pointer, Pointer | None], None]
"""Stores a lane's channels of a vector, given its place, and its norm or scale, given that's."""


def encoder(
    scale: Pointer | None, stored: Stored, signs: Pointer | None, place: Int, s: Settings
) -> Callable[[list[Int]], Store]:
    """What encodes a lane's channels of a vector, as `load` gives them."""
    if stored is None:
        return functools.partial(_plain, place, s)
    if isinstance(stored, Float8):
        assert scale is not None
        # The instruction that XLA uses, for the same bits.
        inverse = lane.divide(lane.number(1.0), scale.float())
        return functools.partial(_float8, inverse, stored, place, s)
    if isinstance(stored, Int8):
        return functools.partial(_int8, place, s)
    assert signs is not None
    words = signs.at(place * (4 * CHANNELS)).words(CHANNELS)
    return functools.partial(_codes, [w.as_float() for w in words], stored, place, s)


# Formats -----------------------------------------------------------------------------------------


def _plain(place: Int, s: Settings, words: list[Int]) -> Store:
    def store(vector: Pointer, norm: Pointer | None) -> None:
        del norm
        for i in range(0, len(words), 4):
            vector.at(place * (CHANNELS * _WIDTH[s.dtype]), 4 * i).store_words(words[i : i + 4])

    return store


def _float8(inverse: Float, kind: Float8, place: Int, s: Settings, words: list[Int]) -> Store:
    """Vectors divided by the scale, rounded to nearest; NaN where they do not fit."""
    x = [v * inverse for v in _numbers(words, s.dtype)]
    limit = lane.number(kind.largest)
    x = [(limit >= lane.absolute(v)).where(v, float("nan")) for v in x]
    pack = lane.pack_e5m2 if kind.is_e5m2 else lane.pack_e4m3
    floats = [pack(x[:4]), pack(x[4:])]
    return lambda vector, norm: vector.at(place * CHANNELS).store_words(floats)


def _int8(place: Int, s: Settings, words: list[Int]) -> Store:
    integers, scale = int8.encode(words, _numbers(words, s.dtype), s.lanes, s.dtype)

    def store(vector: Pointer, norm: Pointer | None) -> None:
        vector.at(place * CHANNELS).store_words(integers)
        _store_norm(norm, scale, place)

    return store


def _codes(signs: list[Float], codec: Codec, place: Int, s: Settings, words: list[Int]) -> Store:
    codes, bits_of_norm = encode(_numbers(words, s.dtype), signs, codec, place, s)

    def store(vector: Pointer, norm: Pointer | None) -> None:
        if codec.bits == 4:
            vector.at(place << 2).store(lane.total([c << 4 * i for i, c in enumerate(codes)]))
        else:
            low = lane.total([(c & 3) << 2 * i for i, c in enumerate(codes)])
            vector.at(place << 1).store_low(low, 16)
        if codec.bits == 3:
            high = lane.total([c >> 2 << _high_place(i) for i, c in enumerate(codes)])
            vector.at(place, s.head_dim // 4).store_low(high, 8)
        _store_norm(norm, bits_of_norm, place)

    return store


def _store_norm(norm: Pointer | None, bits: Int, place: Int) -> None:
    assert norm is not None
    with lane.when(place.equals(0)):
        norm.store_low(bits, 16)


def _high_place(i: int) -> int:
    """Where the highest of 3 bits goes, see `turbojax.polar.pack`."""
    p, j = divmod(i, 4)
    return 4 * (j // 2) + 2 * p + j % 2


def _numbers(words: list[Int], dtype: str) -> list[Float]:
    if dtype == "float32":
        return [w.as_float() for w in words]
    return [x for w in words for x in lane.half.unpack(w, dtype)]


# Codes: the arithmetic of `turbojax.polar.codec` --------------------------------------------------


def encode(
    x: list[Float], signs: list[Float], codec: Codec, place: Int, s: Settings
) -> tuple[list[Int], Int]:
    """Codes of a lane's channels, and the bits of the vector's float16 norm."""
    squares = _total([_square(v) if s.dtype == "float32" else v * v for v in x], place, s.lanes)
    is_tiny, is_bounded = squares < _TINY, lane.number(_HUGE) >= squares
    squares = (is_bounded & ~is_tiny).where(squares, 1.0)
    norm = is_tiny.where(0.0, lane.root(squares))
    # Of float32 that are not negative, bits are in the order of the numbers.
    thresholds = [(norm * t).as_int() for t in codec.thresholds]
    rotated = hadamard([v * f for v, f in zip(x, signs, strict=True)], place, s.lanes)
    found = [_nearest(v, thresholds, codec) for v in rotated]
    distances = [1 << i for i in range(s.lanes.bit_length() - 1)]
    parts = lane.total([part for _, part in found])
    chosen = lane.reduce_lanes(parts, operator.add, distances)
    corrected = _corrected(squares, chosen.to_float() * codec.unit)
    corrected = is_tiny.where(0.0, corrected)
    is_valid = is_bounded & (lane.number(_LARGEST_NORM) >= corrected)
    bits = lane.half.pack(corrected, lane.number(0.0)) & 0xFFFF
    return [is_bounded.where(code, 0) for code, _ in found], is_valid.where(bits, _NAN_NORM)


def _square(x: Float) -> Float:
    """A float32's square, with the same bits whether or not the compiler fuses multiply-adds."""
    high = (x.as_int() & ~_LOW_BITS).as_float()
    low = x - high
    return high * high + ((high + high) * low + low * low)


def _total(x: list[Float], place: Int, count: int) -> Float:
    """The sum over a vector's channels: the upper half is added to the lower one until one is left.

    Lanes that are half a vector apart come first. Each then keeps one half of what both have: which
    number is added to which makes no difference, so both compute the same sums.
    """
    shared = []
    distance = count // 2
    while distance:
        if len(x) > 1:
            half = len(x) // 2
            is_upper = (place & distance) > 0
            pairs = list(zip(x[:half], x[half:], strict=True))
            own = [is_upper.where(b, a) for a, b in pairs]
            given = [is_upper.where(a, b) for a, b in pairs]
            x = [a + lane.partner(b, distance) for a, b in zip(own, given, strict=True)]
            shared.append(distance)
        else:
            x = [v + lane.partner(v, distance) for v in x]
        distance //= 2
    for distance in shared:
        x = [v + lane.partner(v, distance) for v in x]
    while len(x) > 1:
        half = len(x) // 2
        x = [a + b for a, b in zip(x[:half], x[half:], strict=True)]
    return x[0]


def _nearest(x: Float, thresholds: list[Int], codec: Codec) -> tuple[Int, Int]:
    """The code of a coordinate, and its level's square."""
    # Ties go up: the magnitude of a negative number must exceed a threshold. That of -0 need not.
    negative = (x < 0.0).where(lane.integer(-1), 0)
    size = (x.as_int() & 0x7FFFFFFF) + negative
    half = 2 ** (codec.bits - 1)
    entries = [2 * half * square + half + i for i, square in enumerate(codec.squares)]
    chosen = lane.integer(entries[0])
    for threshold, entry in zip(thresholds, entries[1:], strict=True):
        chosen = (size >= threshold).where(entry, chosen)
    # half + i, or half - 1 - i.
    return (chosen ^ negative) & (2 * half - 1), chosen >> codec.bits


def _corrected(squares: Float, levels: Float) -> Float:
    """The root of ``squares / levels`` rounded to float16, still float32; infinite if too large.

    The result is approximate until a comparison decides, see `turbojax.polar.codec`.
    """
    guess = lane.root(lane.divide(squares, levels))
    exponent = (guess.as_int() & _EXPONENT).maximum(_SMALLEST_EXPONENT) - (10 << 23)
    quantum = exponent.as_float()
    inverse = (lane.integer(254 << 23) - exponent).as_float()
    whole = lane.floor(guess * inverse)
    middle = (whole + 0.5) * quantum
    up = (squares >= middle * middle * levels).where(lane.number(1.0), 0.0)
    too_large = squares > levels * _LARGEST_NORM**2
    return too_large.where(float("inf"), (whole + up) * quantum)
