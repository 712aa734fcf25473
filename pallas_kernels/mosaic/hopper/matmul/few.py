"""INT4 weights times e4m3 activations of few tokens, up to 64, for Hopper (FireQ, section 3.1.1).

Roofline, for weights of 14336 x 4096 on an H200: 30 MB, 7 us; conversion takes 112 of some 240
clocks that a tile has, products 64 for 16 tokens and 256 for 64. Target: 13 us for 16 tokens, 12.5
for one, 15 for 64. Seen: 12.2, 11.7 and 20.1. Of 14.1 us 11.2 are left without conversion, 12.9
without adding up a cluster's sums.

Every warpgroup takes 64 rows and a share of the inputs, one tile after the other. One of its lanes
copies tiles ahead to slots of its own; nobody else waits for them. Weights are rows of the product
and come from registers, where they are converted; tokens are columns, and lie in shared memory for
as many inputs as fit. Warpgroups that share rows are of one program, or of a cluster of them; their
sums are added up in the order of the inputs. How many there are follows from the weight's shape
alone, so a token's result does not depend on other tokens.

Weights are two operands: what is not negative, and, subtracted, what is. A permutation of bytes
whose selector has its fourth bit set takes a byte's sign for it, zero in a table of magnitudes; so
no third one has to choose between the two. The matrix units have the time.

A warpgroup converts a tile, multiplies, waits, and only then goes on: the other warpgroups of the
multiprocessor fill its waits. Where the registers of the next product's operand are written during
a product, as in `int4.py`, ptxas lets it wait after each of the instructions (its message C7513),
and nothing is hidden; as it is here they follow one another.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.hopper.matmul import epilogue
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.hopper.matmul.few_inputs import (
    PITCH,
    ROWS,
    THREADS,
    Arrays,
    Operand,
    Weights,
    Work,
    load_token_scales,
    load_tokens,
)
from pallas_kernels.mosaic.hopper.matmul.few_inputs import Memory as Memory
from pallas_kernels.mosaic.hopper.matmul.few_inputs import Settings as Settings
from pallas_kernels.mosaic.hopper.matmul.rounding import load_rounded
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import TABLE_BYTES, TABLES

# A program ---------------------------------------------------------------------------------------


def _program(a: Arrays, ids: list[Int], smem: Pointer, s: Settings) -> None:
    m = Memory.of(s, a.groups, a.scale_bytes)
    number = lane.uniform(lane.thread() >> 7)
    work = Work.of(a, ids, number, s)
    scales = s.share_of(a.groups) * ROWS * a.scale_bytes
    # Hidden from the compiler, which would compute it again for every tile.
    zero = lane.held(0)
    row, t = lane.fragments.row_and_place()
    here = row + zero, t + zero
    own = smem.at(lane.integer(m.slots)).at(number * s.slots_bytes)
    weights = Weights(
        a=a,
        work=work,
        slots=own,
        scales=smem.at(lane.integer(m.scales)).at(number * scales),
        factors=smem.at(lane.integer(m.factors)).at(number * (2 * ROWS * 4)),
        tables=smem.at(lane.integer(m.tables)),
        barriers=smem.at(lane.integer(m.barriers)).at(number * (8 * s.stages)),
        number=number,
        here=here,
        s=s,
    )
    with lane.when((lane.thread() & (THREADS - 1)).equals(0)):
        weights.begin()
    if a.tables is not None:
        place = (lane.thread() & (TABLES - 1)) * TABLE_BYTES
        words = int4.magnitudes(a.tables.at(place).words(4))
        with lane.when(lane.thread() < TABLES):
            smem.at(lane.integer(m.tables)).at(place).store_words(words)
    if s.rounding is None:
        load_token_scales(a, smem.at(lane.integer(m.token_scales)), s)
    sums = _accumulate(a, weights, smem, s)
    _write(a, sums, weights, smem.at(lane.integer(m.token_scales)), ids[1], s)


def _accumulate(a: Arrays, weights: Weights, smem: Pointer, s: Settings) -> list[Float]:
    """A warpgroup's sums over its tiles, in the order of `lane.start_product`'s result."""
    zero = lane.integer(0)
    together = s.resident // s.splits

    def step(i: Int, carry: list[Any], before: Int) -> list[Any]:
        *sums, slot, parity = carry
        taken = weights.take(i, slot, parity)
        tokens = smem.at((i + before) * s.token_bytes)
        sums = _add(sums, taken, tokens, lambda: weights.refill(i, slot), s)
        is_last = slot.equals(s.stages - 1)
        return [*sums, is_last.where(0, slot + 1), is_last.where(parity ^ 1, parity)]

    def round_of(first: Int, carry: list[Any]) -> list[Any]:
        lane.block_barrier()
        _load(a, weights.work, first, smem, s)
        end = (first + together).minimum(weights.work.count)
        before = weights.work.split * together - first
        return lane.loop(first, end, 1, carry, lambda i, x: step(i, x, before))

    carry = [*[lane.number(0.0)] * (s.tokens // 2), zero, zero]
    if s.part_of(a.groups) > s.resident:
        rounds = lane.integer(s.share_of(a.groups))
        return lane.loop(zero, rounds, together, carry, round_of)[:-2]
    _load(a, weights.work, zero, smem, s)
    before = weights.work.begin - weights.work.first
    return lane.loop(zero, weights.work.count, 1, carry, lambda i, x: step(i, x, before))[:-2]


def _load(a: Arrays, work: Work, first: Int, smem: Pointer, s: Settings) -> None:
    """Loads tokens of the program's groups to shared memory, of each share from its `first` on."""
    if s.rounding is not None:
        m = Memory.of(s, a.groups, a.scale_bytes)
        places = [smem.at(lane.integer(x)) for x in (m.token_scales, m.maxima)]
        load_rounded(a.x, work.first, smem, places[0], places[1], s.rounding)
    elif s.part_of(a.groups) > s.resident:
        for i in range(s.splits):
            own = s.resident // s.splits
            begin = work.begin_of(a, i, s) + first
            load_tokens(a, begin, own, smem.at(lane.integer(i * own * s.token_bytes)), s)
    else:
        load_tokens(a, work.first, s.resident, smem, s)
    lane.publish_stores()
    lane.block_barrier()


def _add(
    sums: list[Float],
    taken: Operand,
    tokens: Pointer,
    meanwhile: Callable[[], None],
    s: Settings,
) -> list[Float]:
    """Adds the products of a tile to float32 sums; `meanwhile` runs while they are on their way.

    No operand is written during that time: the compiler would wait for each product.
    """
    product = lane.start_product(taken.plus, tokens, s.tokens, minus=taken.minus)
    meanwhile()
    return [
        lane.fma(x, taken.scales[k // 2 % 2], total)
        for k, (x, total) in enumerate(zip(lane.finish(product), sums, strict=True))
    ]


# Results -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """Four outputs of a token that a lane writes.

    Attributes:
      token: past the last token, the last once more.
      row: row of the tile that gives the first output; of gated weights that of its gate.
      column: of the output.
      is_there: whether they exist.
    """

    token: Int
    row: Int
    column: Int
    is_there: lane.Bool

    @classmethod
    def all_of(cls, a: Arrays, work: Work, rank: Int, s: Settings) -> "list[Item]":
        """A lane's items, in program `rank` of its cluster."""
        is_gated = s.epilogue.gate is not None
        quads = s.epilogue.outputs // 4
        last = a.width - (4 if a.width % 4 == 0 else 1)
        items = []
        for first in range(0, a.tokens * quads, THREADS * s.shares):
            number = rank * THREADS + (lane.thread() & (THREADS - 1)) + first
            token, quad = number // quads, number % quads
            # Eight rows of a gate alternate with eight of its partner.
            row = ((quad >> 1) << 4) + ((quad & 1) << 2) if is_gated else quad << 2
            column = work.tile * s.epilogue.outputs + (quad << 2)
            is_there = (token < a.tokens) & (column < a.width) & work.is_real
            items.append(cls(token.minimum(a.tokens - 1), row, column.minimum(last), is_there))
        return items


def _write(
    a: Arrays, sums: list[Float], weights: Weights, token_scales: Pointer, rank: Int, s: Settings
) -> None:
    """Adds up the cluster's sums, each program some of them, and writes the outputs."""
    e = s.epilogue
    area = weights.slots.at(weights.work.split * -s.slots_bytes)
    _put(sums, weights, s)
    items = Item.all_of(a, weights.work, rank * s.splits + weights.work.split, s)
    # Before the wait, so that the latencies pass at the same time.
    residuals = [_residual(a, item, e) for item in items]
    areas: list[Any] = [area.at(lane.integer(i * s.slots_bytes)) for i in range(s.splits)]
    if s.parts > 1:
        lane.cluster_barrier()
        areas = [ClusterPointer.of(x, i) for i in range(s.parts) for x in areas]
    elif s.splits > 1:
        lane.block_barrier()
    else:
        weights.meet()
    for item, residual in zip(items, residuals, strict=True):
        scale = token_scales.at(item.token << 2).float()

        def values(row: Int, item: Item = item, scale: Float = scale) -> list[Float]:
            place = (item.token * PITCH + row) << 2
            found = zip(*[x.at(place).floats() for x in areas], strict=True)
            totals = [lane.total(list(x)) * scale for x in found]
            factors = weights.factors.at(row << 2).floats()
            if a.bias is None:
                return [x * f for x, f in zip(totals, factors, strict=True)]
            biases = weights.factors.at(row << 2, lane.integer(ROWS * 4)).floats()
            return [lane.fma(x, f, b) for x, f, b in zip(totals, factors, biases, strict=True)]

        if e.gate:
            pairs = zip(values(item.row), values(item.row + 8), strict=True)
            results = [epilogue.activate(gate, e.gate) * up for gate, up in pairs]
        else:
            results = [epilogue.activate(x, e.activation) for x in values(item.row)]
        if residual is not None:
            results = [x + y for x, y in zip(results, residual, strict=True)]
        _store(a, results, item, e)
    if s.parts > 1:  # no program ends while others read its memory
        lane.cluster_barrier()


def _put(sums: list[Float], weights: Weights, s: Settings) -> None:
    weights.meet()  # all have read the tiles in this memory
    row, t = lane.fragments.row_and_place()
    for k, x in enumerate(sums):
        token = (t << 1) + (8 * (k // 4) + k % 2)
        weights.slots.at((token * PITCH + row + 8 * (k // 2 % 2)) << 2).store(x)


def _residual(a: Arrays, item: Item, e: Epilogue) -> list[Float] | None:
    if a.residual is None:
        return None
    row = a.residual.times(item.token, 2 * a.width)
    if a.width % 4 == 0:
        words = row.at(item.column << 1).words(2)
    else:
        columns = [(item.column + i).minimum(a.width - 1) for i in range(4)]
        halves = [row.at(column << 1).half() for column in columns]
        words = [halves[i] | (halves[i + 1] << 16) for i in (0, 2)]
    return [x for word in words for x in lane.half.unpack(word, e.dtype)]


def _store(a: Arrays, results: list[Float], item: Item, e: Epilogue) -> None:
    words = [lane.half.pack(results[i], results[i + 1], e.dtype) for i in (0, 2)]
    target = a.out.times(item.token, 2 * a.width).at(item.column << 1)
    if a.width % 4 == 0:
        with lane.when(item.is_there):
            target.store_words(words)
        return
    for i in range(4):
        with lane.when(item.is_there & (item.column + i < a.width)):
            target.at(lane.integer(2 * i)).store_low(words[i // 2] >> (16 * (i % 2)), 16)


# The call ----------------------------------------------------------------------------------------


def few_matmul(
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array | None,
    x: jax.Array,
    token_scales: jax.Array | None,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    width: int,
    settings: Settings,
) -> jax.Array:
    """Few tokens times INT4 weights: ``[M, width]``.

    Arguments as `int4.int4_matmul`, but: `x` is e4m3 ``[M, inputs]``, `M` at most
    `settings.tokens`, `inputs` a multiple of 16 and at most ``K'``; or, if there is
    `settings.rounding`, bfloat16 or float16, `inputs` a multiple of 8, and `token_scales` are None.
    `residual` is ``[M, width]``.
    """
    scale_dtype = scales.dtype.name if tables is None else "uint8"
    if tables is not None:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    given: dict[str, Any] = {
        "codes": codes,
        "scales": scales,
        "tables": tables,
        "x": x,
        "token_scales": token_scales,
        "output_scales": output_scales,
        "bias": bias,
        "residual": residual,
    }
    names = [name for name, array in given.items() if array is not None]
    tiles, groups = codes.shape[:2]
    sizes: dict[str, Any] = {
        "tiles": tiles,
        "groups": groups,
        "tokens": x.shape[0],
        "inputs": x.shape[1],
    }

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        *inputs, out, smem = arrays
        at: dict[str, Any] = dict.fromkeys(given) | dict(zip(names, inputs, strict=True))
        a = Arrays(**at, out=out, **sizes, width=width, scale_dtype=scale_dtype)
        _program(a, ids, smem, settings)

    [out] = lanes.launch(
        body,
        "turbojax_int4_few_hopper",
        [given[name] for name in names],
        [jax.ShapeDtypeStruct((x.shape[0], width), jnp.dtype(settings.epilogue.dtype))],
        grid={"rows": -(-tiles // settings.tiles)},
        warpgroups=settings.warpgroups,
        shared=Memory.of(settings, groups, 1 if tables is not None else 2).size,
        cluster={"part": settings.parts},
    )
    return out
