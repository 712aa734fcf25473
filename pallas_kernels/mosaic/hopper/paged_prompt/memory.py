"""Shared memory of a program for many queries to pages on Hopper, and its barriers."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import ring
from pallas_kernels.mosaic.hopper.paged_prompt import lost
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import (
    Inputs,
    Settings,
    query_slots,
    tile_tokens,
    together,
)
from pallas_kernels.mosaic.ring import ROWS, WARPGROUPS

# Bytes of a row of the output that are stored at once.
_WIDTH = 128


class Memory(NamedTuple):
    """Shared memory, and the barriers of its slots."""

    q: Ref
    k: Ref
    v: Ref
    lost: Ref
    out: Ref
    lse: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    v_here: Ref
    q_free: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref

    @property
    def is_ahead(self) -> bool:
        """Whether the next tile's operands are copied, and used, while this one ends."""
        return self.q.shape[0] > WARPGROUPS

    def turns(self) -> None:
        """Lets the other warpgroup go on, and waits until that does the same."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def pieces(page_size: int, tile: int) -> int:
    return max(1, tile // page_size)


def memory(x: Inputs, out: Ref, s: Settings) -> Memory:
    head_dim = x.q.shape[3]
    tile = tile_tokens(head_dim)
    copies = pieces(x.k.shape[2], tile)
    heads = together(x.q.shape[2] // x.k.shape[1])
    rows, queries = (WARPGROUPS, ROWS), query_slots(head_dim) * WARPGROUPS
    width = _WIDTH // jnp.dtype(out.dtype).itemsize
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages)
    return Memory(
        q=ring.tile((queries, ROWS, head_dim), x.q.dtype),
        k=ring.tile((s.stages, tile, head_dim), x.k.dtype),
        v=ring.tile((s.stages, *(x.v.shape[2:] if x.is_turned else (tile, head_dim))), x.v.dtype),
        lost=lost.memory(s.stages),
        out=ring.tile((*rows, width), out.dtype),
        lse=plgpu.SMEM(rows, jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=heads, num_barriers=queries),
        k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        # The warpgroup that checks values arrives too, or instead of all.
        v_ready=plgpu.Barrier(num_arrivals=1 if x.is_turned else copies + 1, num_barriers=s.stages),
        v_here=plgpu.Barrier(num_arrivals=copies),
        q_free=plgpu.Barrier(num_barriers=queries),
        k_free=free,
        v_free=free,
        turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
