"""Rows of one layer's attention: the same tokens in every cache, attended to as a model does.

But for Triton's rows nothing is asked for by name: each cache is written and read by what it
chooses on this device.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from benchmarks.measuring.calls import Arrays, Call, Case, Group, compared_rows
from benchmarks.measuring.samples import (
    errors,
    exact_attention,
    exact_rows,
    sample_all,
)
from benchmarks.measuring.work import Needs, attention_operations
from benchmarks.shapes import Shape
from benchmarks.suites.verdict.tables import CACHES, DECODE, FULL, METHODS, PROMPT, TRITON, family
from benchmarks.tables import Row
from turbojax.caches import LayerCache, cache_by_name, init_layer_cache, kind_of
from turbojax.caches.paged.layer import PagedLayer

# Sequences end in the middle of a page, a block and a group, so that what is newest is read too.
_SHORT_OF_FULL = 27
# Errors are taken over this many sequences.
_COMPARED = 2
# Tokens that are written at a time: what is in between must fit beside the caches.
_TOKENS_AT_ONCE = 2**17
_BFLOAT16 = 2
# Relative L1: 4 bits make 0.15 to 0.2, with a scale per token and keys with outliers 0.45; a wrong
# output about 1.
_WRONG = 0.7


def decoding(shape: Shape, methods: Iterable[str] = tuple(METHODS)) -> Group:
    """One query token of each sequence against what a cache holds."""
    cases = []
    for name in methods:
        build = _full if name == FULL else functools.partial(_decode, name=name)
        cases.append(_case(name, functools.partial(build, shape)))
    return Group(DECODE, shape.label, shape.facts, tuple(cases))


def prompts(shape: Shape, methods: Iterable[str] = tuple(METHODS)) -> Group:
    """Causal attention within prompts, which an empty cache holds then."""
    caches = [name for name in methods if name in CACHES]
    cases = [_case(name, functools.partial(_prompt, shape, name)) for name in caches]
    return Group(PROMPT, shape.label, shape.facts, tuple(cases))


def _case(name: str, build: Callable[[Arrays], Call]) -> Case:
    return Case(name, None, family(name), build)


def cache_of(method: str) -> str:
    """The name of the cache that a method reads."""
    return method.removesuffix(TRITON)


def held(shape: Shape) -> int:
    """Tokens of each sequence while it decodes."""
    return shape.tokens - _SHORT_OF_FULL


def new_cache(shape: Shape, name: str) -> LayerCache:
    """An empty cache of a layer; its pages lie in random order all over the pool."""
    kind = cache_by_name(name, shape.heads.kv)
    cache = init_layer_cache(
        shape.batch, shape.tokens, shape.heads.kv, shape.heads.dim, kind=kind, dtype=jnp.bfloat16
    )
    if isinstance(cache, PagedLayer):
        order = np.random.default_rng(0).permutation(cache.pages.num_pages).astype(np.int32)
        return dataclasses.replace(cache, block_tables=jnp.asarray(order)[cache.block_tables])
    return cache


# Filling ------------------------------------------------------------------------------------------

_lowering = threading.Lock()  # Mosaic's lowering keeps global state


@functools.cache
def filling(shape: Shape, name: str) -> Any:
    """What writes some sequences' tokens into a cache, compiled; see `filled`."""
    count = _at_once(shape)

    def store(cache: LayerCache, key: jax.Array, value: jax.Array, first: jax.Array) -> LayerCache:
        kind = kind_of(cache)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first, count) for x in (key, value))
        lengths = jnp.full(count, held(shape), jnp.int32)
        part = kind.store_prompt(kind.take(cache, first, count), k, v, lengths)
        return kind.put(cache, part, first)

    heads = shape.heads
    tokens = jax.ShapeDtypeStruct((shape.batch, shape.tokens, heads.kv, heads.dim), jnp.bfloat16)
    empty = jax.eval_shape(lambda: new_cache(shape, name))
    with _lowering:
        place = jax.ShapeDtypeStruct((), jnp.int32)
        lowered = jax.jit(store, donate_argnums=0).lower(empty, tokens, tokens, place)
    return lowered.compile()


def _at_once(shape: Shape) -> int:
    """Sequences that are written at a time."""
    most = max(1, _TOKENS_AT_ONCE // shape.tokens)
    return max(n for n in range(1, min(most, shape.batch) + 1) if shape.batch % n == 0)


def filled(shape: Shape, name: str, arrays: Arrays) -> LayerCache:
    """A cache that holds the tokens of `sample_all`, all but the last ones."""
    _, key, value = arrays.get(sample_all, shape, 1)
    store, cache = filling(shape, name), new_cache(shape, name)
    for first in range(0, shape.batch, _at_once(shape)):
        cache = store(cache, key, value, jnp.int32(first))
    return cache


# Calls --------------------------------------------------------------------------------------------


def _decode(shape: Shape, arrays: Arrays, *, name: str) -> Call:
    query, _, _ = arrays.get(sample_all, shape, 1)
    cache = arrays.get(filled, shape, cache_of(name), arrays)
    implementation = "triton" if name.endswith(TRITON) else None
    want = arrays.get(_decoded, shape, held(shape), arrays)
    facts = {"cache_bytes": cache.nbytes, "bits_per_number": bits_per_number(shape, cache.nbytes)}

    def attend(q: jax.Array, cache: LayerCache) -> jax.Array:
        out: jax.Array = tj.decode(q, cache, implementation=implementation)
        return out

    return Call(
        attend,
        (query, cache),
        _decode_needs(shape, cache.nbytes),
        errors=lambda out: {**compared(out[:_COMPARED], want), **facts},
    )


def _full(shape: Shape, arrays: Arrays) -> Call:
    """cuDNN on all tokens there is room for: faster than with lengths, and no more to be seen."""
    attend = exact_attention("cudnn")
    query, key, value = arrays.get(sample_all, shape, 1)
    want = arrays.get(_decoded, shape, shape.tokens, arrays)
    nbytes = key.nbytes + value.nbytes
    facts = {"cache_bytes": nbytes, "bits_per_number": bits_per_number(shape, nbytes)}
    return Call(
        attend,
        (query, key, value),
        _decode_needs(shape, nbytes),
        errors=lambda out: {**compared(out[:_COMPARED], want), **facts},
    )


def _decoded(shape: Shape, seen: int, arrays: Arrays) -> jax.Array:
    """float32 ``[_COMPARED, 1, N, H]``: exact attention to the first tokens."""
    first = (x[:_COMPARED] for x in arrays.get(sample_all, shape, 1))
    return exact_rows(*first, jnp.array([seen], jnp.int32))


def _decode_needs(shape: Shape, cache_bytes: int) -> Needs:
    """Reading the cache, as allocated, and the queries, writing the output; both products."""
    heads = shape.heads
    channels = shape.batch * heads.query * heads.dim
    moved = cache_bytes + 2 * channels * _BFLOAT16
    return Needs(moved, 4.0 * channels * shape.tokens, "bf16")


def _prompt(shape: Shape, name: str, arrays: Arrays) -> Call:
    query, key, value = arrays.get(sample_all, shape, shape.tokens)
    lengths = jnp.full(shape.batch, shape.tokens, jnp.int32)
    rows = np.unique(compared_rows(shape.tokens))
    want = arrays.get(_attended, shape, arrays)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        given: Any = {"key_value_seq_lengths": lengths}
        out, cache = tj.prefill(q, k, v, new_cache(shape, name), **given)
        return out, cache

    nbytes = jax.eval_shape(lambda: new_cache(shape, name)).nbytes
    moved = 2 * query.nbytes + key.nbytes + value.nbytes + nbytes
    return Call(
        attend,
        (query, key, value, lengths),
        Needs(moved, attention_operations(shape), "bf16"),
        errors=lambda out: compared(out[0][:1, rows], want),
    )


def _attended(shape: Shape, arrays: Arrays) -> jax.Array:
    """float32 ``[1, R, N, H]``: some rows of the first prompt, exact."""
    query, key, value = (x[:1] for x in arrays.get(sample_all, shape, shape.tokens))
    rows = np.unique(compared_rows(shape.tokens))
    return exact_rows(query[:, rows], key, value, jnp.asarray(rows + 1, jnp.int32))


def bits_per_number(shape: Shape, nbytes: int) -> float:
    """Bits that a cache takes for each number of a key or value there is room for."""
    heads = shape.heads
    return 8 * nbytes / (2 * shape.batch * shape.tokens * heads.kv * heads.dim)


def compared(got: jax.Array, want: jax.Array) -> Row:
    """Cosine similarity, relative L1 and RMSE against exact attention to the tokens themselves."""
    found = errors(got, want)
    if not found["relative_l1"] <= _WRONG:
        raise ArithmeticError(f"the output is wrong: {found}, relative_l1 must be <= {_WRONG}")
    return dict(found)
