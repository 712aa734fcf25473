"""What the paged suite attends to and appends, and whether an output is right.

Pools are filled with random bits and normal numbers directly, not token by token, and a sequence's
pages lie in random order all over its pool.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.measuring.calls import Call, compared_rows
from benchmarks.measuring.work import Needs
from benchmarks.shapes import Shape
from benchmarks.tables import Row
from turbojax import paged
from turbojax.paged import PagedCache

# Sequences end in the middle of a page.
_SHORT_OF_FULL = 27
# Random numbers repeat after this many: they are made once for all pools. A wrong page still shows.
_PERIOD, _PERIOD_WITHOUT_GPU = 2**26, 2**16
_BFLOAT16 = 2
# Normal numbers are up to four.
_INT8_UNIT = 2.0**-5
# Rounding gives 0.01 at most, a wrong output about 1.
MOST = ("relative_l2", 0.03)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The newest queries of some sequences, and the pages that they attend to.

    Attributes:
      shape: heads, sequences, and tokens that a sequence has room for.
      queries: of each sequence.
      page_size: tokens of a page.
      ragged: sequences hold from one batch-th of `tokens` to all of it; otherwise all the same.
    """

    shape: Shape
    queries: int = 1
    page_size: int = 64
    ragged: bool = False

    @property
    def label(self) -> str:
        """A part of a row's name: ``llama3-8b/b16-s32768``."""
        queries = f"-t{self.queries}" if self.queries > 1 else ""
        return f"{self.shape.label}{queries}{'-ragged' if self.ragged else ''}"

    @property
    def facts(self) -> Row:
        shape = self.shape
        return {
            "model": shape.model,
            "batch": shape.batch,
            "tokens": shape.tokens,
            "queries": self.queries,
            "page_size": self.page_size,
            "ragged": self.ragged,
        }

    @property
    def lengths(self) -> np.ndarray:
        """Tokens held: int32 ``[B]``."""
        batch, tokens = self.shape.batch, self.shape.tokens
        first = tokens / batch if self.ragged else tokens
        short = 0 if self.is_whole else _SHORT_OF_FULL
        return np.linspace(first, tokens, batch).astype(np.int32) - short

    @property
    def is_whole(self) -> bool:
        """Whether the queries are all of a sequence's tokens."""
        return self.queries == self.shape.tokens

    def needs(self, token_bytes: int) -> Needs:
        """Reading what the sequences hold and the queries, writing the output; both products.

        Query `t` of `T` sees all but the last ``T - 1 - t`` tokens.
        """
        heads, held = self.shape.heads, int(self.lengths.sum())
        channels = self.queries * heads.query * heads.dim
        moved = held * token_bytes + 2 * self.shape.batch * channels * _BFLOAT16
        hidden = self.shape.batch * (self.queries - 1) / 2
        return Needs(moved, 4.0 * (held - hidden) * channels, "bf16")


@functools.partial(jax.jit, static_argnames=("kind", "size"))
def _numbers(seed: int, kind: str, size: int) -> jax.Array:
    key = jax.random.key(seed)
    if kind == "bits":
        return jax.random.bits(key, (size,), jnp.uint8)
    return jax.random.normal(key, (size,), jnp.float32).astype(jnp.bfloat16)


@functools.lru_cache(maxsize=8)
def _made(seed: int, kind: str) -> jax.Array:
    return _numbers(seed, kind, _PERIOD if timing.on_gpu() else _PERIOD_WITHOUT_GPU)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _shaped(numbers: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    size = int(np.prod(shape))
    every = jnp.tile(numbers, -(-size // numbers.size))[:size].reshape(shape)
    if dtype == jnp.int8:
        every = jnp.clip(jnp.rint(every.astype(jnp.float32) / _INT8_UNIT), -127, 127)
    if dtype == jnp.float16:
        # Norms of vectors of 128 channels.
        return (128**0.5 * (1 + every.astype(jnp.float32) / 16)).astype(jnp.float16)
    return every.astype(dtype)


def random(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Any bits in uint8, norms around the root of 128 in float16, otherwise normal numbers.

    Those in int8 are over `_INT8_UNIT`.
    """
    kind = "bits" if dtype == jnp.uint8 else "normal"
    return _shaped(_made(seed, kind), shape, np.dtype(dtype))


def query(problem: Problem) -> jax.Array:
    """bfloat16 ``[B, T, N, H]``."""
    heads = problem.shape.heads
    return random(2, (problem.shape.batch, problem.queries, heads.query, heads.dim))


def dense(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Key and value in bfloat16, ``[B, S, K, H]``."""
    size = (shape.batch, shape.tokens, shape.heads.kv, shape.heads.dim)
    return random(0, size), random(1, size)


def pages_of(shape: Shape, page_size: int) -> int:
    return -(-shape.tokens // page_size)


def empty(shape: Shape, page_size: int, kv_dtype: str) -> PagedCache:
    """A pool that has room for all sequences, and for nothing else."""
    pages = shape.batch * pages_of(shape, page_size)
    return paged.init_cache(
        pages, page_size, shape.heads.kv, shape.heads.dim, kv_dtype=kv_dtype, dtype=jnp.bfloat16
    )


def pool(shape: Shape, page_size: int, kv_dtype: str) -> PagedCache:
    cache = jax.eval_shape(lambda: empty(shape, page_size, kv_dtype))
    arrays = {
        name: random(i % 2, leaf.shape, leaf.dtype)
        for i, name in enumerate(("key", "value", "key_norm", "value_norm"))
        if (leaf := getattr(cache, name)) is not None
    }
    for side in ("key", "value"):
        if getattr(cache, side).dtype == jnp.int8:  # scales, and no norms
            arrays[f"{side}_norm"] *= jnp.float16(_INT8_UNIT / 128**0.5)
    scales = {
        name: jnp.ones((), jnp.float32)
        for name in ("key_scale", "value_scale")
        if getattr(cache, name) is not None
    }
    return dataclasses.replace(cache, **arrays, **scales, dropped_tokens=jnp.zeros((), jnp.int32))


def block_tables(shape: Shape, page_size: int) -> np.ndarray:
    """Every page of the pool, in random order: int32 ``[B, pages]``."""
    count = pages_of(shape, page_size)
    pages = np.random.default_rng(0).permutation(shape.batch * count)
    return pages.reshape(shape.batch, count).astype(np.int32)


def tables_and_lengths(problem: Problem) -> tuple[jax.Array, jax.Array]:
    """int32 ``[B, pages]``, -1 past a sequence's end, and int32 ``[B]``."""
    tables, lengths = block_tables(problem.shape, problem.page_size), problem.lengths
    first = np.arange(tables.shape[1])[None] * problem.page_size
    held = np.where(first < lengths[:, None], tables, -1)
    return jnp.asarray(held, jnp.int32), jnp.asarray(lengths, jnp.int32)


# Whether it is right ------------------------------------------------------------------------------


def compared(count: int) -> np.ndarray:
    """Which sequences are compared: the first and the last."""
    return np.unique([0, count - 1])


def exact(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention in float32 of a few queries; sums and no products, so that nothing is rounded.

    Row `r` of ``[B, R, N, H]`` sees the first ``visible[b, r]`` keys.
    """
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    q = query.reshape(batch, rows, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    key, value = (x.astype(jnp.float32)[:, None, :, :, None] for x in (key, value))
    scores = jnp.sum(q[:, :, None] * key, axis=-1) * dim**-0.5
    seen = jnp.arange(key.shape[2])[None, None] < visible[..., None]
    p = jax.nn.softmax(jnp.where(seen[..., None, None], scores, -jnp.inf), axis=2)
    return jnp.sum(p[..., None] * value, axis=2).reshape(query.shape)


Compared = tuple[jax.Array, jax.Array, jax.Array]


def check_dense(
    out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    causal: bool = True,
) -> Compared:
    """An output ``[B, T, N, H]`` against exact attention of some of its rows."""
    some = compared(len(query))
    return _against(out, query, key[some], value[some], lengths, causal)


def check_paged(
    out: jax.Array, query: jax.Array, cache: PagedCache, tables: jax.Array, lengths: jax.Array
) -> Compared:
    """The same of what the pages stand for."""
    some = compared(len(query))
    key, value = paged.gather(cache, tables[some], lengths[some], dtype=jnp.float32)
    return _against(out, query, key, value, lengths, causal=True)


def _against(
    out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    causal: bool,
) -> Compared:
    some, queries = compared(len(query)), query.shape[1]
    rows = np.unique(compared_rows(queries))
    hidden = queries - 1 - rows if causal else 0 * rows
    visible = lengths[some][:, None] - jnp.asarray(hidden, jnp.int32)[None]
    want = exact(query[some][:, rows], key, value, visible)
    return out[some][:, rows], want, jnp.all(jnp.isfinite(out))


@dataclasses.dataclass(frozen=True)
class Append(Call):
    """A function that gets a cache as its first argument, donated, and gives it back."""

    make: Callable[[], Any] = tuple
    starts: tuple[jax.Array, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        donating = jax.jit(self.function, donate_argnums=0)
        return donating.lower(jax.eval_shape(self.make), *self.arguments, self.starts[0])

    def measure(
        self, compiled: Callable[..., Any], check: Any, repetitions: int | None
    ) -> tuple[float, Row]:
        return super().measure(Appending(compiled, self.make(), self.starts), check, repetitions)

    def _errors(self, output: Any, check: Any) -> Row:
        return super()._errors(output.cache, check)


class Appending:
    """Hands a donated cache on from call to call. What a call returns can only be waited for."""

    def __init__(
        self, compiled: Callable[..., Any], cache: Any, starts: tuple[jax.Array, ...]
    ) -> None:
        self.cache = cache
        self._compiled, self._starts, self._calls = compiled, starts, 0

    def __call__(self, *arguments: Any) -> "Appending":
        start = self._starts[self._calls % len(self._starts)]
        self._calls += 1
        self.cache = self._compiled(self.cache, *arguments, start)
        return self

    def block_until_ready(self) -> "Appending":
        """Waits for the last call, as `jax.block_until_ready` asks of what is not an array."""
        jax.block_until_ready(self.cache)
        return self
