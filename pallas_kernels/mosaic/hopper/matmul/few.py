"""INT4 weights times e4m3 activations of few tokens, up to 64, for Hopper (FireQ, section 3.1.1).

Roofline, for weights of 14336 x 4096 on an H200, which copies at 4.3 TB/s:
  - bytes: 29.4 MB of codes and 0.5 MB of scales: 7 us. Latency is some 0.8 us, so 26 KB of each
    multiprocessor must be on their way at any time.
  - instructions: 11 for eight weights, of which a multiprocessor does 64 lanes a clock: 176 clocks
    for a tile of 64 rows and 128 inputs, 4 KB. At 4 TB/s there are some 240 clocks for it.
  - tokens: each program reads those of its inputs, from L2: 16 tokens 3.7 MB in all, 64 15 MB.
Target: 13 us for 16 tokens, 12.5 for one, 15 for 64. A launch and the first latency take 2.5 us.

Every warpgroup takes the 64 rows of its own tiles, and part of the inputs, one tile after the
other. One of its lanes copies tiles ahead to slots of its own; nobody else waits for them. Weights
are rows of the product and come from registers, where they are converted; tokens are columns, and
lie in shared memory for as many inputs as fit. Programs that share rows are a cluster, each with
its part of the inputs; they add their sums up in the order of the inputs. How many there are
follows from the weight's shape alone, so a token's result does not depend on other tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.matmul import epilogue
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding, load_rounded
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import GROUP, ROW_BYTES, TABLE_BYTES, TABLES

ROWS = 64
"""Of a tile."""
TILE_BYTES = ROWS * ROW_BYTES
_THREADS = 128
_TABLES_BYTES = TABLES * TABLE_BYTES
# Numbers from one token's sums to the next: lanes that write a tile's sums meet no bank twice.
_PITCH = ROWS + 4
_CHUNK = 16
_CHUNKS = GROUP // _CHUNK
# Loads of tokens that a lane has on their way.
_AHEAD = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in a product.

    Attributes:
      epilogue: what becomes of the sums.
      tokens: columns of a product: 8, 16, 32 or 64.
      warpgroups: of a program, each with its own rows.
      parts: programs that share rows, each with part of the inputs; at most 8.
      stages: tiles of a warpgroup that are on their way or in use.
      resident: groups of inputs whose tokens are in shared memory at a time, a multiple of `run`.
      run: tiles that are copied and multiplied together, 1 or 2; divides each part.
      rounding: of tokens that are not e4m3 yet, or None; then all of a program's are resident.
    """

    epilogue: Epilogue
    tokens: int
    warpgroups: int
    parts: int
    stages: int
    resident: int
    run: int = 1
    rounding: Rounding | None = None

    @property
    def token_bytes(self) -> int:
        """Shared memory of a group's tokens."""
        return self.tokens * GROUP

    def part_of(self, groups: int) -> int:
        """Groups of inputs that a program has at most."""
        return -(-groups // self.parts)

    @property
    def slots_bytes(self) -> int:
        """Shared memory of a warpgroup's tiles, and of its sums at the end."""
        return max(self.stages * self.run * TILE_BYTES, self.tokens * _PITCH * 4)


class Memory(NamedTuple):
    """Offsets in a program's shared memory.

    Attributes:
      slots: of each warpgroup's tiles; before them lie the tokens.
      scales: of each warpgroup's part of the inputs.
      factors: float32 of each warpgroup's outputs, then their biases.
      tables: of products of scales and codes.
      token_scales: float32.
      maxima: of tokens that are rounded here.
      barriers: eight bytes for each slot of each warpgroup.
      size: of everything.
    """

    slots: int
    scales: int
    factors: int
    tables: int
    token_scales: int
    maxima: int
    barriers: int
    size: int

    @classmethod
    def of(cls, s: Settings, groups: int, scale_bytes: int) -> "Memory":
        """For a weight with this many groups of inputs."""
        part = s.part_of(groups)
        sizes = (
            s.resident * s.token_bytes,
            s.warpgroups * s.slots_bytes,
            s.warpgroups * part * ROWS * scale_bytes,
            s.warpgroups * 2 * ROWS * 4,
            _TABLES_BYTES,
            s.tokens * 4,
            s.tokens * 4,
            s.warpgroups * s.stages * 8,
        )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(*ends)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A call's arrays as pointers, and their sizes.

    Attributes:
      codes: ``[N' / 64, groups, 64, 64]``.
      scales: ``[N' / 64, groups, 64]``.
      tables: of e4m3 scales, or None.
      x: e4m3 ``[M, inputs]``, or as `Settings.rounding` says.
      token_scales: bfloat16 ``[M]``, or None of tokens that are rounded here.
      output_scales: float32 ``[N']``.
      bias: the same, or None.
      residual: ``[M, width]``, or None.
      out: the same.
      tiles: ``N' / 64``.
      groups: of 128 inputs.
      tokens: `M`.
      inputs: of a token, a multiple of 16.
      width: of an output.
      scale_dtype: ``"uint8"`` (e4m3), ``"bfloat16"`` or ``"float16"``.
    """

    codes: Pointer
    scales: Pointer
    tables: Pointer | None
    x: Pointer
    token_scales: Pointer | None
    output_scales: Pointer
    bias: Pointer | None
    residual: Pointer | None
    out: Pointer
    tiles: int
    groups: int
    tokens: int
    inputs: int
    width: int
    scale_dtype: str

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return 1 if self.scale_dtype == "uint8" else 2


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What a warpgroup works on: a row of tiles, and which of them.

    Attributes:
      tile: number of its 64 rows among all; past the last, of the last once more.
      begin: its first group of inputs.
      count: how many there are.
      is_real: whether the rows exist.
    """

    tile: Int
    begin: Int
    count: Int
    is_real: lane.Bool

    @classmethod
    def of(cls, a: Arrays, ids: list[Int], number: Int, s: Settings) -> "Work":
        """Of warpgroup `number` of program ``ids = [rows, part]``."""
        tile = ids[0] * s.warpgroups + number
        begin = ids[1] * a.groups // s.parts
        end = (ids[1] + 1) * a.groups // s.parts
        return cls(tile.minimum(a.tiles - 1), begin, end - begin, tile < a.tiles)


# Weights -----------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """A tile as a product's left operand.

    Attributes:
      words: as `lane.start_product` takes them.
      scales: of the lane's two rows, what is not in the words.
    """

    words: list[Int]
    scales: list[Float]


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A warpgroup's tiles, as they arrive.

    Attributes:
      a: the arrays.
      work: which tiles.
      slots: shared memory of tiles.
      scales: of all scales.
      factors: of the outputs' scales and biases.
      tables: of e4m3 scales.
      barriers: one for each slot.
      number: of the warpgroup.
      places: `int4.PLACES`, in a register.
      s: settings.
    """

    a: Arrays
    work: Work
    slots: Pointer
    scales: Pointer
    factors: Pointer
    tables: Pointer
    barriers: Pointer
    number: Int
    places: Int
    s: Settings

    def _copy(self, i: Int | int, slot: Int | int, more: int | Int = 0) -> None:
        """Starts the copy of run `i` of tiles, by one lane."""
        a, work, size = self.a, self.work, self.s.run * TILE_BYTES
        barrier = self.barriers.at(slot * 8)
        lane.expect_bytes(barrier, lane.integer(size) + more)
        first = work.tile * a.groups + work.begin
        source = a.codes.times(first + i * self.s.run, TILE_BYTES)
        lane.copy(source, self.slots.at(slot * size), size, barrier)

    @property
    def runs(self) -> Int:
        """How many there are."""
        return self.work.count // self.s.run

    def begin(self) -> None:
        """Prepares the barriers and starts the first copies, by one lane."""
        a, work = self.a, self.work
        for i in range(self.s.stages):
            lane.init_barrier(self.barriers.at(8 * i))
        lane.publish_barriers()
        vectors = [x for x in (a.output_scales, a.bias) if x is not None]
        size = work.count * (ROWS * a.scale_bytes)
        first = self.barriers
        self._copy(0, 0, size + ROWS * 4 * len(vectors))
        row = work.tile * a.groups + work.begin
        lane.copy(a.scales.times(row, ROWS * a.scale_bytes), self.scales, size, first)
        for i in range(1, self.s.stages):
            with lane.when(self.runs > i):
                self._copy(i, i)
        for i, vector in enumerate(vectors):
            target = self.factors.at(ROWS * 4 * i)
            lane.copy(vector.times(work.tile, ROWS * 4), target, ROWS * 4, first)

    def take(self, i: Int, slot: Int, parity: Int) -> list[Operand]:
        """The tiles of run `i`, once they are there."""
        lane.wait(self.barriers.at(slot * 8), parity)
        a, here = self.a, lane.fragments.row_and_place()
        tables = None if a.tables is None else self.tables
        taken = []
        for j in range(self.s.run):
            tile = slot * self.s.run + j
            scales = self.scales.at((i * self.s.run + j) * (ROWS * a.scale_bytes))
            rows, rest = int4.read(
                self.slots.at(tile * TILE_BYTES), scales, tables, here, a.scale_dtype, self.places
            )
            taken.append(Operand([row[k] for k in range(len(rows[0])) for row in rows], rest))
        return taken

    def refill(self, i: Int, slot: Int) -> None:
        """Starts the next copy to the slot of run `i`, which was taken."""
        later = i + self.s.stages
        with lane.when(later < self.runs):
            lane.named_barrier(self.number + 1, _THREADS)
            with lane.when((lane.thread() & (_THREADS - 1)).equals(0)):
                self._copy(later, slot)


# Tokens ------------------------------------------------------------------------------------------


def load_tokens(a: Arrays, first: Int, target: Pointer, s: Settings) -> None:
    """Tokens of `s.resident` groups from `first` on, as the product's right operand.

    By all lanes of the program. Tokens and inputs that do not exist are zeros.
    """
    per_token = s.resident * _CHUNKS
    total, threads = s.tokens * per_token, _THREADS * s.warpgroups
    thread = lane.thread()
    batch = min(_AHEAD, -(-total // threads))

    def some(start: Int | int) -> None:
        places, words = [], []
        for i in range(batch):
            number = thread + (i * threads) + start
            token, chunk = number // per_token, number % per_token
            byte = first * GROUP + (chunk << 4)
            is_there = (token < a.tokens) & (byte < a.inputs)
            source = a.x.times(is_there.where(token, 0), a.inputs).at(is_there.where(byte, 0))
            words.append([is_there.where(x, 0) for x in source.words(4)])
            place = (chunk >> 3) * s.token_bytes + token * GROUP
            places.append((number < total, place + (((chunk ^ token) & 7) << 4)))
        for (is_mine, place), four in zip(places, words, strict=True):
            with lane.when(is_mine):
                target.at(place).store_words(four)

    if total <= threads * batch:
        some(0)
        return

    def step(start: Int, state: list[Any]) -> list[Any]:
        some(start)
        return state

    lane.loop(lane.integer(0), lane.integer(total), threads * batch, [], step)


def load_token_scales(a: Arrays, target: Pointer, s: Settings) -> None:
    """The tokens' scales as float32."""
    assert a.token_scales is not None
    thread = lane.thread()
    with lane.when(thread < s.tokens):
        token = thread.minimum(a.tokens - 1)
        scale = (a.token_scales.at(token << 1).half() << 16).as_float()
        target.at(thread << 2).store(scale)


# A program ---------------------------------------------------------------------------------------


def _program(a: Arrays, ids: list[Int], smem: Pointer, s: Settings) -> None:
    """A program, written for single lanes."""
    m = Memory.of(s, a.groups, a.scale_bytes)
    number = lane.uniform(lane.thread() >> 7)
    work = Work.of(a, ids, number, s)
    part = s.part_of(a.groups)
    own = smem.at(lane.integer(m.slots)).at(number * s.slots_bytes)
    weights = Weights(
        a=a,
        work=work,
        slots=own,
        scales=smem.at(lane.integer(m.scales)).at(number * (part * ROWS * a.scale_bytes)),
        factors=smem.at(lane.integer(m.factors)).at(number * (2 * ROWS * 4)),
        tables=smem.at(lane.integer(m.tables)),
        barriers=smem.at(lane.integer(m.barriers)).at(number * (8 * s.stages)),
        number=number,
        places=lane.held(int4.PLACES),
        s=s,
    )
    with lane.when((lane.thread() & (_THREADS - 1)).equals(0)):
        weights.begin()
    if a.tables is not None:
        place = (lane.thread() & (TABLES - 1)) * TABLE_BYTES
        words = a.tables.at(place).words(4)
        with lane.when(lane.thread() < TABLES):
            smem.at(lane.integer(m.tables)).at(place).store_words(words)
    if s.rounding is None:
        load_token_scales(a, smem.at(lane.integer(m.token_scales)), s)
    sums = _accumulate(a, weights, smem, s)
    _write(a, sums, own, weights.factors, smem.at(lane.integer(m.token_scales)), work, ids[1], s)


def _accumulate(a: Arrays, weights: Weights, smem: Pointer, s: Settings) -> list[Float]:
    """A warpgroup's sums over its tiles, in the order of `lane.start_product`."""
    zero = lane.integer(0)
    together = s.resident // s.run

    def load(first: Int) -> None:
        _load(a, weights.work, first * s.run, smem, s)

    def step(i: Int, carry: list[Any], first: Int) -> list[Any]:
        *sums, slot, parity = carry
        taken = weights.take(i, slot, parity)
        tokens = smem.at((i - first) * (s.run * s.token_bytes))
        sums = _add(sums, taken, tokens, lambda: weights.refill(i, slot), s)
        is_last = slot.equals(s.stages - 1)
        return [*sums, is_last.where(0, slot + 1), is_last.where(parity ^ 1, parity)]

    def round_of(first: Int, carry: list[Any]) -> list[Any]:
        lane.block_barrier()
        load(first)
        end = (first + together).minimum(weights.runs)
        return lane.loop(first, end, 1, carry, lambda i, x: step(i, x, first))

    carry = [*[lane.number(0.0)] * (s.tokens // 2), zero, zero]
    if s.part_of(a.groups) > s.resident:
        return lane.loop(zero, weights.runs, together, carry, round_of)[:-2]
    load(zero)
    return lane.loop(zero, weights.runs, 1, carry, lambda i, x: step(i, x, zero))[:-2]


def _load(a: Arrays, work: Work, first: Int, smem: Pointer, s: Settings) -> None:
    """Tokens of the program's groups from its `first` on to shared memory, for all to see."""
    if s.rounding is None:
        load_tokens(a, work.begin + first, smem, s)
    else:
        m = Memory.of(s, a.groups, a.scale_bytes)
        places = [smem.at(lane.integer(x)) for x in (m.token_scales, m.maxima)]
        load_rounded(a.x, work.begin, smem, places[0], places[1], s.rounding)
    lane.publish_stores()
    lane.block_barrier()


def _add(
    sums: list[Float],
    taken: list[Operand],
    tokens: Pointer,
    meanwhile: Callable[[], None],
    s: Settings,
) -> list[Float]:
    """Sums with the products of some tiles, which are added up in float32.

    No operand is written while products are on their way: the compiler would wait for each.
    """
    products = [
        lane.start_product(x.words, tokens.at(lane.integer(j * s.token_bytes)), s.tokens)
        for j, x in enumerate(taken)
    ]
    meanwhile()
    done = lane.finish([x for product in products for x in product])
    for j, operand in enumerate(taken):
        own = done[j * len(sums) : (j + 1) * len(sums)]
        sums = [
            lane.fma(x, operand.scales[k // 2 % 2], total)
            for k, (x, total) in enumerate(zip(own, sums, strict=True))
        ]
    return sums


# Results -----------------------------------------------------------------------------------------


def _write(
    a: Arrays,
    sums: list[Float],
    area: Pointer,
    factors: Pointer,
    token_scales: Pointer,
    work: Work,
    rank: Int,
    s: Settings,
) -> None:
    """Adds up the cluster's sums, each program some of them, and writes what becomes of them."""
    e = s.epilogue
    _put(sums, area, s)
    quads = 8 if e.activation == "swiglu" else 16
    thread = lane.thread() & (_THREADS - 1)
    items = []
    for first in range(0, a.tokens * quads, _THREADS * s.parts):
        number = rank * _THREADS + thread + first
        token, quad = number // quads, number % quads
        column = work.tile * e.outputs + (quad << 2)
        is_there = (token < a.tokens) & (column < a.width) & work.is_real
        last = a.width - (4 if a.width % 4 == 0 else 1)
        items.append((token.minimum(a.tokens - 1), quad, column.minimum(last), is_there))
    rest = [_residual(a, token, column, e) for token, _, column, _ in items]
    if s.parts > 1:
        lane.cluster_barrier()
        areas: list[Any] = [ClusterPointer.of(area, i) for i in range(s.parts)]
    else:
        lane.named_barrier(lane.uniform(lane.thread() >> 7) + 1, _THREADS)
        areas = [area]
    for (token, quad, column, is_there), held in zip(items, rest, strict=True):
        scale = token_scales.at(token << 2).float()

        def values(row: Int, token: Int = token, scale: Float = scale) -> list[Float]:
            place = (token * _PITCH + row) << 2
            found = [x.at(place).floats() for x in areas]
            of_rows = factors.at(row << 2).floats()
            biases = (
                [lane.number(0.0)] * 4
                if a.bias is None
                else factors.at(row << 2, ROWS * 4).floats()
            )
            totals = [lane.total(list(x)) for x in zip(*found, strict=True)]
            return [
                lane.fma(x * scale, f, b) for x, f, b in zip(totals, of_rows, biases, strict=True)
            ]

        if e.activation == "swiglu":
            row = ((quad >> 1) << 4) + ((quad & 1) << 2)
            pairs = zip(values(row), values(row + 8), strict=True)
            results = [epilogue._sigmoid_times(gate) * up for gate, up in pairs]
        else:
            results = [epilogue._activate(x, e.activation) for x in values(quad << 2)]
        if held is not None:
            results = [x + y for x, y in zip(results, held, strict=True)]
        _store(a, results, token, column, is_there, e)
    if s.parts > 1:  # no program ends while others read its memory
        lane.cluster_barrier()


def _put(sums: list[Float], area: Pointer, s: Settings) -> None:
    """A warpgroup's sums to shared memory, ``[tokens, 64]`` with gaps."""
    # All have read the tiles that were there.
    lane.named_barrier(lane.uniform(lane.thread() >> 7) + 1, _THREADS)
    row, t = lane.fragments.row_and_place()
    for k, x in enumerate(sums):
        token = (t << 1) + (8 * (k // 4) + k % 2)
        area.at((token * _PITCH + row + 8 * (k // 2 % 2)) << 2).store(x)


def _residual(a: Arrays, token: Int, column: Int, e: Epilogue) -> list[Float] | None:
    """Four numbers of the residual."""
    if a.residual is None:
        return None
    row = a.residual.times(token, 2 * a.width)
    if a.width % 4 == 0:
        words = row.at(column << 1).words(2)
    else:
        halves = [row.at((column + i).minimum(a.width - 1) << 1).half() for i in range(4)]
        words = [halves[i] | (halves[i + 1] << 16) for i in (0, 2)]
    return [x for word in words for x in lane.half.unpack(word, e.dtype)]


def _store(
    a: Arrays, results: list[Float], token: Int, column: Int, is_there: lane.Bool, e: Epilogue
) -> None:
    """Writes four outputs of a token."""
    words = [lane.half.pack(*results[i : i + 2], e.dtype) for i in (0, 2)]
    target = a.out.times(token, 2 * a.width).at(column << 1)
    if a.width % 4 == 0:
        with lane.when(is_there):
            target.store_words(words)
        return
    for i in range(4):
        with lane.when(is_there & (column + i < a.width)):
            target.at(2 * i).store_low(words[i // 2] >> (16 * (i % 2)), 16)


# The call ----------------------------------------------------------------------------------------

_GRID = ("rows", "part")


def _kernel(*refs: Ref, names: tuple[str, ...], s: Settings, scale_dtype: str) -> None:
    ids = tuple(lax.axis_index(name) for name in _GRID)
    types = [plgpu.RefType()] * len(refs)
    shapes = {name: ref.shape for name, ref in zip(names, refs, strict=True)}

    @plgpu.inline_mgpu(arg_types=(types, (plgpu.Layout.WG_SPLAT(()),) * len(ids)))
    def run(ctx: Any, refs: list[Any], ids: Any) -> None:
        del ctx
        at = {name: Pointer.to(ref) for name, ref in zip(names, refs, strict=True)}
        smem = at.pop("memory")
        optional = ("tables", "token_scales", "bias", "residual")
        tiles, groups = shapes["codes"][:2]
        (tokens, inputs), (_, width) = shapes["x"], shapes["out"]
        a = Arrays(
            **{name: at.get(name) for name in optional},
            **{name: x for name, x in at.items() if name not in optional},
            tiles=tiles,
            groups=groups,
            tokens=tokens,
            inputs=inputs,
            width=width,
            scale_dtype=scale_dtype,
        )
        _program(a, [lane.scalar(x) for x in ids], smem, s)

    run(list(refs), ids)


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
    """Few tokens times INT4 weights.

    Args:
      codes: uint8 ``[N' / 64, K' / 128, 64, 64]``, tiles of 64 rows of 128 inputs.
      scales: ``[N' / 64, K' / 128, 64]``, e4m3 (with `tables`), bfloat16 or float16.
      tables: uint8 ``[128, 16]``: of each e4m3 scale, by its bits, e4m3 of its products with
        0..7, -8..-1.
      x: e4m3 ``[M, inputs]``, `M` at most `settings.tokens`, `inputs` a multiple of 16 and at most
        ``K'``; or bfloat16 or float16, if `settings.rounding` says so, `inputs` a multiple of 8.
      token_scales: bfloat16 ``[M]``; None of tokens that are rounded here.
      output_scales: float32 ``[N']``.
      bias: float32 ``[N']``.
      residual: ``[M, width]`` in the output's dtype.
      width: of the result.
      settings: what is static.

    Returns:
      ``[M, width]``.
    """
    scale_dtype = scales.dtype.name if tables is None else "uint8"
    if tables is not None:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    given = {
        "codes": codes,
        "scales": scales,
        "tables": tables,
        "x": x,
        "token_scales": token_scales,
        "output_scales": output_scales,
        "bias": bias,
        "residual": residual,
    }
    given = {name: array for name, array in given.items() if array is not None}
    s = settings
    m = Memory.of(s, codes.shape[1], 1 if tables is not None else 2)
    return plgpu.kernel(
        functools.partial(_kernel, names=(*given, "out", "memory"), s=s, scale_dtype=scale_dtype),
        out_type=jax.ShapeDtypeStruct((x.shape[0], width), jnp.dtype(s.epilogue.dtype)),
        scratch_types=[plgpu.SMEM((m.size,), jnp.uint8)],
        grid=(-(-codes.shape[0] // s.warpgroups),),
        grid_names=_GRID[:1],
        cluster=(s.parts,),
        cluster_names=_GRID[1:],
        num_threads=s.warpgroups,
        thread_name="warpgroup",
        kernel_name="turbojax_int4_few_hopper",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*given.values())
