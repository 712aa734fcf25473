"""Latent attention: decoding over latents in 16, 8 and 4 bits against XLA's in bfloat16.

Each row is one token of every sequence, all heads, in absorbed form: a contiguous bfloat16 cache
through `jnp.einsum` and `softmax`, or pages through `turbojax.paged.latent_attention`. Errors are
against float32 attention to what is stored, so they are those of the computation; what formats lose
of latents is on the docs' page.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tables, timing
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Arrays, Call, Case, Group, compared_rows
from benchmarks.measuring.work import Needs
from benchmarks.suite import Suite, over_baselines
from benchmarks.tables import Result
from turbojax import paged
from turbojax.attention.options import Options
from turbojax.caches.latent import attend_pages
from turbojax.caches.latent.formats import LATENT_DTYPES

OPERATION = "latent"
_BASELINE = "bf16"
_PAGE = 64
_TITLES = {_BASELINE: "bfloat16, XLA"}


class Shape(NamedTuple):
    """A step of decoding.

    Attributes:
      model: whose heads these are.
      heads: of queries.
      batch: sequences.
      length: tokens of each.
      latent: channels of the latent.
      rope: channels of the rotary key.
    """

    model: str
    heads: int
    batch: int
    length: int
    latent: int = 512
    rope: int = 64

    @property
    def scale(self) -> float:
        """Of the scores: that of heads of 128 + 64 channels."""
        return float(192**-0.5)


_HEADS = {"deepseek-v2-lite": 16, "deepseek-v3": 128}
_SIZES = ((64, 8192), (1, 131072), (16, 32768))
TINY = Shape("tiny", 4, 2, 100, 64, 16)


class Latents(NamedTuple):
    """What is made once for all rows of a shape, in bfloat16.

    Attributes:
      query: ``[B, 1, N, C]`` and ``[B, 1, N, R]``.
      latent: ``[B, S, C]``.
      rope: ``[B, S, R]``.
    """

    query: tuple[jax.Array, jax.Array]
    latent: jax.Array
    rope: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def latents(s: Shape) -> Latents:
    """Normal latents, as after a norm, and queries whose scores differ by a few units."""
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key: jax.Array, *sizes: int) -> jax.Array:
        return jax.random.normal(key, sizes, jnp.bfloat16)

    queries = (
        normal(keys[0], s.batch, 1, s.heads, s.latent),
        normal(keys[1], s.batch, 1, s.heads, s.rope),
    )
    tokens = s.batch, s.length
    return Latents(queries, normal(keys[2], *tokens, s.latent), normal(keys[3], *tokens, s.rope))


def tables_of(s: Shape) -> jax.Array:
    """Block tables over pages in random order."""
    pages = -(-s.length // _PAGE)
    order = np.random.default_rng(0).permutation(s.batch * pages)
    return jnp.asarray(order.reshape(s.batch, pages), jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def filled(x: Latents, s: Shape, kv_dtype: str) -> paged.LatentPages:
    """Pages that hold the latents, one sequence at a time."""
    pool = paged.init_latent_pages(
        s.batch * -(-s.length // _PAGE), _PAGE, s.latent, s.rope, kv_dtype=kv_dtype
    )

    def one(pool: paged.LatentPages, each: tuple[jax.Array, ...]) -> tuple[paged.LatentPages, None]:
        latent, rope, table = (a[None] for a in each)
        return paged.append_latents(pool, latent, rope, table, jnp.zeros(1, jnp.int32)), None

    return jax.lax.scan(one, pool, (x.latent, x.rope, tables_of(s)))[0]


def decoding(s: Shape, *, implementations: tuple[str, ...] = ("mosaic_gpu",)) -> Group:
    cases = [Case(_BASELINE, None, _BASELINE, functools.partial(_plain, s))]
    for kv_dtype in LATENT_DTYPES:
        for name in implementations:
            build = functools.partial(_paged, s, kv_dtype, name)
            cases.append(Case(kv_dtype, name, kv_dtype, build))
    label = f"{s.model}/b{s.batch}-s{s.length}"
    return Group(OPERATION, label, s._asdict(), tuple(cases))


def _needs(s: Shape, token_bytes: int, x: Latents) -> Needs:
    """Every token is read once, and multiplied twice by every head's query."""
    moved = s.batch * s.length * token_bytes + timing.nbytes((*x.query, x.query[0]))
    operations = 2.0 * s.batch * s.heads * s.length * (2 * s.latent + s.rope)
    return Needs(moved, operations, "bf16")


def _plain(s: Shape, arrays: Arrays) -> Call:
    x = arrays.get(latents, s)

    def attend(x: Latents) -> jax.Array:
        (query, rotary), wide = x.query, {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("btnc,bsc->btns", query, x.latent, **wide)
        scores = scores + jnp.einsum("btnr,bsr->btns", rotary, x.rope, **wide)
        weights = jax.nn.softmax(s.scale * scores, axis=-1).astype(query.dtype)
        return jnp.einsum("btns,bsc->btnc", weights, x.latent)

    def check(out: jax.Array, x: Latents) -> tuple[jax.Array, ...]:
        rows = compared_rows(s.batch)
        pool = filled(x, s, "bfloat16")
        return _check(s, out, (x.query, pool, tables_of(s)), rows)

    needs = _needs(s, 2 * (s.latent + s.rope), x)
    return Call(attend, (x,), needs, check, (x,))


def _paged(s: Shape, kv_dtype: str, implementation: str, arrays: Arrays) -> Call:
    x = arrays.get(latents, s)
    pool, lengths = filled(x, s, kv_dtype), jnp.full(s.batch, s.length, jnp.int32)
    given = x.query, pool, tables_of(s)

    def attend(queries: Any, pool: Any, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        options = {"scale": s.scale, "implementation": implementation}
        return paged.latent_attention(*queries, pool, tables, lengths, **options)

    def check(out: jax.Array, *given: Any) -> tuple[jax.Array, ...]:
        return _check(s, out, given, compared_rows(s.batch))

    return Call(attend, (*given, lengths), _needs(s, pool.token_bytes, x), check, given)


def _check(s: Shape, out: jax.Array, given: Any, rows: np.ndarray) -> tuple[jax.Array, ...]:
    """Some sequences' outputs, what they should be in float32, and whether all is finite."""
    queries, pool, block_tables = given
    want, _ = attend_pages(
        *(q[rows] for q in queries),
        pool,
        block_tables[rows],
        jnp.full(len(rows), s.length, jnp.int32),
        options=Options(is_causal=True, scale=s.scale, implementation="xla"),
    )
    return out[rows], want, jnp.all(jnp.isfinite(out))


# What the docs show -------------------------------------------------------------------------------

_NAMES = (
    ("heads of", lambda row: f"{row['model']} ({row['heads']} heads)"),
    ("tokens", lambda row: f"{row['batch']} x {row['length']:,}"),
    (
        "latents",
        lambda row: _TITLES.get(row["method"], f"{row['method']}, {row['implementation']}"),
    ),
)
_COLUMNS = (
    *(tables.US, *tables.over({_BASELINE: "over bf16"})),
    *(tables.GIGABYTES, tables.CEILING, tables.L1),
)


def table(result: Result) -> str:
    text = tables.rows_table(tables.finished(result, OPERATION), _NAMES, _COLUMNS)
    return tables.with_cut(text, result, OPERATION)


SUITE = Suite(
    name="latent",
    groups=lambda: [
        decoding(Shape(model, heads, *size)) for size in _SIZES for model, heads in _HEADS.items()
    ],
    quick_groups=lambda: [decoding(TINY, implementations=("xla", "mosaic_gpu"))],
    run=calls.run,
    with_ratios=over_baselines({OPERATION: (_BASELINE,)}),
    formats=("bf16",),
    tables={"latent": tables.section(table, rates=tables.COPY_AND_PRODUCT)},
)
