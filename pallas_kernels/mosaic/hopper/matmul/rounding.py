"""Tokens of a product to e4m3 in the product's own program, while its first weights are on the way.

A launch that rounds 16 tokens takes 2 us, and as much again passes around it; a product's program
waits longer than that for its first weights, with nothing to do. A token's scale needs all of its
inputs: the programs of a cluster, each with its part of them, tell each other the largest.

Two numbers, for 16 tokens of 4096 inputs in a cluster of 2: a program reads 66 KB, from L2 since 64
programs read the same, and holds them, 32 words a lane; and 3 instructions a value make 1.5 K
clocks of a multiprocessor's lanes, 0.8 us. The bits are those of `quantize_tokens`.

That the product before leaves each token's maximum beside its outputs was the other way. It would
save this kernel one meeting of the cluster, but needs a buffer that is zero before (a launch of its
own) or a maximum over all of its programs, and serves only tokens that a product made.
"""

import dataclasses
from typing import Any

from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.lane import ClusterPointer, Int, Pointer
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
        """Warps of a program; each takes every ``warps``-th token."""
        return _WARPS * self.warpgroups

    @property
    def steps(self) -> int:
        return -(-self.groups * _RUNS // _LANES)

    @property
    def held(self) -> int:
        """Runs of all its tokens that a lane holds, four words each."""
        return self.steps * -(-self.tokens // self.warps)


def load_rounded(
    x: Pointer,
    first: Int,
    target: Pointer,
    scales: Pointer,
    maxima: Pointer,
    r: Rounding,
) -> None:
    """Rounds a program's part of the tokens and finds their scales; all lanes of a cluster call it.

    `x` is ``[M, inputs]`` in global memory, and `first` the program's first group of inputs. In
    shared memory it writes `target`, e4m3 ``[groups, columns, 128]``, where 16 bytes from ``16 c``
    on are where those from ``16 (c ^ (column % 8))`` on would be, zeros where no token or input is,
    and NaN in all of a token that is not finite; and `scales`, float32 ``[columns]``. `maxima`,
    int32 ``[columns]``, must not be used by anything else.
    """
    warp = lane.uniform(lane.thread() >> 5)
    number = lane.thread() & (_LANES - 1)
    tokens = [warp + i * r.warps for i in range(-(-r.columns // r.warps))]
    runs = [_read(x, token, number, first, r) for token in tokens[: -(-r.tokens // r.warps)]]
    for token, mine in zip(tokens, runs, strict=False):
        found = [eight_bits.largest_bits(run, r.dtype) for run in mine]
        bits = lane.largest_of_warp(lane.tree(found, _larger))
        with lane.when(number.equals(0) & (token < r.columns)):
            maxima.at(token << 2).store(bits)
    if r.parts == 1:
        # One warp takes a token.
        lane.warp_barrier()
        areas: list[Any] = [maxima]
    else:
        lane.cluster_barrier()
        areas = [ClusterPointer.of(maxima, i) for i in range(r.parts)]
    nothing = [[lane.integer(0)] * 4] * r.steps
    for i, token in enumerate(tokens):
        at = token.minimum(r.columns - 1)
        if i < len(runs):
            place = at << 2
            bits = lane.tree([area.at(place).float().as_int() for area in areas], _larger)
            scale = eight_bits.token_scale(bits, r.dtype)
        else:
            scale = lane.number(1.0)
        with lane.when(number.equals(0) & (token < r.columns)):
            scales.at(at << 2).store(scale)
        _store(runs[i] if i < len(runs) else nothing, scale, token, number, target, r)


def _read(x: Pointer, token: Int, number: Int, first: Int, r: Rounding) -> list[list[Int]]:
    """A lane's runs of a token, zeros where there are none."""
    row = x.times(token.minimum(r.tokens - 1), r.inputs * _BYTES)
    runs = []
    for i in range(r.steps):
        run = number + i * _LANES
        input_ = first * GROUP + run * _RUN
        is_there = (token < r.tokens) & (run < r.groups * _RUNS) & (input_ < r.inputs)
        words = row.at(is_there.where(input_, 0) * _BYTES).words(4)
        runs.append([is_there.where(word, 0) for word in words])
    return runs


def _store(
    runs: list[list[Int]], scale: Any, token: Int, number: Int, target: Pointer, r: Rounding
) -> None:
    # The instruction that XLA uses, for the same bits.
    inverse = lane.divide(lane.number(1.0), scale)
    for i, words in enumerate(runs):
        run = number + i * _LANES
        values = [x * inverse for word in words for x in lane.half.unpack(word, r.dtype)]
        chunk = run >> 1
        place = (chunk >> 3) * (r.columns * GROUP) + token * GROUP
        place = place + ((((chunk ^ token) & 7) << 4) + ((run & 1) << 3))
        with lane.when((token < r.columns) & (run < r.groups * _RUNS)):
            target.at(place).store_words([lane.pack_e4m3(values[j : j + 4]) for j in (0, 4)])


def _larger(a: Int, b: Int) -> Int:
    return a.maximum(b)
