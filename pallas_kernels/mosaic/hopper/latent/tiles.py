"""Decode over latents on Hopper: what is static, what is read, and the work of a program."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import Span, span
from pallas_kernels.mosaic.ring import ROW, ROWS

TILE = 64
"""Tokens that are multiplied at once."""
LATENT, ROPE = 512, 64
"""Channels: of the latent, and of the rotary part of a key."""
HALVES = 2
"""Halves of the latent's channels; each is summed by its own warpgroup."""
HALF = LATENT // HALVES


@dataclasses.dataclass(frozen=True)
class Settings:
    """A call's static settings.

    Attributes:
      scale: factor of the products.
      window: how many earlier tokens a query sees, or None.
      part: tokens of the parts that programs take, a multiple of a tile's.
      codec: how the latent is stored if not in the query's 16 bits.
      ahead: prefetch to the L2 cache the tile that is so many after the one being copied; 0 for
        none.
      registers: of a thread that attends and of one that copies.
      programs: how many run side by side, one to a multiprocessor.
    """

    scale: float
    window: int | None = None
    part: int = 1024
    codec: Codec | None = None
    ahead: int = 2
    registers: tuple[int, int] = (216, 72)
    programs: int = 132


def settings(
    scale: float,
    heads: int,
    *,
    window: int | None = None,
    codec: Codec | None = None,
    programs: int = 132,
) -> Settings:
    """Settings for a call; `heads` are the queries of a token.

    How a sequence is cut into parts, and so the bits of its results, depends on the heads alone:
    neither on the batch nor on the number of new tokens.
    """
    # Parts' results grow with the heads, and so do the programs of a part.
    part = 1024 if heads <= ROWS else 2048
    registers = (232, 40) if codec is None else (208, 88)
    # Copies of 16-bit latents take all of the time, so prefetching costs: 64 x 8k, 16 heads, 203 us
    # with 2 tiles, 193 with 1, 180 with none. Codes wait to be expanded: 206, 207 and 210.
    ahead = 0 if codec is None else 2
    return Settings(scale, window, part, codec, ahead, registers, programs)


class Inputs(NamedTuple):
    """What the kernel reads, see `kernel.attend`; queries are ``[B, R, channels]``."""

    q: Ref
    q_rope: Ref
    latent: Ref
    rope: Ref
    tables: Ref
    lengths: Ref
    query_lengths: Ref
    parts: Ref
    scale: Ref | None = None


class Work:
    """64 query rows of a sequence and a part of its tokens, given a piece of work's number.

    Numbers count all rows of a part first, so that programs that run together read the same
    latents; then all sequences, then the parts.

    Attributes:
      place: the number of its rows' tile.
      first: the first of its rows.
      rows: of each sequence.
      base: the number of the sequence's first row in the part's results.
      part: which part of the tokens it is.
      length: of the sequence.
      real: how many query tokens of the sequence are real.
      begin: position of the sequence's first query.
      is_broken: whether the sequence cannot be read.
      tiles: of tokens.
    """

    def __init__(self, number: jax.Array, x: Inputs, heads: int, s: Settings) -> None:
        batch, rows, _ = x.q.shape
        places = jnp.int32(pl.cdiv(rows, ROWS))
        self.place, number = lax.rem(number, places), lax.div(number, places)
        self.b, self.part = lax.rem(number, jnp.int32(batch)), lax.div(number, jnp.int32(batch))
        self.part = self.part + x.parts[0]
        self.first, self.heads, self.rows = self.place * ROWS, heads, rows
        self.base = (self.part * batch + self.b) * rows
        length = x.lengths[self.b]
        self.is_broken, self.length = length < 0, jnp.maximum(length, 0)
        self.real = x.query_lengths[self.b]
        self.begin = self.length - self.real
        first = lax.div(self.first, jnp.int32(heads))
        last = jnp.minimum(lax.div(self.first + (ROWS - 1), jnp.int32(heads)), self.real - 1)
        last = jnp.where(first < self.real, self.begin + last, -1)
        per_part = s.part // TILE
        start = self.part * per_part
        tiles = span(self.begin + first, last, TILE, s.window)
        self.tiles = Span(*(jnp.clip(at, start, start + per_part) for at in tiles))

    @property
    def is_any(self) -> jax.Array:
        return self.tiles.begin < self.tiles.end

    def token_of(self) -> jax.Array:
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + self.first
        return lax.div(row, jnp.full_like(row, self.heads))
