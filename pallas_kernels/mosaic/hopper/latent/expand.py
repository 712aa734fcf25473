"""Latents of codes or 8-bit floats as 16-bit numbers in shared memory.

Two warpgroups share a tile of 64 tokens: a warp of each has eight of 16 tokens, all in one page.
For half a token at a time each lane loads eight channels, 4 or 8 bytes, and stores 16 bytes where
the matrix unit finds them. What is loaded stays in registers until its slot is free, so loads run
ahead of it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.hopper.latent.ahead import TOKENS, first_row, place
from pallas_kernels.mosaic.hopper.latent.tiles import HALF, HALVES, LATENT, TILE, Inputs, Work
from pallas_kernels.mosaic.hopper.paged_prompt.expand import BYTE_OFFSET, Codec, centroids
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments
from pallas_kernels.mosaic.ring import ROWS, SCALAR

_EIGHT = 8
SHARES = 2
"""Warpgroups that expand a tile."""


class Codes:
    """How a warpgroup expands tiles to `dtype`, ``"bfloat16"`` or ``"float16"``."""

    def __init__(self, x: Inputs, codec: Codec, dtype: str) -> None:
        self.x, self.codec, self.dtype = x, codec, dtype
        self.words = codec.bits // 4
        """Words of eight channels."""
        self.tokens = TOKENS // SHARES
        """Tokens of a warp's share of a tile."""
        self.count = HALVES * self.tokens * self.words
        """Words of a lane."""

    def load(self, work: Work, j: jax.Array, share: int) -> list[jax.Array]:
        """Begins to load share 0 or 1 of a tile; returns what `store` takes."""

        def f(refs: Any, *numbers: Any) -> tuple[Any, Any]:
            arrays = [Pointer.to(ref) for ref in refs]
            words, factor = self.loaded(arrays, [lane.scalar(n) for n in numbers], share)
            zero = lane.number(0.0)
            return fragments.carrier(words), fragments.of_rows([[factor, zero], [zero, zero]])

        refs = (self.x.latent, self.x.scale, self.x.tables)
        types = ((plgpu.RefType(),) * len(refs), SCALAR, SCALAR, SCALAR)
        out = ring.array((ROWS, 2 * self.count), jnp.int32), ring.array((ROWS, _EIGHT), jnp.float32)
        return list(ring.inline(f, types, out)(refs, work.b, j, work.length))

    def loaded(
        self, arrays: list[Pointer], numbers: list[Int], share: int
    ) -> tuple[list[Int], Float]:
        """A lane's words of a share, and the factor of the warp's token with the lane's number.

        `arrays` are latents, their scales, tables; `numbers` as for `ahead.first_row`.
        """
        latent, scale, tables = arrays
        _, own = place()
        first = first_row(tables, numbers, self.x) + share * self.tokens
        factor = scale.times(first + (own & (self.tokens - 1)), 4).float()
        size = LATENT * self.codec.bits // 8
        at = latent.times(first, size).at(own * (4 * self.words))
        words: list[Int] = []
        for i in range(self.tokens):
            for half in range(HALVES):
                words += at.at(i * size + half * size // HALVES).words(self.words)
        return words, factor

    def store(self, loaded: list[jax.Array], target: Ref, share: int) -> None:
        """Stores a share of a tile to a slot ``[2, 64, 256]``."""

        def f(words: Any, factors: Any, target: Any) -> None:
            factor = fragments.by_row(factors)[0][0]
            self.stored(fragments.scalars(words), factor, Pointer.to(target), share)

        types = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, ring.tile_type(target))
        ring.inline(f, types)(*loaded, target)

    def stored(self, words: list[Int], factor: Float, target: Pointer, share: int) -> None:
        warp, own = place()
        for i in range(self.tokens):
            unit = lane.from_lane(factor, lane.integer(i))
            if self.codec.centroids:
                unit = unit * self.codec.unit
            for half in range(HALVES):
                begin = (i * HALVES + half) * self.words
                at = target.at(offset(warp, share * self.tokens + i, half, own))
                at.store_words(self.numbers(words[begin : begin + self.words], unit))

    def numbers(self, words: list[Int], unit: Float) -> list[Int]:
        """Eight channels as four words, times a token's unit."""
        if self.codec.centroids:
            # The multiplication subtracts their offset, too.
            middle = unit * -(BYTE_OFFSET + self.codec.middle)
            raw = dataclasses.replace(self.codec, middle=-BYTE_OFFSET)
            x = [v.fma(unit, middle) for v in centroids(words[0], raw)]
        else:
            halves = [half for word in words for half in lane.half.from_e4m3(word)]
            x = [v * unit for half in halves for v in lane.half.unpack(half)]
        return [lane.half.pack(x[i], x[i + 1], self.dtype) for i in range(0, _EIGHT, 2)]


def offset(warp: Int, token: int, half: int, own: Int) -> Int:
    """Where a lane's 16 bytes of a token (of its warp's 16) and half of the channels go in a slot.

    Eight rows of 64 channels lie together, pieces of 16 bytes interleaved.
    """
    row, blocks = token % _EIGHT, HALF // 64
    block = (warp * 2 + token // _EIGHT) * blocks + (own >> 3)
    return block * 1024 + ((own ^ row) & 7) * 16 + (half * TILE * HALF * 2 + row * 128)
