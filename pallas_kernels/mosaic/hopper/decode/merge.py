"""What several programs found for each query of a decode call, joined: the second small kernel.

Roofline, for 16 sequences, 32 query heads, 4 splits, head dim 128: 1.1 MB, which is nothing; what
remains is a launch and a trip to memory. Target: 1.9 us, as the kernel by Triton takes. Seen on an
H200: 2.26 us (Triton 2.05), 2.21 for one sequence in 64 splits (4.64).

A warp takes 64 channels of a query, two a lane. Its lanes read the maxima and sums of all splits at
once; and every lane its channels of up to 32 splits, before anything is computed.

Roofline in full and versions: `docs/kernels/decode.md`.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.lane import Float, Int, Pointer

NAME = "turbojax_decode_merge_hopper"
_LANES = 32
_CHANNELS = 2  # Channels of a lane.
_ALL = (16, 8, 4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    queries: int  # of all sequences and heads, ``B * T * N``
    parts: int  # splits
    rows: int  # queries of a KV head, ``G * T``
    tokens: int  # `T`
    heads: int  # `N`
    kv_heads: int
    head_dim: int  # `H`, 64, 128 or 256
    dtype: str  # of the result

    @property
    def warps(self) -> int:
        return self.head_dim // (_LANES * _CHANNELS)


def merge(
    o: jax.Array,
    m: jax.Array,
    l: jax.Array,
    result: jax.Array | jax.ShapeDtypeStruct,
    kv_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """As `pallas_kernels.triton._merge.merge`; the result's dtype is the queries' or float32."""
    batch, tokens, heads, head_dim = result.shape
    parts, rows = m.shape[1:]
    queries = batch * tokens * heads
    s = Settings(queries, parts, rows, tokens, heads, kv_heads, head_dim, result.dtype.name)

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        thread = lane.thread()
        write(arrays, ids[0] * lanes.WARPS + (thread >> 5), thread & (_LANES - 1), s)

    out = [
        jax.ShapeDtypeStruct(result.shape, result.dtype),
        jax.ShapeDtypeStruct(result.shape[:3], jnp.float32),
    ]
    grid = {"tile": -(-queries * s.warps // lanes.WARPS)}
    merged, residual = lanes.launch(body, NAME, [o, m, l], out, grid=grid, warpgroups=1)
    return merged, residual


def write(arrays: list[Pointer], number: Int, place: Int, s: Settings) -> None:
    """Merges a lane's channels of one query and writes them.

    `arrays` are `o`, `m`, `l`, the output and the log-sum-exp. `number` is the warp's: its query
    among all, ``(b * K + k) * G * T`` plus the row, times the warps of a query, plus which of those
    it is. `place` is the lane's number.
    """
    o, m, l, out, residual = arrays
    query, which = number // s.warps, number % s.warps
    is_query = query < s.queries
    query = query.minimum(s.queries - 1)
    pair, row = query // s.rows, query % s.rows
    first = pair * (s.parts * s.rows) + row
    channel = which * _LANES + place
    read = functools.partial(_read, o, first, channel, s)
    first_words = read(lane.integer(0), min(_LANES, s.parts))
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
    found = [lane.number(0.0)] * _CHANNELS
    for i, weight in enumerate(weights):
        start = i * _LANES
        words = read(lane.integer(start), min(_LANES, s.parts - start)) if i else first_words
        for j, of_part in enumerate(words):
            w = lane.from_lane(weight, lane.integer(j))
            pairs = zip(found, of_part, strict=True)
            found = [lane.fma(x.as_float(), w, before) for before, x in pairs]
    token, head = row % s.tokens, pair % s.kv_heads * (s.heads // s.kv_heads) + row // s.tokens
    index = (pair // s.kv_heads * s.tokens + token) * s.heads + head
    with lane.when(is_query):
        _store([x / total for x in found], out, index * (s.warps * _LANES) + channel, s)
    with lane.when(is_query & channel.equals(0)):
        value = shift * (1 / LOG2_E) + lane.log2(total) * (1 / LOG2_E)
        residual.times(index, 4).store(is_empty.where(float("-inf"), value))


def _read(
    o: Pointer, first: Int, channel: Int, s: Settings, start: Int, count: int
) -> list[list[Int]]:
    rows = [first + (start + j) * s.rows for j in range(count)]
    size = 4 * _CHANNELS
    return [o.times(at, 4 * s.head_dim).at(channel * size).words(_CHANNELS) for at in rows]


def _store(x: list[Float], out: Pointer, pair: Int, s: Settings) -> None:
    if s.dtype == "float32":
        out.times(pair, 8).store_words([v.as_int() for v in x])
    else:
        out.times(pair, 4).store(lane.half.pack(x[0], x[1], s.dtype))
