"""Latents of codes or 8-bit floats as 16-bit numbers in shared memory, by the copying warpgroup.

A warp has 16 tokens of a tile of 64, all in one page. For half a token at a time each lane loads
eight channels, 4 or 8 bytes, and stores 16 bytes where the matrix unit finds them. What is loaded
stays in registers until its slot is free, so loads run ahead of it; the tile after is asked for in
the L2 cache meanwhile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.hopper.latent.tiles import HALF, HALVES, LATENT, ROPE, TILE, Inputs, Work
from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec, centroids
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments
from pallas_kernels.mosaic.ring import ROWS, SCALAR

_TOKENS = 16
_EIGHT = 8
# Words of a lane that are on their way: what registers there are.
_WORDS = 32
# Tiles ahead that are asked for in the L2 cache.
_AHEAD = 2
_LINE = 128


class Codes:
    """How a warpgroup expands tiles.

    Args:
      x: what the kernel reads.
      codec: how the latent is stored.
      dtype: of the result, ``"bfloat16"`` or ``"float16"``.
    """

    def __init__(self, x: Inputs, codec: Codec, dtype: str) -> None:
        self.x, self.codec, self.dtype = x, codec, dtype
        self.words = codec.bits // 4
        """Of eight channels."""
        self.chunks = HALVES * _TOKENS * self.words // _WORDS
        """Parts of a tile, one after the other in registers."""
        self.tokens = _TOKENS // self.chunks
        """Of a chunk, of each warp."""

    def load(self, work: Work, j: jax.Array, chunk: int) -> list[jax.Array]:
        """Begins to load a chunk of a tile; what `store` takes."""
        page_size, max_pages = self.x.rope.shape[1], self.x.tables.shape[1]
        words = [
            ring.array((ROWS, 2 * _WORDS), jnp.int32),
            ring.array((ROWS, 8), jnp.float32),
        ]

        def f(refs: Any, *numbers: Any) -> tuple[Any, Any]:
            latent, scale, rope, tables = (Pointer.to(ref) for ref in refs)
            b, tile, length = (lane.scalar(n) for n in numbers)
            warp, own = (lane.special("tid.x") >> 5) & 3, lane.special("tid.x") & 31

            def row_of(tile: Int) -> Int:
                """The pool's number of the first token of the warp's in a tile."""
                token = (tile * TILE + warp * _TOKENS).minimum((length - 1).maximum(0))
                entry = (token // page_size).minimum(max_pages - 1)
                page = tables.at((b * max_pages + entry) * 4).word()
                return page * page_size + token % page_size // _TOKENS * _TOKENS

            row = row_of(tile)
            if chunk == 0:
                self._ask_for(latent, rope, row_of(tile + _AHEAD), own)
            first = row + chunk * self.tokens
            factor = scale.times(first + (own & (self.tokens - 1)), 4).float()
            size = LATENT * self.codec.bits // 8
            at = latent.times(first, size).at(own * (4 * self.words))
            found: list[Int] = []
            for i in range(self.tokens):
                for half in range(HALVES):
                    found += at.at(i * size + half * size // HALVES).words(self.words)
            zero = lane.number(0.0)
            return fragments.carrier(found), fragments.of_rows([[factor, zero], [zero, zero]])

        kinds = ((plgpu.RefType(),) * 4, SCALAR, SCALAR, SCALAR)
        refs = (self.x.latent, self.x.scale, self.x.rope, self.x.tables)
        return list(ring.inline(f, kinds, tuple(words))(refs, work.b, j, work.length))

    def _ask_for(self, latent: Pointer, rope: Pointer, row: Int, own: Int) -> None:
        """Asks for a warp's tokens from the pool's row on in the L2 cache."""
        for base, size in ((latent, LATENT * self.codec.bits // 8), (rope, 2 * ROPE)):
            lines = _TOKENS * size // _LINE
            for i in range(0, lines, 32):
                line = own + i if lines >= 32 else own & (lines - 1)
                lane.prefetch(base.times(row, size).at(line * _LINE))

    def store(self, words: list[jax.Array], target: Ref, chunk: int) -> None:
        """Stores a chunk of a tile to a slot ``[2, 64, 256]``."""

        def f(found: Any, factors: Any, target: Any) -> None:
            out = Pointer.to(target)
            words, [[factor, _], _] = fragments.scalars(found), fragments.by_row(factors)
            warp, own = (lane.special("tid.x") >> 5) & 3, lane.special("tid.x") & 31
            for i in range(self.tokens):
                unit = lane.from_lane(factor, lane.integer(i))
                if self.codec.centroids:
                    unit = unit * self.codec.unit
                for half in range(HALVES):
                    begin = (i * HALVES + half) * self.words
                    at = out.at(offset(warp, chunk * self.tokens + i, half, own))
                    at.store_words(self.numbers(words[begin : begin + self.words], unit))

        kinds = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, ring.tile_type(target))
        ring.inline(f, kinds)(*words, target)

    def numbers(self, words: list[Int], unit: Float) -> list[Int]:
        """Eight channels as four words, times a token's unit."""
        if self.codec.centroids:
            x = centroids(words[0], self.codec)
        else:
            halves = [half for word in words for half in lane.half.from_e4m3(word)]
            x = [v for half in halves for v in lane.half.unpack(half)]
        x = [v * unit for v in x]
        return [lane.half.pack(x[i], x[i + 1], self.dtype) for i in range(0, _EIGHT, 2)]


def offset(warp: Int, token: int, half: int, own: Int) -> Int:
    """Of a lane's 16 bytes in a slot.

    Eight rows of 64 channels lie together, pieces of 16 bytes interleaved.

    Args:
      warp: of the warpgroup.
      token: of the warp's 16.
      half: of the channels.
      own: number of the lane, and of its piece in the half.
    """
    row, blocks = token % _EIGHT, HALF // 64
    block = (warp * 2 + token // _EIGHT) * blocks + (own >> 3)
    return block * 1024 + ((own ^ row) & 7) * 16 + (half * TILE * HALF * 2 + row * 128)
