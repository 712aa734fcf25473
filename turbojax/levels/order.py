"""The order of a grid's tokens in which blocks, and the groups they are pooled by, are bricks."""

import math
import operator
from collections.abc import Sequence

import numpy as np


def grid_order(shape: Sequence[int], brick: Sequence[int]) -> np.ndarray:
    """The tokens of a grid, such as a video's frames, rows and columns, brick by brick.

    Levels are chosen by blocks of tokens that follow each other, and pooled attention averages 2, 4
    or 8 of them. In the order of an image's rows such a block is a thin line. In this order
    ``prod(brick)`` tokens are a brick, and within it tokens follow the Z-order curve (Morton,
    1966): halves, quarters and so on of a brick are bricks, too, down to 8 tokens that are a cube
    of 2 x 2 x 2 (in two dimensions 2 x 4), 4 a square, and 2 neighbours along the last axis. Bricks
    follow each other by rows.

    ``x[:, order]`` are the tokens of ``x`` ``[B, T, ...]`` in this order, and ``out[:,
    numpy.argsort(order)]`` is the way back. Attention without a causal mask gives every token the
    same output in any order; positions go with the tokens (RoPE comes first).

    Args:
      shape: sizes of the grid, of any number of axes; tokens are numbered by rows, the last axis
        fastest.
      brick: sides of a brick, powers of two that divide the sizes. For blocks of 128 tokens
        ``(4, 4, 8)`` or, of an image, ``(8, 16)``.

    Returns:
      int32 ``[prod(shape)]``: at each place the number of the token that stands there.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is not positive, there are none or not as many sides, a side is no power
        of two or does not divide its axis, or there are 2**31 tokens or more.
    """
    sizes, sides = (tuple(operator.index(x) for x in given) for given in (shape, brick))
    if not sizes or len(sizes) != len(sides):
        raise ValueError(f"brick={sides} must have a side for each axis of shape={sizes}")
    if math.prod(sizes) >= 2**31:
        raise ValueError(f"shape={sizes} must have less than 2**31 tokens")
    for size, side in zip(sizes, sides, strict=True):
        if side < 1 or side & (side - 1):
            raise ValueError(f"brick={sides} must have sides that are powers of two")
        if size < 1 or size % side:
            raise ValueError(f"shape={sizes} must have positive multiples of brick={sides}")
    # Each axis in parts: the number of the brick, then the bits of the place in it.
    parts, bits = list[int](), list[tuple[int, int]]()
    bricks = list[int]()
    for size, side in zip(sizes, sides, strict=True):
        bricks.append(len(parts))
        count = side.bit_length() - 1
        # The highest bit counts most, whichever axis it is of; of equal bits that of the first.
        bits += [(bit - count, len(parts) + 1 + bit) for bit in range(count)]
        parts += [size // side, *[2] * count]
    order = [*bricks, *(place for _, place in sorted(bits))]
    tokens = np.arange(math.prod(sizes), dtype=np.int32).reshape(parts)
    return np.ascontiguousarray(tokens.transpose(order)).reshape(-1)
