"""INT4 weights times few tokens of 16 bits for Hopper.

Roofline, for weights of 14336 x 4096 and 16 tokens on an H200: 31 MB, 7.4 us; 11 instructions for
eight weights, 3.4 us. Target: 14 us. Seen: 13.3, for one token 10.6; of 4096 x 14336 16.2 and 11.1.

A warp takes 16 rows and 128 inputs at a time, a unit: 1 KB that lies together, which its lanes copy
some units ahead to shared memory of their own, convert in registers, and multiply with tokens that
they have copied, too; no warp waits for another. A program has some strips of 16 rows, and its
warps take the groups of inputs in turn, so that a warp's tokens serve all of these strips; in the
end the warps' sums are added up, always in the same order.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.hopper.matmul import epilogue
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.mosaic.products import int4_half

NAME = "turbojax_w4a16_few_hopper"
STRIP = 16  # rows of a warp's product
TILE = 8  # tokens of a warp's product
BLOCK_ROWS = 64
_GROUP, _BLOCK_BYTES, _UNIT_BYTES = 128, 4096, 1024
_STRIPS = BLOCK_ROWS // STRIP
_CHUNKS = 4  # Of 32 inputs of a group.
# Bytes of a unit: codes, then scales, then zero points.
_SLOT_BYTES, _SCALES_AT, _ZEROS_AT = 1088, 1024, 1056
# Bytes of a token's 128 inputs, and from one to the next, so that four rows are in other banks.
_ROW_BYTES, _ROW_STRIDE = 256, 288


@dataclasses.dataclass(frozen=True)
class Settings:
    strips: int  # of 16 rows, of a program
    warpgroups: int
    slots: int  # of a warp, for units that are being copied or in use; at least 2
    epilogue: Epilogue

    @property
    def warps(self) -> int:
        return self.warpgroups * lanes.WARPS

    @property
    def stride(self) -> int:
        """Numbers from token to token in shared memory, so that no two lanes meet in a bank."""
        return self.strips * STRIP + 4

    @property
    def token_slots(self) -> int:
        """Groups of inputs whose tokens a warp holds or copies: its own and the units' ahead."""
        return 1 + (self.strips + self.slots - 2) // self.strips

    def warp_bytes(self, tiles: int) -> int:
        """Memory of a warp's units and tokens."""
        return self.slots * _SLOT_BYTES + self.token_slots * tiles * TILE * _ROW_STRIDE

    def shared_bytes(self, tiles: int) -> int:
        """Memory of all warps' units and tokens, and later of their sums, for so many tiles."""
        return self.warps * max(self.warp_bytes(tiles), tiles * TILE * self.stride * 4)


def _is_gated(s: Settings) -> bool:
    return s.epilogue.outputs < BLOCK_ROWS


@dataclasses.dataclass(frozen=True, eq=False)
class _Arrays:
    """A call's arrays as pointers, its sizes and settings."""

    codes: Pointer
    scales: Pointer
    zeros: Pointer | None
    x: Pointer
    output_scales: Pointer
    bias: Pointer | None
    residual: Pointer | None
    out: Pointer
    memory: Pointer
    tokens: int
    rows: int
    groups: int
    dtype: str
    scale_dtype: str
    s: Settings

    @property
    def tiles(self) -> int:
        return -(-self.tokens // TILE)


@dataclasses.dataclass(frozen=True, eq=False)
class _Unit:
    """A lane's part of 16 rows and 128 inputs: codes, scale and zero point of its two rows."""

    codes: list[list[Int]]
    scales: list[Int]
    zeros: list[Int]


def _copy(
    a: _Arrays, strip: Int, group: Int, slot: Pointer, number: Int, is_real: lane.Bool
) -> None:
    """Starts the copies of a unit; zeros if it does not exist.

    A lane copies its own codes. The first lanes copy scales and zero points, 16 bytes each.
    """
    block = (strip // _STRIPS) * a.groups + group
    part = strip % _STRIPS
    at = a.codes.times(block, _BLOCK_BYTES).at(part * _UNIT_BYTES + number * 16)
    for half in range(2):
        lane.copy_words(at.at(512 * half), slot.at(number * 16, 512 * half), is_real)
    row = is_real.where(block * BLOCK_ROWS + part * STRIP, 0)
    size = 1 if a.scale_dtype == "e4m3" else 2
    with lane.when(number < size):
        source = a.scales.times(row, size).at(number.minimum(size - 1) * 16)
        lane.copy_words(source, slot.at(number * 16, _SCALES_AT), is_real)
    if a.zeros is not None:
        with lane.when(number.equals(2)):
            lane.copy_words(a.zeros.at(row), slot.at(_ZEROS_AT), is_real)
    lane.commit_copies()


def _load(a: _Arrays, slot: Pointer, number: Int) -> _Unit:
    codes = [slot.at(number * 16, 512 * half).words(4) for half in range(2)]
    row = number >> 2
    if a.scale_dtype == "e4m3":
        scales = [slot.at(row, _SCALES_AT + 8 * half).byte() for half in range(2)]
    else:
        scales = [slot.at(row << 1, _SCALES_AT + 16 * half).half() for half in range(2)]
    zeros = []
    if a.zeros is not None:
        zeros = [slot.at(row, _ZEROS_AT + 8 * half).byte() for half in range(2)]
    return _Unit(codes, scales, zeros)


def _copy_tokens(a: _Arrays, group: Int, slot: Pointer, number: Int, is_real: lane.Bool) -> None:
    """Starts the copies of all tokens' inputs of a group, 16 bytes each; zeros without a token."""
    row, column = number >> 4, (number & 15) << 4
    row_bytes = a.groups * _ROW_BYTES
    source = a.x.times(row, row_bytes).at(group * _ROW_BYTES + column)
    target = slot.at(row * _ROW_STRIDE + column)
    for first in range(0, a.tiles * TILE, 2):
        is_token = is_real & ((row + first) < a.tokens)
        lane.copy_words(source.at(first * row_bytes), target.at(first * _ROW_STRIDE), is_token)


def _tokens(a: _Arrays, slot: Pointer, number: Int) -> list[list[list[Int]]]:
    """The right operands' words of the lane's token, of each tile and each 32 inputs of a group."""
    own = slot.at((number >> 2) * _ROW_STRIDE + ((number & 3) << 3))
    out = []
    for tile in range(a.tiles):
        at = own.at(tile * TILE * _ROW_STRIDE)
        chunks = [[at.at(64 * i + 32 * half).words(2) for half in range(2)] for i in range(_CHUNKS)]
        out.append([int4_half.token_words(*both) for both in chunks])
    return out


def _values(a: _Arrays, unit: _Unit) -> tuple[list[list[list[Int]]], list[Float]]:
    """The left operands' words for both rows and each 32 inputs, and the factors of their sums."""
    if a.scale_dtype == "e4m3":
        scales, factors = zip(*[int4_half.e4m3_scale(x, a.dtype) for x in unit.scales], strict=True)
        words = [
            [
                [int4_half.round_to_e4m3(word >> (4 * i), scale, a.dtype) for i in range(4)]
                for word in row
            ]
            for row, scale in zip(unit.codes, scales, strict=True)
        ]
        return words, list(factors)
    subtracted = [int4_half.zero_word(int4_half.signed(x), a.dtype) for x in unit.zeros]
    subtracted = subtracted or [int4_half.zero_word(None, a.dtype)] * 2
    words = [
        [int4_half.integers(word, zero, a.dtype) for word in row]
        for row, zero in zip(unit.codes, subtracted, strict=True)
    ]
    return words, [int4_half.scale_of(x, a.scale_dtype) for x in unit.scales]


def _multiply(
    a: _Arrays, unit: _Unit, tokens: list[list[list[Int]]], sums: list[Float]
) -> list[Float]:
    """Adds a unit's products: four sums for each tile of tokens, as `lane.half.matmul` has them."""
    words, factors = _values(a, unit)
    out = []
    for tile, chunks in enumerate(tokens):
        total = [lane.number(0.0)] * 4
        for chunk, right in enumerate(chunks):
            pair = int4_half.operands([row[chunk] for row in words])
            for i, left in enumerate(pair):
                total = lane.half.matmul(left, right[2 * i : 2 * i + 2], total, a.dtype)
        before = sums[4 * tile : 4 * tile + 4]
        pairs = enumerate(zip(total, before, strict=True))
        out += [lane.fma(x, factors[i // 2], y) for i, (x, y) in pairs]
    return out


def _sums(a: _Arrays, first: Int, warp: Int, number: Int) -> list[Float]:
    """A warp's sums over its groups: four for each strip and tile of tokens."""
    s, count = a.s, 4 * a.tiles
    last = a.rows // STRIP - 1
    strips = [(first + i).minimum(last) for i in range(s.strips)]
    end, area = lane.integer(a.groups), a.memory.at(warp * s.warp_bytes(a.tiles))
    kept, token_bytes = area.at(s.slots * _SLOT_BYTES), a.tiles * TILE * _ROW_STRIDE

    def copy(group: Int, index: int, slot: Int | int, token_slot: Int | int) -> None:
        """Copies the unit of strip `index`; indices go on to the warp's next groups.

        With the first unit of a group its tokens are copied, to the slot that is as many further.
        """
        ahead, strip = divmod(index, s.strips)
        group = group + ahead * s.warps
        is_real = group < end
        if not strip:
            place = _wrapped(token_slot + ahead, s.token_slots)
            _copy_tokens(a, group, kept.at(place * token_bytes), number, is_real)
        _copy(a, strips[strip], group, area.at(slot * _SLOT_BYTES), number, is_real)

    def step(group: Int, state: list[Any]) -> list[Any]:
        *sums, slot, token_slot = state
        tokens: list[list[list[Int]]] = []
        for i in range(s.strips):
            lane.wait_for_copies(s.slots - 2)
            # All lanes' copies are done, and all have read the unit before, whose slot is next.
            lane.warp_barrier()
            free = slot.equals(0).where(s.slots - 1, slot - 1)
            copy(group, i + s.slots - 1, free, token_slot)
            tokens = tokens or _tokens(a, kept.at(token_slot * token_bytes), number)
            unit = _load(a, area.at(slot * _SLOT_BYTES), number)
            own = sums[count * i : count * (i + 1)]
            sums[count * i : count * (i + 1)] = _multiply(a, unit, tokens, own)
            slot = _wrapped(slot + 1, s.slots)
        return [*sums, slot, _wrapped(token_slot + 1, s.token_slots)]

    for i in range(s.slots - 1):
        copy(warp, i, i, 0)
    nothing = [lane.number(0.0)] * (count * s.strips)
    state: list[Any] = [*nothing, lane.integer(0), lane.integer(0)]
    sums = lane.loop(warp, end, s.warps, state, step)[: count * s.strips]
    lane.wait_for_copies(0)
    lane.block_barrier()
    return sums


def _wrapped(number: Any, count: int) -> Any:
    """The number of a slot, of one that may be past the last."""
    if isinstance(number, int):
        return number % count
    return (number < count).where(number, number - count)


def _put(a: _Arrays, sums: list[Float], warp: Int, number: Int) -> None:
    """Writes a warp's sums to shared memory ``[warps, tokens, stride]``."""
    s = a.s
    area = a.memory.at(warp * (a.tiles * TILE * s.stride * 4))
    place = ((number & 3) * (2 * s.stride) + (number >> 2)) << 2
    for i, x in enumerate(sums):
        strip, tile, which = i // (4 * a.tiles), i // 4 % a.tiles, i % 4
        at = (tile * TILE + which % 2) * s.stride + strip * STRIP + 8 * (which // 2)
        area.at(place, 4 * at).store(x)


def _total(a: _Arrays, token: Int, row: Int) -> list[Float]:
    place = (token * a.s.stride + row) << 2
    size = a.tiles * TILE * a.s.stride * 4
    found = [
        [x.as_float() for x in a.memory.at(place, size * i).words(4)] for i in range(a.s.warps)
    ]
    return [lane.total([values[i] for values in found]) for i in range(4)]


def _scaled(a: _Arrays, sums: list[Float], row: Int) -> list[Float]:
    factors = [x.as_float() for x in a.output_scales.at(row << 2).words(4)]
    if a.bias is None:
        return [x * f for x, f in zip(sums, factors, strict=True)]
    biases = [x.as_float() for x in a.bias.at(row << 2).words(4)]
    return [lane.fma(x, f, b) for x, f, b in zip(sums, factors, biases, strict=True)]


def _finish(a: _Arrays, token: Int, row: Int, column: Int, first: Int) -> None:
    """Writes four outputs of a token, from `column` of the output on.

    `row` is the first of their rows among the program's, `first` that of the program among all.
    """
    values = _scaled(a, _total(a, token, row), first + row)
    columns, activation, gate = a.rows, a.s.epilogue.activation, a.s.epilogue.gate
    if gate:
        columns = a.rows // 2
        up = _scaled(a, _total(a, token, row + 8), first + row + 8)
        values = [epilogue.activate(x, gate) * y for x, y in zip(values, up, strict=True)]
    else:
        values = [epilogue.activate(x, activation) for x in values]
    place = token * columns + column
    if a.residual is not None:
        held = [lane.half.unpack(w, a.dtype) for w in a.residual.times(place, 2).words(2)]
        values = [x + h for x, h in zip(values, [y for pair in held for y in pair], strict=True)]
    words = [lane.half.pack(values[i], values[i + 1], a.dtype) for i in (0, 2)]
    a.out.times(place, 2).store_words(words)


def _program(a: _Arrays, program: Int) -> None:
    s = a.s
    thread = lane.thread()
    warp, number = lane.uniform(thread >> 5), thread & 31
    first = program * s.strips
    _put(a, _sums(a, first, warp, number), warp, number)
    lane.block_barrier()
    row = first * STRIP
    is_gated = _is_gated(s)
    fours = s.strips * (2 if is_gated else 4)
    items = a.tokens * fours

    def step(index: Int, state: list[Any]) -> list[Any]:
        item = index + thread
        four = item % fours
        own = four << 2
        if is_gated:
            own = ((four >> 1) << 4) + ((four & 1) << 2)
        is_real = (item < items) & ((row + own) < a.rows)
        # The program's first output is real.
        token, four, own = (is_real.where(x, 0) for x in (item // fours, four, own))
        column = first * (STRIP // 2 if is_gated else STRIP) + (four << 2)
        with lane.when(is_real):
            _finish(a, token, own, column, row)
        return state

    lane.loop(lane.integer(0), lane.integer(items), 32 * s.warps, [], step)


def w4a16_few(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    x: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    settings: Settings,
) -> jax.Array:
    """Tokens times INT4 weights: ``act(o_n sum_g s_ng sum_k x_mk (q_nk - z_ng) + b_n) + r_mn``.

    `codes` are uint8 ``[N / 64, K / 128, 64, 64]``, see `turbojax.matmul.int4.weight`; `scales`
    ``[N / 64, K / 128, 64]``, e4m3, bfloat16 or float16; `zeros` int8 of that shape, -8 to 8, or
    None. With e4m3 scales weights are ``e4m3(s q)``, without zero points. `x` is bfloat16 or
    float16 ``[M, K]``, `output_scales` and `bias` float32 ``[N]``, `residual` ``[M, columns]`` in
    `x`'s dtype.

    Returns ``[M, columns]`` in `x`'s dtype, where columns are `N` or, of gated weights, half of it.
    """
    s = settings
    (blocks, groups), tokens = codes.shape[:2], x.shape[0]
    rows = blocks * BLOCK_ROWS
    names = {"float8_e4m3fn": "e4m3"}
    scale_dtype = names.get(scales.dtype.name, scales.dtype.name)
    if scale_dtype == "e4m3":
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    optional = [zeros, bias, residual]
    given = [codes, scales, x, output_scales, *[y for y in optional if y is not None]]

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        *inputs, out, memory = arrays
        rest = inputs[4:]
        zero, b, r = (None if y is None else rest.pop(0) for y in optional)
        a = _Arrays(
            codes=inputs[0],
            scales=inputs[1],
            zeros=zero,
            x=inputs[2],
            output_scales=inputs[3],
            bias=b,
            residual=r,
            out=out,
            memory=memory,
            tokens=tokens,
            rows=rows,
            groups=groups,
            dtype=x.dtype.name,
            scale_dtype=scale_dtype,
            s=s,
        )
        _program(a, ids[0])

    columns = rows // 2 if _is_gated(s) else rows
    out = jax.ShapeDtypeStruct((tokens, columns), x.dtype)
    programs = -(-rows // (STRIP * s.strips))
    [result] = lanes.launch(
        body,
        NAME,
        given,
        [out],
        grid={"program": programs},
        warpgroups=s.warpgroups,
        shared=s.shared_bytes(-(-tokens // TILE)),
    )
    return result
