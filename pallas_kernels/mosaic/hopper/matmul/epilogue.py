"""What becomes of the sums of an INT4 x FP8 product: scales, bias, activation, residual, output."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments
from pallas_kernels.mosaic.lane.fragments import ROWS

_GELU = (math.sqrt(2 / math.pi), 0.044715)
# Of gated activations, that of the gate.
_GATES = {"swiglu": "silu", "geglu": "gelu"}


@dataclasses.dataclass(frozen=True)
class Epilogue:
    # None, ``"silu"``, ``"gelu"``; of gated weights ``"swiglu"`` or ``"geglu"``.
    activation: str | None
    has_bias: bool
    has_residual: bool  # whether something is added at the end
    dtype: str  # ``"bfloat16"`` or ``"float16"``
    swizzle: int  # bytes over which rows of the output in shared memory are interleaved; 0 for none

    @property
    def outputs(self) -> int:
        return ROWS // 2 if self.gate else ROWS

    @property
    def gate(self) -> str | None:
        """The activation of a gate; None if the weight is not gated."""
        return _GATES.get(self.activation or "")


def _sigmoid_times(x: Float) -> Float:
    """``x * sigmoid(x)``; -0 for values so negative that ``exp`` overflows."""
    e = lane.exp2(x * -LOG2_E)
    return x * lane.reciprocal(e + 1.0)


def activate(x: Float, kind: str | None) -> Float:
    """SiLU or GELU of a number, or the number itself."""
    if kind == "silu":
        return _sigmoid_times(x)
    if kind == "gelu":
        # x / 2 * (1 + tanh(y)) is x * sigmoid(2 y).
        y = x * (lane.fma(x * x, _GELU[1], 1.0) * (2 * _GELU[0] * LOG2_E))
        return x * lane.reciprocal(lane.exp2(-y) + 1.0)
    return x


def place(token: Int, byte: Int, e: Epilogue) -> Int:
    """The offset in shared memory ``[tokens, outputs]`` of a token's 16 bytes from `byte` on."""
    line = token * (2 * e.outputs) + byte
    if e.swizzle == 0:
        return line
    # Swizzled: chunks of 16 bytes are permuted by the number of their row of 128 bytes.
    mask = e.swizzle // 16 - 1
    return line ^ (((line >> 7) & mask) << 4)


def _address(out: Any, token: Int, byte: Int, e: Epilogue) -> Int:
    return Int(Pointer.to(out).address()) + place(token, byte, e)


def _row_factors(ref: Any, row: Int) -> list[Float]:
    """Factors of the lane's two rows; for rows that do not exist, those of some other row."""
    last = ir.MemRefType(ref.type).shape[0] - 1
    rows = [(row + 8 * half).minimum(last) for half in range(2)]
    return [Pointer.to(ref).at(x << 2).float() for x in rows]


def finish(
    sums: Any,
    span: tuple[int, int],
    token_scales: Any,
    output_scales: Any,
    bias: Any | None,
    out: Any,
    first_row: Any,
    e: Epilogue,
) -> None:
    """Writes the outputs of a warpgroup's `sums`, float32 ``[64, tokens]``, to shared memory `out`.

    `span` is the first token and how many to write, a multiple of 8. `out` is
    ``[span[1], outputs]`` and holds the residual, if there is one. `token_scales` are bfloat16
    ``[tokens]`` in shared memory; `output_scales` and `bias` float32 in global memory, of all rows;
    `first_row` is the number of the first of these rows.
    """
    row, t = fragments.row_and_place()
    at = row + lane.scalar(first_row)
    factors = _row_factors(output_scales, at)
    biases = [lane.number(0.0)] * 2 if bias is None else _row_factors(bias, at)
    number = lane.special("laneid")
    warp_byte = (row >> 4) * (16 if e.gate else 32)
    blocks = []
    for pair in _scaled(sums, span, token_scales, t):
        values = [
            [lane.fma(v, factors[half], biases[half]) for v in pair[half]] for half in range(2)
        ]
        if e.gate:
            blocks.append([activate(g, e.gate) * u for g, u in zip(*values, strict=True)])
        else:
            blocks += [[activate(v, e.activation) for v in pair] for pair in values]
    # A block is eight outputs of eight tokens; lanes 8 i .. 8 i + 7 point to the tokens of block i.
    per_token = 1 if e.gate else 2
    block_number = number >> 3
    begin = 0
    while begin < len(blocks):
        at_once = next(n for n in (4, 2, 1) if n <= len(blocks) - begin)
        some = blocks[begin : begin + at_once]
        block = (block_number if at_once == 4 else block_number & (at_once - 1)) + begin
        begin += at_once
        token = ((block >> (per_token - 1)) << 3) + (number & 7)
        byte = warp_byte + ((block & (per_token - 1)) << 4)
        address = _address(out, token, byte, e)
        if e.has_residual:
            held = [lane.half.unpack(w, e.dtype) for w in lane.load_matrices(address, len(some))]
            some = [
                [v + h for v, h in zip(pair, old, strict=True)]
                for pair, old in zip(some, held, strict=True)
            ]
        lane.store_matrices(address, [lane.half.pack(pair[0], pair[1], e.dtype) for pair in some])


def partial_sums(sums: Any, span: tuple[int, int], out: Any) -> None:
    """Writes float32 sums of the tokens in `span` to shared memory ``[span[1], 64]``."""
    row, t = fragments.row_and_place()
    for half, values in enumerate(fragments.by_row(sums)):
        for j in range(span[0] // 4, sum(span) // 4):
            token = (t << 1) + (4 * j - span[0] if j % 2 == 0 else 4 * (j - 1) + 1 - span[0])
            place = (token * ROWS + row + 8 * half) << 2
            Pointer.to(out).at(place).store(values[j])


def _scaled(
    sums: Any, span: tuple[int, int], token_scales: Any, t: Int
) -> Iterator[list[list[Float]]]:
    """Sums times the tokens' scales, eight tokens at a time: the lane's two tokens of both rows."""
    rows = fragments.by_row(sums)
    for j in range(span[0] // 8, sum(span) // 8):
        word = Pointer.to(token_scales).at((t << 2) + (16 * j)).word()
        scales = lane.half.unpack(word, "bfloat16")
        yield [[row[2 * j + i] * scales[i] for i in range(2)] for row in rows]


def _places(sums: Any, memory: Any) -> Iterator[tuple[int, int, Pointer]]:
    """An accumulator's numbers: row, place in the row, and address, contiguous over lanes."""
    thread = lane.special("tid.x") & 127
    base = Pointer.to(memory).at(thread << 2)
    columns = len(fragments.by_row(sums)[0])
    for half in range(2):
        for j in range(columns):
            yield half, j, base.at((half * columns + j) * 512)


def put(sums: Any, memory: Any) -> None:
    """Writes a warpgroup's sums to shared memory, from where `add` reads them."""
    rows = fragments.by_row(sums)
    for half, j, place in _places(sums, memory):
        place.store(rows[half][j])


def add(sums: Any, memory: Any) -> Any:
    """Adds the sums that another warpgroup wrote with `put`."""
    rows = fragments.by_row(sums)
    for half, j, place in _places(sums, memory):
        rows[half][j] = rows[half][j] + place.float()
    return fragments.of_rows(rows)


# Sums that go from program to program through global memory: contiguous over lanes, 16 bytes each.


def _own(which: Any, numbers: int, sums: Any, done: Any) -> tuple[Pointer, Pointer]:
    """A lane's place in a warpgroup's sums in global memory, and the word that says they are."""
    which, thread = lane.scalar(which), lane.special("tid.x") & 127
    return Pointer.to(sums).times(which, 512 * numbers).at(thread << 4), Pointer.to(done).at(
        which << 2
    )


def hand_over(total: Any, which: Any, sums: Any, done: Any) -> None:
    """Stores a warpgroup's sums in global memory, and sets word `which` of `done` after it."""
    numbers = [x for row in fragments.by_row(total) for x in row]
    target, word = _own(which, len(numbers), sums, done)
    for i in range(0, len(numbers), 4):
        target.at(128 * i * 4).store_words([x.as_int() for x in numbers[i : i + 4]])
    lane.warpgroup_barrier()
    with lane.when((lane.special("tid.x") & 127).equals(0)):
        lane.release(word)


def take_over(total: Any, which: Any, sums: Any, done: Any) -> Any:
    """Adds to `total` what another program hands over as `which`, when it has done so."""
    numbers = [x for row in fragments.by_row(total) for x in row]
    source, word = _own(which, len(numbers), sums, done)
    lane.acquire(word)
    for i in range(0, len(numbers), 4):
        for j, x in enumerate(source.at(128 * i * 4).words_of_others()):
            numbers[i + j] = numbers[i + j] + x.as_float()
    half = len(numbers) // 2
    return fragments.of_rows([numbers[:half], numbers[half:]])
