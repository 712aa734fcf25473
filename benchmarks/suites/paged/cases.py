"""The rows of the paged suite: attention over pages of each kind, and appending to them."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._compat import cudnn_attention
from benchmarks.measuring.calls import Arrays, Call, Case, Group
from benchmarks.measuring.samples import exact_attention, require_gpu
from benchmarks.measuring.work import Needs
from benchmarks.shapes import Shape
from benchmarks.suites.paged import inputs
from benchmarks.suites.paged.inputs import MOST, Append, Compared, Problem
from turbojax import paged
from turbojax.paged import PagedCache

MOSAIC, TRITON = "mosaic_gpu", "triton"
# The operations of the suite, as they begin the rows' names.
DECODE, PAGES, CHUNK, APPEND = "paged-decode", "paged-page-size", "paged-chunk", "paged-append"
PAGE_64 = "page-64"
_BFLOAT16 = 2
# What rows are compared with goes by these names.
_FAMILIES = {"auto": "bf16-pages", "fp8_e4m3": "fp8-pages"}
# Tokens of its blocks: fewer than the default of jax's kernel, which is for smaller pages.
_JAX_BLOCK = 128
# Relative L2 of stored keys and values: three bits after the first, and 4 bits in all; or the one
# and the other; 8 bits in all, of the largest.
_STORED = {
    **{"auto": 0.0, "fp8_e4m3": 0.04, "turbo4": 0.12, "k8v4": 0.12},
    **{"int8": 0.01, "int8_v4": 0.12},
}
# The most query rows of a KV head that meet fp8 pages in more than 8 bits; the error of others.
_FEW_ROWS, _E4M3_PRODUCTS = 64, ("relative_l2", 0.08)
# An append writes to this many places in turn.
_PLACES = 16

Kinds = Iterable[tuple[str, str]]
"""How pages are stored, and the implementation that attends to them."""


def decode(
    problem: Problem,
    kinds: Kinds,
    *,
    operation: str = DECODE,
    with_jax: bool = True,
) -> Group:
    """Attention over pages, ours of these kinds, after cuDNN on dense bfloat16.

    Also, if `with_jax`, after jax's own kernel and cuDNN on pages.
    """
    cases = [Case("cudnn", None, "cudnn", functools.partial(_cudnn, problem))]
    if not problem.ragged:
        full = functools.partial(_cudnn, problem, masked=False)
        cases.append(Case("cudnn-full", None, "cudnn", full))
    if with_jax and problem.queries == 1:
        cases.append(Case("jax", None, "jax", functools.partial(_jax, problem, block=None)))
        blocks = functools.partial(_jax, problem, block=_JAX_BLOCK)
        cases.append(Case(f"jax-{_JAX_BLOCK}", None, "jax", blocks))
        if not problem.ragged:
            pages = functools.partial(_cudnn_paged, problem)
            cases.append(Case("cudnn-paged", None, "cudnn-paged", pages))
    for kv_dtype, implementation in kinds:
        ours = functools.partial(_paged, problem, kv_dtype, implementation)
        family = _FAMILIES.get(kv_dtype, kv_dtype)
        cases.append(Case(kv_dtype, implementation, family, ours))
    return Group(operation, problem.label, problem.facts, tuple(cases))


def page_sizes(shape: Shape, kv_dtype: str, implementation: str, sizes: Iterable[int]) -> Group:
    """Decode with pages of several sizes, first of 64 tokens."""
    cases = []
    for size in (64, *sizes):
        problem = Problem(shape, page_size=size)
        build = functools.partial(_paged, problem, kv_dtype, implementation)
        family = PAGE_64 if size == 64 else "other"
        cases.append(Case(f"page-{size}", implementation, family, build))
    facts = {**Problem(shape).facts, "kv_dtype": kv_dtype}
    del facts["page_size"]
    return Group(PAGES, f"{shape.label}/{kv_dtype}", facts, tuple(cases))


def _paged(problem: Problem, kv_dtype: str, implementation: str, arrays: Arrays) -> Call:
    cache = arrays.get(inputs.pool, problem.shape, problem.page_size, kv_dtype)
    operands = (
        arrays.get(inputs.query, problem),
        cache,
        *arrays.get(inputs.tables_and_lengths, problem),
    )
    attend = functools.partial(paged.attention, implementation=implementation)
    needs = problem.needs(cache.token_bytes)
    most = MOST
    rows = problem.queries * problem.shape.heads.query // problem.shape.heads.kv
    if (kv_dtype, implementation) == ("fp8_e4m3", MOSAIC) and rows > _FEW_ROWS:
        most = _E4M3_PRODUCTS
    return Call(attend, operands, needs, inputs.check_paged, operands, most=most)


def _cudnn(problem: Problem, arrays: Arrays, *, masked: bool = True) -> Call:
    """Dense keys and values, causal if the queries are all of a sequence's tokens.

    Otherwise it hides nothing from the earlier ones of several queries: causal, it would take them
    for the first ones. Unmasked it is not told the lengths, and reads all tokens.
    """
    exact = exact_attention("cudnn", is_causal=problem.is_whole)
    key, value = arrays.get(inputs.dense, problem.shape)
    lengths = jnp.asarray(problem.lengths)
    operands = (arrays.get(inputs.query, problem), key, value, lengths)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return exact(q, k, v, lengths if masked else None)

    seen = lengths if masked else jnp.full_like(lengths, problem.shape.tokens)
    check = functools.partial(inputs.check_dense, causal=problem.is_whole)
    needs = problem.needs(_dense_token_bytes(problem.shape))
    return Call(attend, operands, needs, check, (*operands[:3], seen), most=MOST)


def _cudnn_paged(problem: Problem, arrays: Arrays) -> Call:
    """cuDNN on our bfloat16 pages, which jax reaches only through a private module.

    Tables name every page once, and every entry must be a page. It has none of 8-bit floats.
    """
    require_gpu("cuDNN")
    cache = arrays.get(inputs.pool, problem.shape, problem.page_size, "auto")
    query = arrays.get(inputs.query, problem)
    tables, lengths = arrays.get(inputs.tables_and_lengths, problem)

    cudnn = cudnn_attention()

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, tables: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        tables = tables[:, None, :, None]
        with jax.numpy_dtype_promotion("standard"):
            out = cudnn.paged_attention(
                jnp.swapaxes(query, 1, 2),
                *(key, value, jnp.ones_like(lengths), lengths, tables, tables),
                scale=query.shape[-1] ** -0.5,
                mask_type=cudnn.MaskType.PADDING,
                qkv_layout="BNTH",
            )
        return jnp.swapaxes(out, 1, 2)

    operands = (query, cache.key, cache.value, jnp.maximum(tables, 0), lengths)
    needs = problem.needs(cache.token_bytes)
    against = (query, cache, tables, lengths)
    return Call(attend, operands, needs, inputs.check_paged, against, most=MOST)


def _dense_token_bytes(shape: Shape) -> int:
    return 2 * shape.heads.kv * shape.heads.dim * _BFLOAT16


def _jax(problem: Problem, arrays: Arrays, *, block: int | None) -> Call:
    """The kernel that jax ships, on our bfloat16 pages in the layout that it needs.

    It takes no scale, so the queries are scaled before.
    """
    require_gpu("jax's Pallas kernel")
    from jax.experimental.pallas.ops.gpu import paged_attention as kernel

    cache = arrays.get(inputs.pool, problem.shape, problem.page_size, "auto")
    query = arrays.get(inputs.query, problem)
    tables, lengths = arrays.get(inputs.tables_and_lengths, problem)
    pages = arrays.get(_heads_first, problem.shape, problem.page_size, arrays)
    options = {} if block is None else {"pages_per_compute_block": block // problem.page_size}

    def attend(
        q: jax.Array, key: jax.Array, value: jax.Array, tables: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            q = q[:, 0] * q.shape[-1] ** -0.5
            return kernel.paged_attention(q, key, value, tables, lengths, **options)[:, None]

    # It needs a page in every entry.
    operands = (query, *pages, jnp.maximum(tables, 0), lengths)
    against = (query, cache, tables, lengths)
    needs = problem.needs(cache.token_bytes)
    return Call(attend, operands, needs, inputs.check_paged, against, most=MOST)


def _heads_first(shape: Shape, page_size: int, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The bfloat16 pages as ``[K, P, page_size, H]``."""
    cache = arrays.get(inputs.pool, shape, page_size, "auto")
    return jnp.swapaxes(cache.key, 0, 1), jnp.swapaxes(cache.value, 0, 1)


# Appending ----------------------------------------------------------------------------------------


def append(shape: Shape, new: int, kv_dtypes: Iterable[str]) -> Group:
    """`new` tokens of each sequence into donated caches, which have room for a shape's.

    What they are compared with updates a slice of a dense bfloat16 cache, at the same place in all
    sequences.
    """
    cases = [Case("dense", None, "dense", functools.partial(_append_dense, shape, new))]
    for kv_dtype in kv_dtypes:
        build = functools.partial(_append, shape, new, kv_dtype)
        cases.append(Case(kv_dtype, None, _FAMILIES.get(kv_dtype, kv_dtype), build))
    problem = Problem(shape, queries=new)
    return Group(APPEND, problem.label, problem.facts, tuple(cases))


def _new_tokens(shape: Shape, new: int) -> tuple[jax.Array, jax.Array]:
    """Key and value, ``[B, new, K, H]``."""
    size = (shape.batch, new, shape.heads.kv, shape.heads.dim)
    return inputs.random(0, size), inputs.random(1, size)


def _starts(shape: Shape, new: int) -> list[int]:
    """Positions of the first new token, in one call after the other."""
    room = shape.tokens - new
    return [i * room // _PLACES for i in range(_PLACES)]


def _append_needs(shape: Shape, new: int, token_bytes: int) -> Needs:
    """Reading bfloat16, writing what is stored."""
    tokens = shape.batch * new
    return Needs(tokens * (_dense_token_bytes(shape) + token_bytes), 0.0, "bf16")


def _append(shape: Shape, new: int, kv_dtype: str, arrays: Arrays) -> Append:
    make = functools.partial(inputs.empty, shape, Problem.page_size, kv_dtype)
    key, value = arrays.get(_new_tokens, shape, new)
    tables = jnp.asarray(inputs.block_tables(shape, Problem.page_size))
    lengths = [np.full(shape.batch, start, np.int32) for start in _starts(shape, new)]
    check = functools.partial(_check_append, start=int(lengths[0][0]))
    needs = _append_needs(shape, new, jax.eval_shape(make).token_bytes)
    return Append(
        paged.append,
        (key, value, tables),
        needs,
        check,
        (key, value, tables),
        most=("relative_l2", _STORED[kv_dtype]),
        make=make,
        starts=tuple(map(jnp.asarray, lengths)),
    )


def _check_append(
    cache: PagedCache, key: jax.Array, value: jax.Array, tables: jax.Array, *, start: int
) -> Compared:
    """What the first and the last sequence's pages give back."""
    some, new, size = inputs.compared(len(key)), key.shape[1], cache.page_size
    entries = slice(start // size, -(-(start + new) // size))
    taken, first = tables[some, entries], start % size
    held = jnp.full(len(some), first + new, jnp.int32)
    stored = paged.gather(cache, taken, held, dtype=jnp.float32)
    got = jnp.stack([x[:, first : first + new] for x in stored])
    return got, jnp.stack([key[some], value[some]]), jnp.all(jnp.isfinite(got))


def _append_dense(shape: Shape, new: int, arrays: Arrays) -> Append:
    key, value = arrays.get(_new_tokens, shape, new)
    starts = _starts(shape, new)

    def make() -> tuple[jax.Array, jax.Array]:
        size = (shape.batch, shape.tokens, *key.shape[2:])
        return jnp.zeros(size, key.dtype), jnp.zeros(size, key.dtype)

    def check(cache: Any, key: jax.Array, value: jax.Array) -> Compared:
        got = jnp.stack([x[:, starts[0] : starts[0] + new] for x in cache])
        return got, jnp.stack([key, value]), jnp.all(jnp.isfinite(got))

    return Append(
        _update,
        (key, value),
        _append_needs(shape, new, _dense_token_bytes(shape)),
        check,
        (key, value),
        most=("relative_l2", 0.0),
        make=make,
        starts=tuple(jnp.asarray(start, jnp.int32) for start in starts),
    )


def _update(cache: Any, key: jax.Array, value: jax.Array, start: jax.Array) -> Any:
    return tuple(
        jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0))
        for old, new in zip(cache, (key, value), strict=True)
    )
