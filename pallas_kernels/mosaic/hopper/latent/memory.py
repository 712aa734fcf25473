"""Shared memory of a program that decodes over latents on Hopper, and its barriers."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import ring
from pallas_kernels.mosaic.hopper.latent.expand import SHARES
from pallas_kernels.mosaic.hopper.latent.tiles import HALF, HALVES, ROPE, TILE, Inputs, Settings
from pallas_kernels.mosaic.hopper.paged_prompt import lost
from pallas_kernels.mosaic.hopper.paged_prompt.memory import pieces
from pallas_kernels.mosaic.ring import ROWS

STAGES = 2
"""Tiles of tokens: all that there is room for."""


class Memory(NamedTuple):
    """Shared memory, and the barriers of its slots."""

    q: Ref
    q_rope: Ref
    latent: Ref
    rope: Ref
    p: Ref
    factor: Ref
    lost: Ref
    q_ready: Ref
    q_free: Ref
    ready: Ref
    free: Ref
    p_ready: Ref
    p_free: Ref


def memory(x: Inputs, s: Settings) -> Memory:
    copies, dtype = pieces(x.rope.shape[1], TILE), x.q.dtype
    # Copies of the rotary part, and of each half; or the warpgroups that expand.
    arrivals = copies * (1 + HALVES) if s.codec is None else copies + SHARES
    return Memory(
        q=ring.tile((HALVES, ROWS, HALF), dtype),
        q_rope=ring.tile((ROWS, ROPE), dtype),
        latent=ring.tile((STAGES, HALVES, TILE, HALF), dtype),
        rope=ring.tile((STAGES, TILE, ROPE), dtype),
        p=ring.tile((ROWS, TILE), dtype),
        factor=plgpu.SMEM((ROWS,), jnp.float32),
        lost=lost.memory(HALVES),
        q_ready=plgpu.Barrier(num_arrivals=1 + HALVES),
        q_free=plgpu.Barrier(),
        ready=plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
        p_ready=plgpu.Barrier(),
        p_free=plgpu.Barrier(),
    )
