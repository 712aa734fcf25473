"""The contract of `paged_attention`: a float64 oracle over the pages' content; NaN; transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.paged_helpers import (
    MIXED,
    SHAPES,
    assert_matches_oracle,
    attend,
    check_chunks,
    check_donated,
    check_nan,
    check_neighbours_and_places,
    check_windowed_tables,
    equal,
    filled,
    kernel_units,
    normal,
    options_of,
)
from tests.contracts.implementations import interpreted
from turbojax.caches.paged import paged_attention
from turbojax.caches.paged import pool as paged


def run(implementation):
    """`paged_attention` with the implementation, interpreted if it is a kernel."""

    def call(*arguments, **options):
        with interpreted(implementation):
            return attend(*arguments, implementation=implementation, **options)

    return call


def matches(implementation, query, cache, *arguments, **options):
    if implementation == "triton":
        options["units"] = kernel_units(cache)
    assert_matches_oracle(query, cache, *arguments, call=run(implementation), **options)


# Each shape, in turn with either implementation and another kind of pages. In the fast tier the
# definition, on what it has of its own: norms and several parts; and the kernel.
GRID = [
    ("xla", "several, two parts", "turbo4"),
    ("triton", "many rows", "turbo_k3v4"),
    ("xla", "one query", "fp8_e4m3"),
    ("xla", "heads of their own", "fp8_e5m2"),
    ("xla", "head dim 256", "fp8_e4m3"),
    ("xla", "many rows", "auto"),
    ("triton", "head dim 96", "turbo4"),
    ("triton", "head dim 256", "auto"),
    ("triton", "head dim 80", "fp8_e5m2"),
    ("triton", "head dim 16", "fp8_e4m3"),
    ("xla", "several, two parts", "int8"),
    ("xla", "head dim 16", "int8_v4"),
    ("xla", "heads of their own", "turbo_k2v4"),
    ("xla", "head dim 80", "turbo_k3v2"),
    ("triton", "one query", "turbo_k2v3"),
    ("triton", "head dim 16", "turbo_k4v2"),
    ("triton", "head dim 256", "k8v4"),
    ("triton", "head dim 96", "int8"),
    ("triton", "head dim 80", "int8_v4"),
    ("triton", "several, two parts", "turbo4"),
]
# Both implementations and all kinds of pages.
KINDS = [("xla", "turbo4"), ("triton", "fp8_e4m3"), ("xla", "fp8_e5m2"), ("triton", "auto")]
# What each kind of pages shares: one kind with plain JAX, another with the kernel.
kernel_and_reference = pytest.mark.parametrize(("implementation", "kv_dtype"), KINDS[:2])
# Where what is stored counts: turbo4 through the kernel and e5m2, too.
most_kinds = pytest.mark.parametrize(
    ("implementation", "kv_dtype"),
    [
        *KINDS[:3],
        ("triton", "turbo4"),
        ("xla", "turbo_k3v2"),
        ("triton", "k8v4"),
        ("triton", "int8"),
    ],
)


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(("implementation", "name", "kv_dtype"), GRID)
def test_equals_the_oracle(implementation, name, kv_dtype):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    cache, tables = filled(kv_dtype, lengths, kv_heads, dim)
    query = normal(3, (len(lengths), count, heads, dim))
    matches(implementation, query, cache, tables, lengths)


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("implementation", "name", "kv_dtype"),
    [
        ("xla", "several", "auto"),
        ("triton", "several", "turbo_k3v2"),
        ("xla", "scale", "auto"),
        ("triton", "negative scale", "fp8_e4m3"),
        ("xla", "scale of zero", "fp8_e5m2"),
        ("triton", "soft cap", "turbo4"),
        ("triton", "window past a part", "fp8_e4m3"),
        ("xla", "padding", "fp8_e5m2"),
        ("triton", "window", "turbo4"),
        ("triton", "window", "k8v4"),
        ("triton", "window past a part", "int8"),
        ("xla", "soft cap", "k8v4"),
        ("xla", "window", "int8"),
        ("triton", "soft cap", "turbo_k3v2"),
        ("xla", "padding", "turbo_k2v2"),
    ],
)
def test_options(implementation, name, kv_dtype):
    arguments, options = options_of(name, kv_dtype)
    matches(implementation, *arguments, **options)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("implementation", "kv_dtype", "name"),
    [("triton", MIXED[i % 4], name) for i, name in enumerate(SHAPES)]
    + [("triton", MIXED[(i + 1 + i // 4) % 4], name) for i, name in enumerate(SHAPES)]
    + [("xla", MIXED[i], name) for i, name in enumerate(list(SHAPES)[:4])],
)
def test_mixed_formats_equal_the_oracle(implementation, kv_dtype, name):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    cache, tables = filled(kv_dtype, lengths, kv_heads, dim, dtype=jnp.bfloat16)
    query = normal(3, (len(lengths), count, heads, dim), jnp.bfloat16)
    matches(implementation, query, cache, tables, lengths)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("implementation", "kv_dtype"),
    [*KINDS, ("triton", "k8v4"), ("triton", "int8_v4"), ("triton", "turbo_k3v3")],
)
def test_half_precision(implementation, kv_dtype):
    halves = {"auto": {"xla": jnp.float16, "triton": jnp.bfloat16}[implementation]}
    dtype = {**halves, "fp8_e5m2": jnp.float16}.get(kv_dtype, jnp.bfloat16)
    lengths = (90, 20)
    cache, tables = filled(kv_dtype, lengths, 2, 64, dtype=dtype)
    matches(implementation, normal(5, (2, 2, 4, 64), dtype), cache, tables, lengths)


@pytest.mark.fuzz
@kernel_and_reference
def test_page_sizes_do_not_matter(implementation, kv_dtype):
    """Tiles of several pages, of one, and of a part of one; a table that ends within a tile."""
    lengths, query = (300, 17), normal(6, (2, 2, 4, 32))
    want = None
    for page_size in (16, 32, 128):
        cache, tables = filled(kv_dtype, lengths, page_size=page_size)
        got = run(implementation)(
            query, cache, tables, np.asarray(lengths, np.int32), return_residual=True
        )
        want = got if want is None else want
        equal(got, want)


@pytest.mark.quick(slow=1)
@most_kinds
def test_neighbours_and_places_do_not_matter(implementation, kv_dtype):
    check_neighbours_and_places(run(implementation), kv_dtype)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kv_dtype", ["turbo4", "k8v4"])
def test_chunks_do_not_matter(kv_dtype):
    check_chunks(attend, kv_dtype)


@pytest.mark.quick(first=1, slow=0)  # of pages with norms
@most_kinds
def test_what_is_not_finite_reaches_what_attends_to_it(implementation, kv_dtype):
    check_nan(run(implementation), kv_dtype)


@pytest.mark.quick(1, slow=0)
@most_kinds
def test_what_is_out_of_range_is_nan_under_jit(implementation, kv_dtype):
    """For that sequence, padding included; the others' bits stay."""
    lengths = np.asarray((40, 33, 20, 0, 48), np.int32)
    cache, tables = filled(kv_dtype, tuple(lengths.tolist()))
    query, real = normal(8, (5, 2, 4, 32)), jnp.asarray((2, 1, 2, 2, 2), jnp.int32)
    tables = np.asarray(tables)
    call = functools.partial(
        run(implementation), query, cache, query_seq_lengths=real, return_residual=True
    )
    want = call(tables, lengths)
    assert not any(np.isnan(x).any() for x in want)

    def bad(tables, lengths, *broken):
        got = call(tables, lengths)
        sound = np.setdiff1d(np.arange(5), broken)
        equal([np.asarray(x)[sound] for x in got], [np.asarray(x)[sound] for x in want])
        for x in got:
            assert np.isnan(np.asarray(x)[list(broken)]).all()

    def changed(*places):
        other = tables.copy()
        for place, value in places:
            other[place] = value
        return other

    bad(changed(((1, 2), -1)), lengths, 1)
    bad(changed(((0, 0), cache.num_pages), ((1, 1), 2**31 - 1)), lengths, 0, 1)
    bad(tables, np.asarray((49, 33, -1, 0, 2**31 - 1), np.int32), 0, 2, 4)
    # What no token needs may be anything.
    bad(changed(((2, 2), 2**30), (3, -5)), lengths)


@pytest.mark.quick(slow=1)
@most_kinds
def test_pages_before_the_windows_may_be_anything(implementation, kv_dtype):
    check_windowed_tables(run(implementation), kv_dtype)


def test_a_page_in_a_window_is_needed():
    """The first one ends with token 15, which a window of 23 before token 39 does not reach."""
    cache, tables = filled("auto", (40, 33))
    lengths, tables = np.asarray((40, 33)), tables.at[0, 0].set(-1)
    query = normal(10, (2, 2, 4, 32))
    paged_attention(query[:, :1], cache, tables, lengths, local_window_size=(23, 0))
    paged_attention(query, cache, tables, lengths, local_window_size=(22, 0))
    message = r"block_tables\[0, 0\]=-1 is needed"
    for given in ({"local_window_size": (24, 0)}, {"local_window_size": (23, 0)}, {}):
        count = 1 if given == {"local_window_size": (24, 0)} else 2
        with pytest.raises(ValueError, match=message):
            paged_attention(query[:, :count], cache, tables, lengths, **given)


def test_64_bits_are_taken_where_they_fit():
    """And what no token needs may be anything, beyond 32 bits too."""
    cache, tables = filled("auto", (40, 33, 20))
    lengths, query = np.array([40, 33, 20]), normal(10, (3, 1, 4, 32))
    wide = np.asarray(tables).astype(np.int64)
    wide[2, 2] = 2**32
    equal(
        [paged_attention(query, cache, wide, lengths)],
        [paged_attention(query, cache, tables, lengths.astype(np.int32))],
    )


def test_queries_past_their_number_under_jit_act_as_the_nearest():
    lengths = (40, 33)
    cache, tables = filled("auto", lengths)
    query = normal(9, (2, 3, 4, 32))
    call = functools.partial(attend, query, cache, tables, np.asarray(lengths, np.int32))
    equal(
        call(query_seq_lengths=jnp.asarray([7, -2], jnp.int32)),
        call(query_seq_lengths=jnp.asarray([3, 0], jnp.int32)),
    )


@pytest.mark.slow
def test_transforms():
    """Eager and jitted the same bits; vmap and scan the same numbers."""
    caches = [filled("turbo4", (20, 4), seed=seed) for seed in (0, 1)]
    pools, tables = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    lengths = jnp.asarray((20, 4), jnp.int32)
    query = normal(9, (2, 2, 1, 4, 32))
    want = [attend(q, *c, lengths) for q, c in zip(query, caches, strict=True)]
    equal(paged_attention(query[0], *caches[0], lengths), want[0])
    want = jnp.stack(want)
    got = jax.vmap(paged_attention, in_axes=(0, 0, 0, None))(query, pools, tables, lengths)
    np.testing.assert_allclose(got, want, atol=1e-6)
    _, scanned = jax.lax.scan(
        lambda c, x: (c, paged_attention(*x, lengths)), None, (query, pools, tables)
    )
    np.testing.assert_allclose(scanned, want, atol=1e-6)


@pytest.mark.slow
def test_append_and_attend_with_a_donated_pool():
    check_donated(attend, "turbo4")


def test_memory_does_not_grow_with_the_sequences():
    """Tile by tile: far less than the keys in float32 would take."""
    cache = jax.eval_shape(lambda: paged.init_paged_cache(2**11, 64, 2, 64))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 2**11), (1,))]
    query = jax.ShapeDtypeStruct((1, 16, 8, 64), jnp.bfloat16)
    compiled = attend.lower(query, cache, *arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**17 * 2 * 64 * 4 / 16


# Refusals ----------------------------------------------------------------------------------------


def test_gradients_are_refused():
    cache, tables = filled("auto", (20, 4))
    lengths = jnp.asarray((20, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="paged_attention has no gradient"):
        jax.grad(lambda q: paged_attention(q, cache, tables, lengths).sum())(
            normal(0, (2, 1, 4, 32))
        )


QUERY = jnp.zeros((2, 1, 4, 32))


def ask(query=QUERY, cache=None, tables=None, lengths=(20, 4), **options):
    held, places = filled("auto", (20, 4))
    return paged_attention(
        query,
        held if cache is None else cache,
        places if tables is None else tables,
        jnp.asarray(lengths),
        **options,
    )


TABLES = jnp.asarray([[0, 1], [2, -1]], jnp.int32)
WRONG = {
    "cache": (TypeError, lambda: ask(cache=tj.init_cache(2, 9, 2, 32)), "must be a PagedCache"),
    "rank": (ValueError, lambda: ask(QUERY[0]), r"\(1, 4, 32\).*\[B, T, N, H\]"),
    "dtype": (TypeError, lambda: ask(QUERY.astype(jnp.bfloat16)), "bfloat16.*float32"),
    "head dim": (ValueError, lambda: ask(QUERY[..., :16]), r"\[B, T, N, 32\]"),
    "heads": (ValueError, lambda: ask(QUERY[:, :, :3]), "3 query heads.*multiple of 2"),
    "batch": (ValueError, lambda: ask(QUERY[:1]), r"\[1, max_pages\]"),
    "table's dtype": (TypeError, lambda: ask(tables=TABLES.astype(jnp.float32)), "integer type"),
    "page": (
        ValueError,
        lambda: ask(tables=TABLES.at[0, 1].set(6)),
        r"block_tables\[0, 1\]=6 is needed.*0\.\.5",
    ),
    "no page": (ValueError, lambda: ask(lengths=(20, 17), tables=TABLES), r"\[1, 1\]=-1.*needed"),
    "too long": (ValueError, lambda: ask(lengths=(33, 4)), r"lengths=\[33, 4\].*between 0 and 32"),
    "negative length": (ValueError, lambda: ask(lengths=(-1, 4)), "between 0 and 32"),
    "lengths": (ValueError, lambda: ask(lengths=(4,)), r"lengths.shape=\(1,\) must be \(2,\)"),
    "lengths' dtype": (TypeError, lambda: ask(lengths=(4.0, 3.0)), "integer type"),
    "wide page": (
        ValueError,
        lambda: ask(tables=np.array([[0, 2**32 + 1], [2, -1]])),
        r"block_tables\[0, 1\]=2147483647 is needed",
    ),
    "wide query length": (
        ValueError,
        lambda: ask(query_seq_lengths=np.array([1, 2**32 + 1])),
        "query_seq_lengths holds 4294967297",
    ),
    "wide list": (
        ValueError,
        lambda: ask(query_seq_lengths=[1, -(2**40)]),
        "query_seq_lengths holds -1099511627776",
    ),
    "query lengths": (
        ValueError,
        lambda: ask(query_seq_lengths=jnp.asarray([2, 0])),
        r"query_seq_lengths=\[2, 0\].*between 0 and 1",
    ),
    "window": (ValueError, lambda: ask(local_window_size=-1), "integers >= 0"),
    "soft cap": (ValueError, lambda: ask(logits_soft_cap=-1.0), "logits_soft_cap=-1.0.*positive"),
    "scale": (TypeError, lambda: ask(scale="a"), "scale is a str"),
    "name": (ValueError, lambda: ask(implementation="cuda"), "implementation='cuda'.*one of"),
    "no such": (
        NotImplementedError,
        lambda: ask(implementation="jax_triton"),
        "paged_attention has no implementation='jax_triton'; it has",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
