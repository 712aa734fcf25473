"""Tokens of a product to e4m3 in the product's own program, while its first weights are on the way.

A launch that rounds 16 tokens takes 2 us, and as much again passes around it; a product's program
waits longer than that for its first weights, with nothing to do. A token's scale needs all of its
inputs: the programs of a cluster, each with its part of them, tell each other the largest.

For 16 tokens of 4096 inputs in a program: it reads 131 KB, from L2 since all programs read the
same, and holds them, 64 words a lane; and 3 instructions a value make 1.5 K clocks, 0.9 us. Its
loads start before the copies of weights: a product of 14336 x 4096 takes 12.9 us then, 0.8 more
than with rounded tokens, and 17.1 the other way round. The bits are those of `quantize_tokens`.

That the product before leaves each token's maximum beside its outputs was the other way. It would
save this kernel one meeting of the cluster, but needs a buffer that is zero before (a launch of its
own) or a maximum over all of its programs, and serves only tokens that a product made.
"""

import dataclasses
from typing import Any

from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer
from pallas_kernels.mosaic.products.int4 import GROUP

_LANES, _WARPS = 32, 4
# Numbers that a lane loads at once, 16 bytes, and runs of them in a group.
_RUN = 8
_RUNS = GROUP // _RUN
_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Rounding:
    dtype: str  # of the tokens, ``"bfloat16"`` or ``"float16"``
    tokens: int  # how many there are, `M`
    inputs: int  # of a token, a multiple of 8
    columns: int  # of the product: `M` and zeros
    groups: int  # of 128 inputs that a program takes at most
    parts: int  # programs of a cluster
    warpgroups: int

    @property
    def warps(self) -> int:
        return _WARPS * self.warpgroups

    @property
    def shares(self) -> int:
        """Warps of a program that share a token; none in a cluster, who would read all maxima."""
        return max(1, self.warps // self.tokens) if self.parts == 1 else 1

    @property
    def at_once(self) -> int:
        """Tokens at a time; warps that are left over have none."""
        return self.warps // self.shares

    @property
    def steps(self) -> int:
        return -(-self.groups * _RUNS // (_LANES * self.shares))

    @property
    def rounds(self) -> int:
        """How many tokens a warp takes, one after the other."""
        return -(-self.tokens // self.at_once)

    @property
    def held(self) -> int:
        """Runs of all its tokens that a lane holds, four words each."""
        return self.steps * self.rounds


@dataclasses.dataclass(frozen=True, eq=False)
class Loads:
    """A lane's share of a program's part of the tokens, on its way to registers."""

    r: Rounding
    number: Int  # of the lane in its warp
    first: Int  # the warp's first token
    share: Int  # which share of its tokens the warp has
    runs: list[list[list[Int]]]  # of each of its tokens

    @classmethod
    def start(cls, x: Pointer, first: Int, r: Rounding) -> "Loads":
        """Starts them: of ``[M, inputs]`` in global memory, from the group `first` on."""
        warp = lane.uniform(lane.thread() >> 5)
        number = lane.thread() & (_LANES - 1)
        loads = cls(r, number, warp // r.shares, warp % r.shares, runs=[])
        for index in range(r.rounds):
            token = loads._token(index)
            row = x.times(token.minimum(r.tokens - 1), r.inputs * _BYTES)
            mine = []
            for step in range(r.steps):
                run = loads._run(step)
                input_ = first * GROUP + run * _RUN
                is_there = loads._has(index, r.tokens)
                is_there = is_there & (run < r.groups * _RUNS) & (input_ < r.inputs)
                words = row.at(is_there.where(input_, 0) * _BYTES).words_once(4, is_there)
                mine.append([is_there.where(word, 0) for word in words])
            loads.runs.append(mine)
        return loads

    def finish(self, target: Pointer, scales: Pointer, maxima: Pointer) -> None:
        """Rounds the tokens and finds their scales; all lanes of a cluster call it.

        In shared memory it writes `target`, e4m3 ``[groups, columns, 128]``, where 16 bytes from
        ``16 c`` on are where those from ``16 (c ^ (column % 8))`` on would be, zeros where no token
        or input is, and NaN in all of a token that is not finite; and `scales`, float32
        ``[columns]``. `maxima`, int32 of as many as columns or warps, must not be used by others.
        """
        r = self.r
        for index, mine in enumerate(self.runs):
            found = [eight_bits.largest_bits(run, r.dtype) for run in mine]
            bits = lane.largest_of_warp(lane.tree(found, _larger))
            with lane.when(self.number.equals(0) & self._has(index, r.tokens)):
                maxima.at(self._maxima(index) + (self.share << 2)).store(bits)
        areas: list[Any] = [maxima]
        if r.parts > 1:
            lane.cluster_barrier()
            areas = [ClusterPointer.of(maxima, i) for i in range(r.parts)]
        elif r.shares > 1:
            lane.block_barrier()
        else:
            lane.warp_barrier()
        for index in range(-(-r.columns // r.at_once)):
            runs, scale = None, lane.number(1.0)
            if index < r.rounds:
                runs, place = self.runs[index], self._maxima(index)
                each = [area.at(place + 4 * i) for area in areas for i in range(r.shares)]
                bits = lane.tree([at.float().as_int() for at in each], _larger)
                scale = eight_bits.token_scale(bits, r.dtype)
            is_first = self.number.equals(0) & self.share.equals(0)
            with lane.when(is_first & self._has(index, r.columns)):
                scales.at(self._token(index) << 2).store(scale)
            self._store(index, runs, scale, target)

    def _store(
        self, index: int, runs: list[list[Int]] | None, scale: Float, target: Pointer
    ) -> None:
        # The instruction that XLA uses, for the same bits.
        inverse = lane.divide(lane.number(1.0), scale)
        token, r = self._token(index), self.r
        for step in range(r.steps):
            words = [lane.integer(0)] * 2
            if runs is not None:
                values = [v * inverse for x in runs[step] for v in lane.half.unpack(x, r.dtype)]
                words = [lane.pack_e4m3(values[i : i + 4]) for i in (0, 4)]
            run = self._run(step)
            chunk = run >> 1
            place = (chunk >> 3) * (r.columns * GROUP) + token * GROUP
            place = place + ((((chunk ^ token) & 7) << 4) + ((run & 1) << 3))
            with lane.when(self._has(index, r.columns) & (run < r.groups * _RUNS)):
                target.at(place).store_words(words)

    def _token(self, index: int) -> Int:
        return self.first + index * self.r.at_once

    def _has(self, index: int, count: int) -> lane.Bool:
        """Whether the warp has a token in this round, one of `count`."""
        is_one = self._token(index) < count
        if self.r.warps % self.r.shares:
            is_one = is_one & (self.first < self.r.at_once)
        return is_one

    def _maxima(self, index: int) -> Int:
        """Where those of the warp's token are; past the last token, the last once more."""
        return self._token(index).minimum(self.r.tokens - 1) * (4 * self.r.shares)

    def _run(self, step: int) -> Int:
        """The lane's run at this step, among those of a token's part."""
        return self.number + self.share * _LANES + step * (_LANES * self.r.shares)


def _larger(a: Int, b: Int) -> Int:
    return a.maximum(b)
