"""The frame of kernels whose warps work by themselves: decode, and attention to pages.

A program takes queries of one KV head and a run of its tokens. Each of its warps takes its own
blocks of tokens, brings them to shared memory by itself with the copy engine, some blocks ahead,
and works without a barrier that other warps share. In the end the warps' results are merged in
shared memory (`merged`), and written, or left as one of several (`write_partial`).

What is multiplied with what, and how a block's tokens are laid out, is each kernel's own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.varying import all_own, own

_BARRIER_BYTES = 8
Result = tuple[Float, Float, Float]
"""For one channel of a query: output, maximum in powers of two, sum of weights."""


# Programs ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A call's arrays as pointers, and their sizes."""

    query: Pointer  # ``[B, T, N, H]``
    lengths: Pointer  # tokens held, ``[B]``
    query_lengths: Pointer | None  # real queries, ``[B]``; None if all are
    # Outputs and log-sum-exps; with several parts outputs, maxima and sums of each.
    outputs: list[Pointer]
    tokens: int  # `T`
    heads: int  # `N`
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return self.group * self.tokens

    @property
    def is_final(self) -> bool:
        return len(self.outputs) == 2


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    tile: Int  # number of its queries among those of the head
    pair: Int  # ``batch * K + head``
    batch: Int
    head: Int
    begin: Int  # position of the first query token
    query_length: Int  # how many are real
    start: Int  # its first block
    stop: Int  # the one past its last; not above `start` if there is nothing to do


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A lane's place in its warp's products: row `g`, column pair `t`."""

    g: Int
    t: Int


def inline(names: Sequence[str], refs: tuple[Any, ...], body: Callable[..., None]) -> None:
    """Runs a kernel's body, written for single lanes; `names` are those of the grid's axes.

    The last two of `refs` are `launch`'s shared memory. It calls
    ``body(refs, inputs, ids, memory)``: the references as Mosaic's, as Pallas' own, which know
    shapes, the program's numbers, and its shared memory.
    """
    inputs, memory = refs[:-2], refs[-2:]
    ids = tuple(lax.axis_index(own(name)) for name in names)
    types = jax.tree.map(lambda _: plgpu.RefType(), (inputs, *memory))

    @plgpu.inline_mgpu(arg_types=(*types, (plgpu.Layout.WG_SPLAT(()),) * len(ids)))
    def run(ctx: Any, refs: Any, slots: Any, barriers: Any, ids: Any) -> None:
        del ctx
        body(refs, inputs, [lane.scalar(x) for x in ids], (slots, barriers))

    run(inputs, *memory, ids)


def launch(
    kernel: Callable[..., None],
    name: str,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: dict[str, int],
    s: Any,
    head_dim: int,
    **cluster: Any,
) -> Any:
    """The call of a kernel whose warps have shared memory for slots and barriers.

    `s` has `warpgroups`, `warps`, `stages` and `warp_bytes`; `cluster` may be `cluster` and
    `cluster_names`, if programs share memory.
    """
    if "cluster_names" in cluster:
        cluster["cluster_names"] = all_own(cluster["cluster_names"])
    call = functools.partial(
        plgpu.kernel,
        kernel,
        scratch_types=_memory(s, head_dim),
        grid=tuple(grid.values()),
        grid_names=all_own(grid),
        num_threads=s.warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        **cluster,
    )
    return varying.typed(lambda out: call(out_type=out), list(out))


def update(
    kernel: Callable[..., None],
    name: str,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: dict[str, int],
    s: Any,
    head_dim: int,
) -> Any:
    """As `launch`, of a kernel that also writes to operands that are mutable references."""

    def body(*refs: Any) -> None:
        memory = _memory(s, head_dim)
        pl.run_scoped(functools.partial(kernel, *refs), *memory, collective_axes="warpgroup")

    def call(*operands: Any) -> Any:
        mesh = plgpu.Mesh(
            grid=tuple(grid.values()),
            grid_names=all_own(grid),
            num_threads=s.warpgroups,
            thread_name="warpgroup",
            kernel_name=name,
        )
        types = varying.typed_shapes(list(out), varying.axes_of(operands))
        return pl.kernel(body, out_type=types, mesh=mesh, name=name)(*operands)

    return call


def _memory(s: Any, head_dim: int) -> list[Any]:
    return [
        plgpu.SMEM((s.warps * s.warp_bytes(head_dim),), jnp.uint8),
        plgpu.SMEM((s.warps * s.stages * _BARRIER_BYTES // 4,), jnp.int32),
    ]


# Queries -----------------------------------------------------------------------------------------


def numbers(word: Int, dtype: str) -> list[Float]:
    if dtype == "float32":
        return [word.as_float()]
    return list(lane.half.unpack(word, dtype))


def settled_code(x: Float, quotient: Float, scale: Float, low: int, high: int) -> Int:
    """``rint(x / scale)`` within bounds, from about ``x / scale``; comparisons make it exact."""
    quotient = lane.maximum(quotient, lane.number(float(low)))
    shifted = lane.minimum(quotient, lane.number(float(high))) + lane.ROUNDER
    code, guess = shifted.as_int() - 0x4B400000, shifted - lane.ROUNDER
    rest, half = x - guess * scale, scale * 0.5
    is_odd = (code & 1).equals(1)
    above = (rest > half) | (is_odd & rest.equals(half))
    below = (rest < -half) | (is_odd & rest.equals(-half))
    one = lane.integer(1)
    code = code + above.where(one, 0) - below.where(one, 0)
    return code.maximum(low).minimum(high)


def position(base: Int, here: Place, a: Arrays, at: Program) -> Int:
    """Query `t`'s position after row `base`; rows are ``g * T + t``; -1 if it does not exist."""
    own = base + here.t
    token = own % a.tokens
    is_real = (own < a.rows) & (token < at.query_length)
    return is_real.where(at.begin + token, -1)


def transposed(words: Sequence[Int]) -> list[Int]:
    """Four bytes each of four words: byte `j` of word `i` becomes byte `i` of word `j`."""
    pairs = [
        [lane.permute_bytes(a, b, selector) for a, b in (words[:2], words[2:])]
        for selector in (0x5140, 0x7362)
    ]
    return [
        lane.permute_bytes(low, high, selector)
        for low, high in pairs
        for selector in (0x5410, 0x7632)
    ]


# Blocks ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """A warp's shared memory: blocks in flight, each with a barrier for its copies."""

    area: Pointer  # memory of the blocks
    barriers: Pointer  # memory of the barriers
    size: int  # bytes of a block
    count: int  # how many blocks there are
    arrivals: int = 1  # lanes that arrive at a barrier for a block

    @classmethod
    def of(
        cls,
        memory: tuple[Pointer, Pointer],
        number: Int,
        each: int,
        size: int,
        count: int,
        arrivals: int = 1,
    ) -> "Slots":
        area = memory[0].at(number * each)
        return cls(area, memory[1].at(number * (_BARRIER_BYTES * count)), size, count, arrivals)

    def slot(self, number: Int | int) -> Pointer:
        return self.area.at(number * self.size)

    def barrier(self, number: Int | int) -> Pointer:
        return self.barriers.at(number * _BARRIER_BYTES)

    def init(self) -> None:
        """Prepares the barriers; one lane calls it."""
        for i in range(self.count):
            lane.init_barrier(self.barrier(i), self.arrivals)
        lane.publish_barriers()


def over_blocks(
    first: Int,
    stop: Int,
    warps: int,
    slots: Slots,
    state: list[Any],
    prefetch: Callable[[Int], Any],
    attend: Callable[[Int, list[Any], Pointer, Any], list[Any]],
    refill: Callable[[Int, Pointer, Pointer, Any], None],
) -> list[Any]:
    """Takes all of a warp's blocks in turn, as their copies arrive; see `run_of_blocks`."""
    place = lane.integer(0), lane.integer(0)
    return run_of_blocks(first, stop, warps, slots, state, place, prefetch, attend, refill)[0]


def run_of_blocks(
    first: Int,
    stop: Int,
    warps: int,
    slots: Slots,
    state: list[Any],
    place: tuple[Int, Int],
    prefetch: Callable[[Int], Any],
    attend: Callable[[Int, list[Any], Pointer, Any], list[Any]],
    refill: Callable[[Int, Pointer, Pointer, Any], None],
) -> tuple[list[Any], tuple[Int, Int]]:
    """Takes some of a warp's blocks in turn, as their copies arrive.

    Blocks are `warps` apart from `first`, whose copies are on their way, as are those of all slots,
    to before `stop`. `place` is the slot of the first block, and its barrier's parity; returned are
    the state and the place of the block after the last. ``prefetch(block)`` is called before the
    wait, and reads what is needed later; ``attend(block, state, slot, read)`` returns the new
    state; ``refill(block, slot, barrier, read)`` starts copies to a slot that is free again.
    """

    def step(block: Int, carry: list[Any]) -> list[Any]:
        *state, number, parity = carry
        read = prefetch(block)
        barrier, slot = slots.barrier(number), slots.slot(number)
        lane.wait(barrier, parity)
        state = attend(block, state, slot, read)
        lane.warp_barrier()
        refill(block, slot, barrier, read)
        is_last = number.equals(slots.count - 1)
        number = is_last.where(0, number + 1)
        return [*state, number, is_last.where(parity ^ 1, parity)]

    *state, number, parity = lane.loop(first, stop, warps, [*state, *place], step)
    return state, (number, parity)


def soft_cap(x: Float, factor: Float, cap: float) -> Float:
    """``cap * tanh(x * factor / cap)``, of infinities too."""
    x = x * factor
    magnitude = lane.maximum(x, -x)
    e = lane.exp2(magnitude * (-2 * LOG2_E / cap))
    capped = (lane.number(1.0) - e) / (e + 1.0) * cap
    return (x < 0.0).where(-capped, capped)


# Results -----------------------------------------------------------------------------------------


def merged(
    results: Sequence[Any],
    element: Int,
    row: Int,
    rows: int,
    head_dim: int,
    highest: Callable[[list[Float]], Float],
) -> Result:
    """The merged results of several warps for one channel of a query.

    `results` are their memory: outputs ``[rows, H]``, maxima in powers of two, and sums ``[rows]``;
    `element` is the output's number in it.
    """
    size = rows * head_dim
    maxima = [x.at(row << 2, 4 * size).float() for x in results]
    sums = [x.at(row << 2, 4 * (size + rows)).float() for x in results]
    outputs = [x.at(element << 2).float() for x in results]
    top = highest(maxima)
    shift = (top > float("-inf")).where(top, 0.0)
    weights = [lane.exp2(m - shift) for m in maxima]
    o, l = (
        lane.total([x * w for x, w in zip(values, weights, strict=True)])
        for values in (outputs, sums)
    )
    return o, top, l


Partial = tuple[list[Float], Float, Float]
"""For some channels of a query: outputs, maximum in powers of two, sum of weights."""


def nothing(channels: int) -> Partial:
    zero = lane.number(0.0)
    return [zero] * channels, lane.number(float("-inf")), zero


def joined(a: Partial, b: Partial) -> Partial:
    """`a` with the result `b` added; the same operations wherever it is done."""
    top = lane.maximum(a[1], b[1])
    shift = (top > float("-inf")).where(top, 0.0)
    of_a, of_b = lane.exp2(a[1] - shift), lane.exp2(b[1] - shift)
    outputs = [lane.fma(y, of_b, x * of_a) for x, y in zip(a[0], b[0], strict=True)]
    return outputs, top, lane.fma(b[2], of_b, a[2] * of_a)


def output_row(a: Arrays, at: Program, row: Int) -> Int:
    """The index in ``[B, T, N]`` of a query of the program's KV head."""
    head, token = at.head * a.group + row // a.tokens, row % a.tokens
    return (at.batch * a.tokens + token) * a.heads + head


def write_residual(
    lse: Pointer, index: Int, channel: Int, top: Float, total: Float, is_empty: lane.Bool
) -> None:
    """Writes a query's log-sum-exp, in the lane whose `channel` is 0.

    `top` is the maximum in powers of two, `total` the sum of weights, 1 where nothing was seen.
    """
    with lane.when(channel.equals(0)):
        value = top * (1 / LOG2_E) + lane.log2(total) * (1 / LOG2_E)
        lse.times(index, 4).store(is_empty.where(float("-inf"), value))


def write_partial(a: Arrays, index: Int, channel: Int, result: Result) -> None:
    """Writes an element of one of several results; `index` is its row among all results' rows."""
    o, maxima, sums = a.outputs
    o.times(index, 4 * a.head_dim).at(channel << 2).store(result[0])
    with lane.when(channel.equals(0)):
        maxima.times(index, 4).store(result[1])
        sums.times(index, 4).store(result[2])
