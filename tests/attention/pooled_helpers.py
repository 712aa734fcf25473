"""What the tests of pooled attention share: named cases, their operands, and comparisons.

The float64 oracle is that of `oracles.pooled`, whose names are here too.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from tests.oracles.pooled import LEVELS as LEVELS
from tests.oracles.pooled import Dense as Dense
from tests.oracles.pooled import f64 as f64
from tests.oracles.pooled import oracle as oracle
from tests.oracles.pooled import oracle_gradient as oracle_gradient
from tests.oracles.pooled import plain as plain
from tests.oracles.pooled import plain_gradient as plain_gradient

EPS = float(jnp.finfo(jnp.float32).eps)


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape, its blocks and options, and how its levels are drawn.

    Attributes:
      tokens: `T`, the queries.
      size: `S`, the keys.
      heads: query heads `N`.
      kv_heads: `K`.
      batch: `B`.
      block_q: queries to a row of levels.
      block_kv: keys to a level.
      is_causal: whether it is.
      probabilities: of the levels 0, 1, 2, 4, 8, of which levels are drawn.
      shared: "batch", "heads", "both" or "none": which axes of the levels have size 1.
      scale: of the scores, or None.
      query_lengths: per sequence, or None.
      key_lengths: per sequence, or None.
      segments: of how many each sequence is packed, or None; keys too.
      sorted_ids: whether segments follow each other with ascending ids; otherwise ids come and go.
      query_offsets: per sequence, or None.
      key_offsets: per sequence, or None.
      with_sinks: whether each head has one.
      xla_only: blocks that are no powers of two from 16 on, which no kernel has to take.
    """

    tokens: int
    size: int
    heads: int = 2
    kv_heads: int = 1
    batch: int = 2
    block_q: int = 32
    block_kv: int = 32
    is_causal: bool = False
    probabilities: tuple[float, ...] = (0.2, 0.2, 0.2, 0.2, 0.2)
    shared: str = "none"
    scale: float | None = None
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    segments: int | None = None
    sorted_ids: bool = True
    query_offsets: tuple[int, ...] | None = None
    key_offsets: tuple[int, ...] | None = None
    with_sinks: bool = False
    xla_only: bool = False


def _only(level):
    return tuple(float(r == level) for r in (0, *LEVELS))


CASES = {
    **{f"level {r}": Case(96, 96, probabilities=_only(r)) for r in (0, *LEVELS)},
    **{
        f"level {r}, causal, ragged": Case(101, 101, is_causal=True, probabilities=_only(r))
        for r in LEVELS
    },
    "mixture": Case(128, 160, heads=4, kv_heads=2),
    "mixture, causal": Case(160, 160, heads=4, kv_heads=2, is_causal=True),
    "causal, other blocks": Case(150, 150, block_q=16, block_kv=64, is_causal=True),
    "causal, larger query blocks": Case(150, 150, block_q=64, block_kv=16, is_causal=True),
    "causal, more keys": Case(70, 203, is_causal=True),
    "causal, more queries": Case(203, 70, is_causal=True),
    "blocks of 128": Case(300, 300, batch=1, block_q=128, block_kv=128, is_causal=True),
    "tail of one token": Case(65, 97),
    "tail of seven tokens": Case(65, 103),
    "shorter than a block": Case(11, 13),
    "one token": Case(1, 1, heads=1, probabilities=(0.0, 0.25, 0.25, 0.25, 0.25)),
    "one query": Case(1, 129),
    "mostly skipped": Case(128, 128, heads=4, probabilities=(0.8, 0.05, 0.05, 0.05, 0.05)),
    "grouped queries": Case(90, 110, heads=6, kv_heads=2, is_causal=True),
    "one level array": Case(90, 110, heads=4, kv_heads=2, shared="both"),
    "levels shared by heads": Case(90, 110, heads=4, kv_heads=2, shared="heads"),
    "levels shared by the batch": Case(90, 110, heads=4, kv_heads=2, shared="batch"),
    "scale": Case(70, 70, scale=0.6),
    "negative scale": Case(70, 70, scale=-0.4),
    "keys' lengths": Case(70, 130, batch=4, key_lengths=(130, 61, 0, 5)),
    "queries' lengths": Case(130, 70, batch=3, query_lengths=(130, 61, 0)),
    "both lengths, causal": Case(
        130,
        133,
        batch=4,
        heads=4,
        kv_heads=2,
        is_causal=True,
        query_lengths=(130, 67, 100, 12),
        key_lengths=(133, 67, 0, 43),
    ),
    "smallest blocks": Case(50, 50, block_q=1, block_kv=8, is_causal=True, xla_only=True),
    "odd blocks": Case(77, 131, block_q=7, block_kv=24, is_causal=True, xla_only=True),
    "queries' block beyond a tile": Case(
        700, 60, batch=1, heads=1, block_q=600, is_causal=True, xla_only=True
    ),
}
KERNEL_CASES = {name: case for name, case in CASES.items() if not case.xla_only}


def random_levels(rng, shape, probabilities):
    """int8 levels, drawn with the probabilities of 0, 1, 2, 4 and 8."""
    return rng.choice(np.array([0, *LEVELS], np.int8), shape, p=probabilities)


def operands(case, dtype=jnp.float32, head_dim=16, seed=0):
    """Query, key, value, levels and the cotangents of output and residual."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(case.batch, case.tokens, case.heads, head_dim))
    # Neighbours are alike, as where one pools; values have a mean.
    walk = rng.normal(size=(2, case.batch, case.size + 1, case.kv_heads, head_dim))
    k, v = (
        0.8 * walk[:, :, 1:] + 0.6 * walk[:, :, :-1] + np.array([0.0, 0.25]).reshape(2, 1, 1, 1, 1)
    )
    d_out = rng.normal(size=q.shape)
    d_residual = rng.normal(size=q.shape[:3])
    shape = (
        1 if case.shared in ("batch", "both") else case.batch,
        1 if case.shared in ("heads", "both") else case.heads,
        -(-case.tokens // case.block_q),
        -(-case.size // case.block_kv),
    )
    levels = jnp.asarray(random_levels(rng, shape, case.probabilities))
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in (q, k, v, d_out))
    return q, k, v, levels, d_out, jnp.asarray(d_residual, jnp.float32)


def segment_ids(case, tokens, seed):
    """int32 ``[B, tokens]``: pieces of random lengths, of one token too."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(case.batch):
        cuts = np.sort(rng.integers(1, max(tokens, 2), case.segments - 1))
        piece = np.searchsorted(cuts, np.arange(tokens), side="right")
        names = np.arange(case.segments) if case.sorted_ids else rng.integers(-1, 3, case.segments)
        rows.append(names[piece])
    return np.stack(rows).astype(np.int32)


def modifiers_of(case):
    """What `Case` says of segments, offsets and sinks, by the names of the API."""
    found = {}
    if case.segments is not None:
        same = 7 if case.tokens == case.size else 8
        found["query_segment_ids"] = segment_ids(case, case.tokens, 7)
        found["key_value_segment_ids"] = segment_ids(case, case.size, same)
    if case.query_offsets is not None:
        found["query_offset"] = np.array(case.query_offsets, np.int32)
    if case.key_offsets is not None:
        found["key_offset"] = np.array(case.key_offsets, np.int32)
    if case.with_sinks:
        found["sinks"] = np.linspace(-1, 2, case.heads).astype(np.float32)
    return found


def options(case, head_dim=16):
    """The oracle's keyword arguments."""
    more = modifiers_of(case)
    return {
        **({"modifiers": more} if more else {}),
        "block_q": case.block_q,
        "block_kv": case.block_kv,
        "scale": 1 / math.sqrt(head_dim) if case.scale is None else case.scale,
        "is_causal": case.is_causal,
        "query_lengths": case.query_lengths,
        "key_lengths": case.key_lengths,
    }


def api_options(case):
    """What is static in a call of `pooled_attention`, hashable, and the lengths it is given."""
    names = ("block_q", "block_kv", "scale", "is_causal")
    static = tuple((name, getattr(case, name)) for name in names)
    lengths = {
        "query_seq_lengths": case.query_lengths,
        "key_value_seq_lengths": case.key_lengths,
    }
    found = {k: jnp.asarray(v, jnp.int32) for k, v in lengths.items() if v is not None}
    return static, found | {k: jnp.asarray(v) for k, v in modifiers_of(case).items()}


def worst(got, want):
    """Largest distance of the finite ones; what is not finite must be equal."""
    got, want = f64(got), f64(want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    return np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)).max()


def assert_as_good_as_plain(got, want, of_plain, floor=32 * EPS):
    """Each as near to the oracle as twice plain arithmetic is, plus its own rounding and a floor.

    The floor is a few units in the last place of the largest element.
    """
    for x, y, z in zip(got, want, of_plain, strict=True):
        finite = np.isfinite(y)
        largest = np.abs(np.where(finite, y, 0)).max()
        own = 0 if x.dtype == jnp.float32 else float(jnp.finfo(x.dtype).eps) * largest
        allowed = 2 * worst(z, y) + own + floor * max(largest, 1)
        assert worst(x, y) <= allowed
        assert allowed <= 0.05 * max(largest, 1)  # plain arithmetic is close: no licence
