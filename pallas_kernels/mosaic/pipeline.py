"""The frame of kernels whose copies run ahead: persistent programs, memory in slots, barriers.

A program takes every `programs`-th of a call's tiles. One of its warpgroups, the producer, copies
what a tile needs into slots of shared memory, a circular buffer that goes on from tile to tile; the
others consume. Each slot has two barriers: `ready` says that its copies have arrived, `free` that
all consumers are done with it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic.lane.fragments import ROWS as ROWS
from pallas_kernels.varying import own

WARPGROUPS = 2  # warpgroups that consume, each with its own rows
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT(())

PROGRAM = own("program")  # the axis of the grid

Step = Callable[[jax.Array, jax.Array], jax.Array]
"""``step(number, slot)`` of a tile that begins at `slot`; returns the slot after its last."""


class TileScheduler:
    """Which of `total` tiles are this program's.

    `total`, at least one, is an array if it depends on what arrays hold. A program takes `together`
    tiles with consecutive numbers, of which `total` is a multiple. With `zigzag` every other round
    goes through the programs backwards. Where tiles get smaller with their numbers, programs then
    have equally much to do: who takes the largest of one round takes the smallest of the next. With
    a `table` (`schedule.causal`) a program takes the tiles that are named there.
    """

    def __init__(
        self,
        total: int | jax.Array,
        *,
        together: int = 1,
        zigzag: bool = False,
        table: Ref | None = None,
    ) -> None:
        self.program, self.programs = lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
        self.together, self.zigzag, self.table = together, zigzag, table
        if table is not None:
            self.count = table[self.program, 0]
            return
        last = (total // together if isinstance(total, int) else lax.div(total, together)) - 1
        # Programs past the last tile, which exist if `total` is known late, have none.
        rounds = lax.div(last - self.program + self.programs, jnp.int32(self.programs))
        if zigzag:
            programs = jnp.int32(self.programs)
            whole, rest = lax.div(jnp.int32(last), programs), lax.rem(jnp.int32(last), programs)
            rounds = whole + (self.place(whole) <= rest).astype(jnp.int32)
        self.count = rounds * together

    def place(self, i: jax.Array) -> jax.Array:
        """The program's place in round `i`."""
        if not self.zigzag:
            return self.program
        return jnp.where(
            lax.rem(i, jnp.int32(2)) == 0, self.program, self.programs - 1 - self.program
        )

    def number(self, i: jax.Array) -> jax.Array:
        """The number of the program's tile `i` among all."""
        if self.table is not None:
            return self.table[self.program, 1 + i]
        if self.together == 1:
            return self.place(i) + i * self.programs
        size = jnp.int32(self.together)
        i, which = lax.div(i, size), lax.rem(i, size)
        return (self.place(i) + i * self.programs) * size + which

    def by_index(self, step: Step) -> None:
        """Calls ``step(i, slot)`` for each tile."""
        lax.fori_loop(jnp.int32(0), self.count, step, jnp.int32(0))

    def loop(self, step: Step) -> None:
        self.by_index(lambda i, slot: step(self.number(i), slot))


def next_slot(slot: jax.Array, stages: int) -> jax.Array:
    return jnp.where(slot == stages - 1, 0, slot + 1)


def slot_after(slot: jax.Array, steps: jax.Array | int, stages: int) -> jax.Array:
    return lax.rem(slot + steps, jnp.int32(stages))


def divide(
    me: jax.Array,
    consumers: int,
    registers: tuple[int, int] | None,
    consume: Callable[[], None],
    produce: Callable[[], None],
) -> None:
    """The first `consumers` warpgroups consume, the one after them produces; `me` is which this is.

    `registers` are those of a thread that consumes, and of one that produces; None if all keep what
    they have. Together they are at most what threads have at the start: a kernel that asks for more
    waits forever.
    """

    @pl.when(me < consumers)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        consume()

    @pl.when(me == consumers)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")
        produce()


def free_at_first(stages: int, slots: Sequence[Ref], own: Ref | None = None) -> None:
    """A consumer's arrivals before the first tile: all memory is free.

    `slots` are barriers of each of `stages` slots, `own` that of memory which is this warpgroup's
    alone, if any.
    """
    if own is not None:
        plgpu.barrier_arrive(own)
    for barrier in slots:
        for i in range(stages):
            plgpu.barrier_arrive(barrier.at[i])


class PingPong:
    """Turns of a program's consumers at what one at a time should do (FlashAttention-3).

    Such as exponentials: warpgroups that begin together stay together, all at the exponentials and
    then all at the matrix unit, one of which is idle meanwhile. Each must take as many turns as the
    others. The compiler moves instructions over neither `wait`, which is a loop, nor what a product
    needs over its start: `hand_on` belongs after one or the other. `barriers` are of `memory`, or
    None for no turns; `me` is this consumer's number.
    """

    def __init__(self, barriers: Ref | None, me: jax.Array, count: int) -> None:
        self._barriers, self._me, self._count = barriers, me, count

    @staticmethod
    def memory(count: int) -> Any:
        """A program's memory for `count` consumers."""
        return plgpu.Barrier(num_barriers=count)

    def begin(self) -> None:
        """Gives the first consumer the first turn; all consumers call it, once."""
        if self._barriers is not None:
            first = self._barriers.at[0]
            pl.when(self._me == 0)(lambda: plgpu.barrier_arrive(first))

    def wait(self) -> None:
        """Waits until it is this consumer's turn."""
        if self._barriers is not None:
            plgpu.barrier_wait(self._barriers.at[self._me])

    def hand_on(self) -> None:
        if self._barriers is not None:
            plgpu.barrier_arrive(self._barriers.at[next_slot(self._me, self._count)])


def _transforms(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    wide = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(swizzle)


def swizzle_of(columns: int, dtype: Any) -> int:
    """Bytes over which rows are interleaved against bank conflicts."""
    size = columns * jnp.dtype(dtype).itemsize
    return next(s for s in (128, 64, 32) if size % s == 0)


def tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that matrix instructions and copies need."""
    transforms = _transforms(swizzle_of(shape[-1], dtype), dtype)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref: Ref) -> Ref:
    """A matrix in memory, read with its axes swapped, by whichever name this jax has for it."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def tile_type(ref: Ref) -> Any:
    """The type of `tile`'s memory as an argument of `inline`."""
    return plgpu.RefType(_transforms(swizzle_of(ref.shape[-1], ref.dtype), ref.dtype))


def load(ref: Ref, layout: Any) -> jax.Array:
    # What `plgpu.load` does in every version; its own arguments changed from one to the next.
    return plgpu.layout_cast(ref[...], layout)


def full(
    x: float, shape: tuple[int, ...], layout: Any = plgpu.Layout.WGMMA, dtype: Any = jnp.float32
) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, x, dtype), layout)


def iota(layout: Any, size: int = ROWS) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def along(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Numbers repeated over the other axis of a matrix."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def array(shape: tuple[int, ...], dtype: Any, layout: Any = plgpu.Layout.WGMMA) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout)


def inline(f: Callable[..., Any], arguments: Sequence[Any], returns: Any = None) -> Any:
    """`f`, written with `lane`, as a function of Pallas' arrays and references."""
    return plgpu.inline_mgpu(arg_types=tuple(arguments), return_type=returns)(
        lambda context, *args: f(*args)
    )


def anew(x: jax.Array) -> jax.Array:
    """`x`, which the compiler does not recognize as `x`, so that it computes from it again."""
    return inline(mgpu.optimization_barrier, (SCALAR,), array((), jnp.int32, SCALAR))(x)


def launch(
    kernel: Callable[..., None],
    name: str,
    out_type: Any,
    total: int,
    programs: int,
    *,
    consumers: int = WARPGROUPS,
    approx_math: bool = False,
    **parameters: Any,
) -> Any:
    """The call of a kernel with one producer and `consumers` warpgroups that compute.

    Of `total` tiles at most `programs` run side by side, one to a multiprocessor. With
    `approx_math` Pallas may use approximate instructions; `parameters` are more of the compiler's.
    """
    call = functools.partial(
        plgpu.kernel,
        kernel,
        grid=(min(programs, total),),
        grid_names=(PROGRAM,),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=approx_math,
            **parameters,
        ),
    )
    return varying.typed(lambda out: call(out_type=out), out_type)
