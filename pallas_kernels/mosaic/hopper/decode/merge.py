"""What several programs found for each query of a decode call, joined: the second small kernel.

Roofline, for 16 sequences, 32 query heads, 4 splits, head dim 128: 1.1 MB, which is nothing; what
remains is a launch and two trips to memory. Target: 1.8 us, as the kernel by Triton took.

A warp takes a query. Its lanes read the maxima and sums of all splits at once, then every lane its
channels of one split after the other, eight of them at a time.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.lane import Float, Int, Pointer

NAME = "turbojax_decode_merge_hopper"
_LANES = 32
_AHEAD = 8
_ALL = (16, 8, 4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in a call.

    Attributes:
      queries: of all sequences and heads, ``B * T * N``.
      parts: splits.
      rows: queries of a KV head, ``G * T``.
      tokens: `T`.
      heads: `N`.
      kv_heads: `K`.
      head_dim: `H`, 64, 128 or 256.
      dtype: of the result.
    """

    queries: int
    parts: int
    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def channels(self) -> int:
        """Of a lane."""
        return self.head_dim // _LANES


def merge(
    o: jax.Array, m: jax.Array, l: jax.Array, query: jax.Array, kv_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Merges splits.

    Args:
      o: float32 ``[B * K, splits, G * T, H]``, unnormalized outputs.
      m: float32 ``[B * K, splits, G * T]``, maxima in powers of two, ``-inf`` in an empty split.
      l: float32, the same shape, sums of weights.
      query: ``[B, T, N, H]``, for its shape and dtype.
      kv_heads: `K`.

    Returns:
      ``[B, T, N, H]`` in the query's dtype and the float32 log-sum-exp ``[B, T, N]``.
    """
    batch, tokens, heads, head_dim = query.shape
    parts, rows = m.shape[1:]
    queries = batch * tokens * heads
    s = Settings(queries, parts, rows, tokens, heads, kv_heads, head_dim, query.dtype.name)

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        thread = lane.thread()
        write(arrays, ids[0] * lanes.WARPS + (thread >> 5), thread & (_LANES - 1), s)

    out = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
    ]
    grid = {"tile": -(-queries // lanes.WARPS)}
    merged, residual = lanes.launch(body, NAME, [o, m, l], out, grid=grid, warpgroups=1)
    return merged, residual


def write(arrays: list[Pointer], number: Int, place: Int, s: Settings) -> None:
    """A query.

    Args:
      arrays: `o`, `m`, `l`, the output and the log-sum-exp.
      number: of the query among all: ``(b * K + k) * G * T`` and its row.
      place: of the lane.
      s: settings.
    """
    o, m, l, out, residual = arrays
    is_query = number < s.queries
    number = number.minimum(s.queries - 1)
    pair, row = number // s.rows, number % s.rows
    first = pair * (s.parts * s.rows) + row
    maxima, sums = [], []
    for start in range(0, s.parts, _LANES):
        part = place + start
        is_part = part < s.parts
        at = (first + part.minimum(s.parts - 1) * s.rows) << 2
        maxima.append(is_part.where(m.at(at).float(), float("-inf")))
        sums.append(is_part.where(l.at(at).float(), 0.0))
    top = lane.reduce_lanes(lane.tree(maxima, lane.maximum), lane.maximum, _ALL)
    shift = (top > float("-inf")).where(top, 0.0)
    weights = [lane.exp2(x - shift) for x in maxima]
    weighted = [x * w for x, w in zip(sums, weights, strict=True)]
    total = lane.reduce_lanes(lane.total(weighted), operator.add, _ALL)
    is_empty = total.equals(0.0)
    total = is_empty.where(1.0, total)
    found = _outputs(o, first, weights, place, s)
    token, head = row % s.tokens, pair % s.kv_heads * (s.heads // s.kv_heads) + row // s.tokens
    index = (pair // s.kv_heads * s.tokens + token) * s.heads + head
    with lane.when(is_query):
        _store([x / total for x in found], out, index, place, s)
    with lane.when(is_query & place.equals(0)):
        value = shift * (1 / LOG2_E) + lane.log2(total) * (1 / LOG2_E)
        residual.times(index, 4).store(is_empty.where(float("-inf"), value))


def _outputs(o: Pointer, first: Int, weights: list[Float], place: Int, s: Settings) -> list[Float]:
    """A lane's channels, weighted and summed over the parts."""
    found: list[Any] = [lane.number(0.0)] * s.channels
    for i, weight in enumerate(weights):
        start = i * _LANES
        count = min(_LANES, s.parts - start)
        ahead = min(_AHEAD, count)
        add = functools.partial(_add_parts, o, first, start, ahead, weight, place, s)
        found = lane.loop(lane.integer(0), lane.integer(count), ahead, found, add)
    return found


def _add_parts(
    o: Pointer,
    first: Int,
    start: int,
    count: int,
    weight: Float,
    place: Int,
    s: Settings,
    part: Int,
    state: list[Any],
) -> list[Any]:
    """Adds parts from ``start + part`` on, whose weights are lanes' from `part` on."""
    read = []
    for j in range(count):
        # Past the last one again, with the weight 0.
        at = first + (part + (start + j)).minimum(s.parts - 1) * s.rows
        words = o.times(at, 4 * s.head_dim).at(place * (4 * s.channels)).words(s.channels)
        read.append((words, lane.from_lane(weight, part + j)))
    for words, w in read:
        pairs = zip(state, words, strict=True)
        state = [lane.fma(x.as_float(), w, before) for before, x in pairs]
    return state


def _store(x: list[Float], out: Pointer, index: Int, place: Int, s: Settings) -> None:
    if s.dtype == "float32":
        words = [v.as_int() for v in x]
    else:
        words = [lane.half.pack(x[i], x[i + 1], s.dtype) for i in range(0, len(x), 2)]
    target = out.times(index * _LANES + place, 4 * len(words))
    if len(words) == 1:
        target.store(words[0])
    for i in range(0, len(words) // 2 * 2, 4):
        target.at(4 * i).store_words(words[i : i + 4])
