"""What a warp computes of blocks in shared memory and of the int8 buffer."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.block import channel_words
from pallas_kernels.mosaic.hopper.decode.inputs import Arrays, Program
from pallas_kernels.mosaic.hopper.decode.kernel import transposed
from pallas_kernels.mosaic.hopper.decode.types import Numerics, Place, Shape, Width
from pallas_kernels.mosaic.hopper.decode_rows.block import (
    Queries,
    State,
    Tokens,
    Weights,
    add_block,
    scores,
    softmax,
)
from pallas_kernels.mosaic.hopper.decode_rows.operands import (
    channel_of,
    key_channels,
    key_pairs,
    prepare_keys,
    prepare_values,
    signed_bytes,
    value_channels,
    value_pairs,
)
from pallas_kernels.mosaic.hopper.decode_rows.team import Team
from pallas_kernels.mosaic.lane import Float, Int, Pointer


@dataclasses.dataclass(frozen=True, eq=False)
class Products:
    """What a warp computes of blocks and the buffer, with code for each width of keys and values.

    Attributes:
      shape: sizes, with the widest codes.
      key: width of the head's keys.
      value: width of its values.
      tokens: those of the scores' columns.
      queries: the program's.
      scratch: the warp's shared memory of `scratch_bytes`.
    """

    shape: Shape
    key: Width
    value: Width
    here: Place
    n: Numerics
    tokens: Tokens
    queries: Queries
    scratch: Pointer
    team: Team

    def _of_key(self, bits: int) -> Shape:
        return dataclasses.replace(self.shape, key_bits=bits)

    def _of_value(self, bits: int) -> Shape:
        return dataclasses.replace(self.shape, value_bits=bits)

    def _scores(self, f: Callable[[Shape], list[list[Float]]]) -> list[list[Float]]:
        """Scores by row, from `f` for the width of the keys."""
        rows, count = self.shape.rows // 8, self.shape.block // (4 * self.team.size)
        flat = self.key.either(
            [Float] * (rows * count),
            lambda bits: [x for row in f(self._of_key(bits)) for x in row],
        )
        return [flat[i * count : (i + 1) * count] for i in range(rows)]

    def _add(
        self, state: State, weights: Weights, scale: Float, values: Callable[[Shape], Any]
    ) -> State:
        """Adds weighted values, whose operands are ``values(shape)`` for a width of values."""
        flat = self.value.either(
            [Float] * len(state.flat()),
            lambda bits: add_block(
                self.shape, state, weights, values(self._of_value(bits)), scale, self.n
            ).flat(),
        )
        return State.of(flat, self.shape.rows // 16)

    def attend_block(
        self,
        state: State,
        slot: Pointer,
        scales: tuple[Float, Float],
        first_token: Int,
        is_masked: bool,
        when_alone: Callable[[], None],
    ) -> State:
        """Adds the block in shared memory at `slot`; `scales` are those of its keys and values.

        `is_masked` says whether some query may not see all of it. In a team of several warps,
        `when_alone` is called once all of them are done with the block before.
        """
        here, scratch = self.here, self.scratch
        offsets = {name: self.shape.offset(name) for name, _ in self.shape.parts}

        def of_keys(shape: Shape) -> list[list[Float]]:
            prepare_keys(shape, slot, offsets, scratch, here)
            lane.warp_barrier()
            column = self.tokens.of_column(here) * shape.key_row + here.t * (shape.key_row // 4)

            def load(tile: int) -> list[Int]:
                token = slot.at(column, self.tokens.offsets[tile] * shape.key_row)
                return token.words(shape.key_row // 16)

            return scores(
                shape,
                self.shape.block // (8 * self.team.size),
                self.queries,
                here,
                load,
                lambda i: key_channels(scratch, i, here),
                lambda words, i, channels: key_pairs(shape, words, i, channels),
            )

        found = self._scores(of_keys)
        lane.warp_barrier()
        fours = self.shape.head_dim // (32 * self.team.size)

        def prepare(bits: int) -> list[Any]:
            shape = self._of_value(bits)
            before = self.team.member * fours
            prepare_values(shape, slot, offsets, scratch, here, fours, before)
            return []

        self.value.either([], prepare)
        weights = self._softmax(found, scales[0], first_token, is_masked)
        lane.warp_barrier()
        if self.team.size > 1:
            when_alone()
        own = self.team.member * (4 * fours)

        def of_values(shape: Shape) -> Callable[[int], list[list[Int]]]:
            of_four: dict[int, list[Int]] = {}

            def values(number: int) -> list[list[Int]]:
                four, which = divmod(number, 4)
                if four not in of_four:
                    of_four.clear()
                    of_four[four] = value_channels(scratch, four, here)
                channel = channel_of(number, here.g, shape.head_dim) + own
                place = channel * shape.value_row + here.t * (shape.value_row // 4)
                words = slot.at(place, offsets["value"]).words(shape.value_row // 16)
                return value_pairs(shape, words, of_four[four], which)

            return values

        return self._add(state, weights, scales[1], of_values)

    def _softmax(
        self, found: list[list[Float]], scale: Float, first: Int, is_masked: bool
    ) -> Weights:
        return softmax(
            found,
            self.queries,
            scale,
            self.tokens,
            first,
            is_masked,
            self.here,
            self.team,
            self.n,
        )

    def attend_buffer(self, a: Arrays, state: State, at: Program, number: Int) -> State:
        here, begin = self.here, number * self.shape.block
        key, value = (x.buffer.times(at.pair, a.buffer_size * a.head_dim) for x in (a.key, a.value))
        scales = [x.buffer_scale.at(at.pair << 2).float() for x in (a.key, a.value)]

        def row_of(token: Int) -> Int:
            return (token + begin).minimum(a.buffer_size - 1) * a.head_dim

        def of_keys(shape: Shape) -> list[list[Float]]:
            def load(tile: int) -> list[Int]:
                row = key.at(row_of(self.tokens.of_column(here) + self.tokens.offsets[tile]))
                return channel_words(row, here, a.head_dim, shape.key_bits)

            return scores(
                shape,
                self.shape.block // (8 * self.team.size),
                self.queries,
                here,
                load,
                lambda _: None,
                lambda words, i, _: signed_bytes(words[i]),
            )

        found = self._scores(of_keys)
        weights = self._softmax(found, scales[0], at.compressed + begin, True)
        own = self.team.member * (a.head_dim // (8 * self.team.size))

        def of_values(shape: Shape) -> Callable[[int], list[list[Int]]]:
            groups: dict[int, list[list[Int]]] = {}

            def values(number: int) -> list[list[Int]]:
                four, which = divmod(number, 4)
                if four not in groups:
                    groups.clear()
                    groups[four] = transposed(a, shape, value.at(own), four, here, row_of)
                return [signed_bytes(words[which]) for words in groups[four]]

            return values

        return self._add(state, weights, scales[1], of_values)
