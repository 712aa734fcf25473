"""What a warpgroup of the prefill kernel does with a tile of 64 queries."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import _products, _softmax
from pallas_kernels.mosaic._softmax import Exponential, Policy

Ref = Any
# Query rows of one warpgroup: the height of a matrix instruction.
ROWS = 64
WARPGROUPS = 2
ROW = plgpu.Layout.WGMMA.reduce(1)
SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in an attention call.

    Attributes:
      mode: ``"int8"``, ``"int8_fp8"`` or ``"fp8"``.
      exponential: the softmax's.
      block_q: query tokens that share a scale, a multiple of 64.
      block_kv: tokens of a key block, 64 or 128.
      scale: factor of the scores.
      is_causal: a query sees keys up to its own position.
      window: optional (left, right).
      soft_cap: optional cap of the scores.
      stages: key and value blocks in shared memory.
      ahead: whether a block's scores are computed under the exponentials of the one before.
      programs: how many run side by side, one to a multiprocessor.
    """

    mode: str
    exponential: Exponential
    block_q: int
    block_kv: int
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    stages: int = 4
    programs: int = 132
    ahead: bool = False

    @property
    def policy(self) -> Policy:
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0
        return Policy(
            exponential=self.exponential,
            is_int8=self.mode == "int8",
            scores_are_integers=self.mode != "fp8",
            left=left,
            right=right,
            soft_cap=self.soft_cap,
        )


def _swizzle(size: int) -> int:
    """Bytes over which rows of `size` bytes are interleaved against bank conflicts."""
    return next(s for s in (128, 64, 32) if size % s == 0)


def tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that matrix instructions and copies need."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = _swizzle(shape[-1] * itemsize)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def tiled(ref: Ref) -> Any:
    """The type of `tile`'s memory as an argument."""
    itemsize = jnp.dtype(ref.dtype).itemsize
    swizzle = _swizzle(ref.shape[-1] * itemsize)
    return plgpu.RefType(
        (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    )


def matrix(shape: tuple[int, ...], dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), plgpu.Layout.WGMMA)


def inline(f: Any, arguments: tuple[Any, ...], returns: Any) -> Any:
    """`f` on register arrays as a function of Pallas arrays."""
    return plgpu.inline_mgpu(arg_types=arguments, return_type=returns)(
        lambda context, *args: f(*args)
    )


def row_type() -> Any:
    return plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype(jnp.float32), ROW)


class Span(NamedTuple):
    """Key blocks of a tile: ``begin`` alone, then up to `inner`, `outer` and `end`.

    Every query sees those from `inner` to `outer` without a mask; `full_first` says whether the
    first one too.
    """

    begin: jax.Array
    inner: jax.Array
    outer: jax.Array
    end: jax.Array
    full_first: jax.Array


def span(first: jax.Array, length: jax.Array, s: Settings) -> Span:
    """Key blocks that some of the queries ``first, ..`` see, and within them those that all see.

    At least one block, whether or not there is a key.
    """
    p = s.policy
    last = first + WARPGROUPS * ROWS - 1
    start, stop, full_start, full_stop = jnp.int32(0), length, jnp.int32(0), length
    if p.right is not None:
        stop = jnp.minimum(stop, last + (p.right + 1))
        full_stop = jnp.minimum(full_stop, first + (p.right + 1))
    if p.left is not None:
        start = jnp.maximum(first - p.left, 0)
        full_start = jnp.maximum(last - p.left, 0)
    block = jnp.int32(s.block_kv)
    end = lax.div(stop + (block - 1), block)
    begin = lax.div(start, block)
    end = jnp.maximum(end, 1)
    begin = jnp.minimum(begin, end - 1)
    full_first = (begin * block >= full_start) & ((begin + 1) * block <= full_stop)
    # The first block is processed by itself.
    inner = jnp.clip(lax.div(full_start + (block - 1), block), begin + 1, end)
    outer = jnp.clip(lax.div(full_stop, block), inner, end)
    return Span(begin, inner, outer, end, full_first)


def next_slot(slot: jax.Array, s: Settings) -> jax.Array:
    """The place in shared memory of the following block."""
    return jnp.where(slot == s.stages - 1, 0, slot + 1)


@dataclasses.dataclass(frozen=True)
class Consumer:
    """What a warpgroup's steps share."""

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
    s: Settings

    def wait_for_key(self, j: jax.Array, slot: jax.Array) -> None:
        """Until keys of block `j` are in shared memory, if there is such a block."""

        @pl.when(j < self.blocks.end)
        def _() -> None:
            plgpu.barrier_wait(self.ready[0].at[slot])

    def scores(self, slot: jax.Array) -> jax.Array:
        """Starts the first product of a block."""
        s, k = self.s, self.buffers[0].at[slot]
        dtype = jnp.float32 if s.mode == "fp8" else jnp.int32
        swizzle = _swizzle(k.shape[-1])

        def f(q: Any, k: Any) -> Any:
            return _products.start(q, k, swizzle=swizzle, a_swizzle=swizzle)

        return inline(f, (tiled(self.q), tiled(k)), matrix((ROWS, s.block_kv), dtype))(self.q, k)

    def output(self, p: jax.Array, slot: jax.Array) -> jax.Array:
        """Starts the second product of a block."""
        v = self.buffers[1].at[slot]
        dtype = jnp.int32 if self.s.mode == "int8" else jnp.float32
        swizzle = _swizzle(v.shape[-1])

        def f(p: Any, v: Any) -> Any:
            return _products.start(p, v, swizzle=swizzle)

        types = (plgpu.Layout.WGMMA_8BIT, tiled(v))
        return inline(f, types, matrix((ROWS, v.shape[0]), dtype))(p, v)

    def softmax(
        self,
        scores: jax.Array,
        m: jax.Array,
        l: jax.Array,
        j: jax.Array,
        k_scale: jax.Array,
        is_masked: bool,
    ) -> tuple[jax.Array, ...]:
        """`_softmax.step` of block `j`."""
        types = [plgpu.Layout.WGMMA, ROW, ROW, SCALAR]
        args = [scores, m, l, self.factor * k_scale]
        if is_masked:
            key = j * self.s.block_kv
            args += [self.first - key, self.length - key]
            types += [SCALAR, SCALAR]

        def f(scores: Any, m: Any, l: Any, factor: Any, *limits: Any) -> tuple[Any, ...]:
            return _softmax.step(scores, m, l, factor, limits or None, self.s.policy)

        weights = matrix(scores.shape, jnp.float32)
        return inline(f, tuple(types), (weights, *[row_type()] * 4))(*args)

    def pack(self, weights: jax.Array) -> jax.Array:
        """`_softmax.pack`."""
        dtype = jnp.int8 if self.s.mode == "int8" else jnp.float8_e4m3fn
        p = plgpu.ShapeDtypeStruct(weights.shape, jnp.dtype(dtype), plgpu.Layout.WGMMA_8BIT)
        f = functools.partial(_softmax.pack, policy=self.s.policy)
        return inline(f, (plgpu.Layout.WGMMA,), p)(weights)

    def merge(
        self, o: jax.Array, product: jax.Array, alpha: jax.Array, unit: jax.Array
    ) -> jax.Array:
        """`_softmax.accumulate`."""
        is_int8 = self.s.mode == "int8"
        kind = plgpu.ShapeDtypeStruct(o.shape, o.dtype, plgpu.Layout.WGMMA)
        types = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, ROW, ROW)

        def f(o: Any, product: Any, alpha: Any, unit: Any) -> Any:
            return _softmax.accumulate(o, product, alpha, unit if is_int8 else None, self.s.policy)

        return inline(f, types, kind)(o, product, alpha, unit)

    def value_unit(self, unit: jax.Array, j: jax.Array) -> jax.Array:
        """An int8 block's unit with that of its values."""
        if self.s.mode != "int8":
            return unit
        return jnp.where(unit == 0, 0.0, unit * self.scales[1][(*self.at, j)])

    def run(self, slot: jax.Array) -> tuple[jax.Array, ...]:
        """All blocks, the first of them in `slot`.

        Returns:
          the unnormalized output, the maxima and the sums, and the slot after the last block's.
        """
        s, blocks = self.s, self.blocks
        head_dim = self.buffers[1].shape[1]

        def full(
            x: float, shape: tuple[int, ...], layout: Any, dtype: Any = jnp.float32
        ) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, x, dtype), layout)

        scale = self.scales[0][(*self.at, blocks.begin)]
        self.wait_for_key(blocks.begin, slot)
        scores = self.scores(slot)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free[0].at[slot])
        m, l = full(-jnp.inf, (ROWS,), ROW), full(0.0, (ROWS,), ROW)
        alpha, unit = full(1.0, (ROWS,), ROW), full(0.0, (ROWS,), ROW)
        p, m, l, next_alpha, next_unit = lax.cond(
            blocks.full_first,
            lambda: self.softmax(scores, m, l, blocks.begin, scale, False),
            lambda: self.softmax(scores, m, l, blocks.begin, scale, True),
        )
        following = next_slot(slot, s)
        self.wait_for_key(blocks.begin + 1, following)
        plgpu.barrier_wait(self.ready[1].at[slot])
        p = self.pack(p)
        o = full(0.0, (ROWS, head_dim), plgpu.Layout.WGMMA)
        dtype = jnp.int32 if s.mode == "int8" else jnp.float32
        product = full(0, (ROWS, head_dim), plgpu.Layout.WGMMA, dtype)

        def step(j: jax.Array, carry: tuple[jax.Array, ...], is_masked: bool) -> Any:
            o, product, alpha, unit, m, l, next_alpha, next_unit, p, before, slot = carry
            following = next_slot(slot, s)
            scale = self.scales[0][(*self.at, j)]
            value_unit = self.value_unit(next_unit, j - 1)
            scores = self.scores(slot)
            # While the scores are on their way.
            o = self.merge(o, product, alpha, unit)
            product = self.output(p, before)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(self.free[0].at[slot])
            alpha, unit = next_alpha, value_unit
            p, m, l, next_alpha, next_unit = self.softmax(scores, m, l, j, scale, is_masked)
            # Loops over which the compiler moves no instructions: the softmax stays before them.
            self.wait_for_key(j + 1, following)
            plgpu.barrier_wait(self.ready[1].at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free[1].at[before])
            p = self.pack(p)
            return o, product, alpha, unit, m, l, next_alpha, next_unit, p, slot, following

        carry = (o, product, alpha, unit, m, l, next_alpha, next_unit, p, slot, following)
        masked, plain = (functools.partial(step, is_masked=x) for x in (True, False))
        if s.policy.left is not None:
            carry = lax.fori_loop(blocks.begin + 1, blocks.inner, masked, carry)
        carry = lax.fori_loop(blocks.inner, blocks.outer, plain, carry)
        carry = lax.fori_loop(blocks.outer, blocks.end, masked, carry)
        o, product, alpha, unit, m, l, next_alpha, next_unit, p, slot, following = carry
        plgpu.barrier_arrive(self.query_free)
        unit_of_last = self.value_unit(next_unit, blocks.end - 1)
        o = self.merge(o, product, alpha, unit)
        product = self.output(p, slot)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free[1].at[slot])
        return self.merge(o, product, next_alpha, unit_of_last), m, l, following

    def limits(self, j: jax.Array, is_masked: bool) -> tuple[jax.Array, ...]:
        """What `_softmax` compares block `j`'s keys with, if there is something to hide."""
        key = j * self.s.block_kv
        return (self.first - key, self.length - key) if is_masked else ()

    def maxima(
        self, scores: jax.Array, m: jax.Array, factor: jax.Array, limits: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """`_softmax.maxima`."""
        types = (plgpu.Layout.WGMMA, ROW, SCALAR, *[SCALAR] * len(limits))

        def f(scores: Any, m: Any, factor: Any, *limits: Any) -> tuple[Any, ...]:
            return _softmax.maxima(scores, m, factor, limits or None, self.s.policy)

        return inline(f, types, (row_type(),) * 3)(scores, m, factor, *limits)

    def arguments(
        self, scores: jax.Array, m: jax.Array, factor: jax.Array, limits: tuple[jax.Array, ...]
    ) -> jax.Array:
        """`_softmax.arguments`."""
        types = (plgpu.Layout.WGMMA, ROW, SCALAR, *[SCALAR] * len(limits))

        def f(scores: Any, m: Any, factor: Any, *limits: Any) -> Any:
            return _softmax.arguments(scores, m, factor, limits or None, self.s.policy)

        values = matrix(scores.shape, jnp.float32)
        return inline(f, types, values)(scores, m, factor, *limits)

    def weigh(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        """`_softmax.weigh`."""
        types = (plgpu.Layout.WGMMA, *[ROW] * 4)
        weights = matrix(args[0].shape, jnp.float32)
        f = functools.partial(_softmax.weigh, policy=self.s.policy)
        return inline(f, types, (weights, row_type(), row_type()))(*args)

    def run_ahead(self, slot: jax.Array) -> tuple[jax.Array, ...]:
        """`run`, with the next block's scores computed under this one's exponentials.

        The compiler moves instructions freely between asynchronous products, but not over a loop:
        the waits for memory stand where it must not.
        """
        s, blocks = self.s, self.blocks
        head_dim = self.buffers[1].shape[1]

        def full(x: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)

        def first(is_masked: bool) -> tuple[jax.Array, ...]:
            limits = self.limits(blocks.begin, is_masked)
            top, m, alpha = self.maxima(scores, full(-jnp.inf, (ROWS,), ROW), factor, limits)
            return self.arguments(scores, m, factor, limits), top, m, alpha

        factor = self.factor * self.scales[0][(*self.at, blocks.begin)]
        self.wait_for_key(blocks.begin, slot)
        scores = self.scores(slot)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free[0].at[slot])
        x, top, m, alpha = lax.cond(blocks.full_first, lambda: first(False), lambda: first(True))
        following = next_slot(slot, s)
        self.wait_for_key(blocks.begin + 1, following)
        o, l = full(0.0, (ROWS, head_dim), plgpu.Layout.WGMMA), full(0.0, (ROWS,), ROW)

        def step(j: jax.Array, carry: tuple[jax.Array, ...], is_masked: bool) -> Any:
            """Weights of block ``j - 1``, scores of `j`."""
            o, l, x, top, m, alpha, before, slot = carry
            k_scale = self.scales[0][(*self.at, j)]
            scores = self.scores(slot)
            weights, l, unit = self.weigh(x, top, m, alpha, l)
            plgpu.barrier_wait(self.ready[1].at[before])
            plgpu.wgmma_wait(0)
            product = self.output(self.pack(weights), before)
            plgpu.barrier_arrive(self.free[0].at[slot])

            @pl.when(k_scale < 0)  # never: a loop that keeps maxima from coming between products
            def _() -> None:
                plgpu.barrier_wait(self.ready[0].at[slot])

            factor, limits = self.factor * k_scale, self.limits(j, is_masked)
            top, m, next_alpha = self.maxima(scores, m, factor, limits)
            unit = self.value_unit(unit, j - 1)
            following = next_slot(slot, s)
            self.wait_for_key(j + 1, following)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free[1].at[before])
            o = self.merge(o, product, alpha, unit)
            # Now, because it moves them to the registers that the product leaves.
            x = self.arguments(scores, m, factor, limits)
            return o, l, x, top, m, next_alpha, slot, following

        carry = (o, l, x, top, m, alpha, slot, following)
        masked, plain = (functools.partial(step, is_masked=x) for x in (True, False))
        if s.policy.left is not None:
            carry = lax.fori_loop(blocks.begin + 1, blocks.inner, masked, carry)
        carry = lax.fori_loop(blocks.inner, blocks.outer, plain, carry)
        carry = lax.fori_loop(blocks.outer, blocks.end, masked, carry)
        o, l, x, top, m, alpha, slot, following = carry
        plgpu.barrier_arrive(self.query_free)
        weights, l, unit = self.weigh(x, top, m, alpha, l)
        plgpu.barrier_wait(self.ready[1].at[slot])
        product = self.output(self.pack(weights), slot)
        unit = self.value_unit(unit, blocks.end - 1)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free[1].at[slot])
        return self.merge(o, product, alpha, unit), m, l, following
