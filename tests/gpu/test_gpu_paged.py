"""`paged_attention` compiled on a GPU: every implementation against the oracle and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.paged_helpers import (
    KV_DTYPES,
    MIXED,
    OPTIONS,
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
    spoil,
)
from tests.gpu.gpu_helpers import assert_near
from tests.oracles.paged import code_bits, int8_sides
from turbojax._device import needs_hopper
from turbojax.attention.options import Options
from turbojax.caches.paged import pool as paged

pytestmark = pytest.mark.gpu

# What the kernel for Hopper takes; that it refuses the rest is tested on the CPU.
HOPPER_DIMS, HOPPER_ROWS = (64, 128, 256), 64
PAIRS = [(kv_dtype, kernel) for kv_dtype in KV_DTYPES for kernel in ("mosaic_gpu", "triton")]
# Every mix is held to the oracle and to plain JAX; two of them stand for all elsewhere.
FEWER = [(kv_dtype, kernel) for kv_dtype, kernel in PAIRS if kv_dtype not in MIXED[2:]]


def widest(kv_dtype, kernel):
    """The dtype with the most bits that a kernel takes with pages of this kind."""
    return jnp.float16 if (kv_dtype, kernel) == ("auto", "mosaic_gpu") else jnp.float32


def grid(shapes):
    """Names, kinds of pages and kernels that take them; both kernels of a kind are neighbours."""
    return [
        (name, kv_dtype, kernel)
        for name, (_, kv_heads, dim, heads, count, *_) in shapes.items()
        for kv_dtype, kernel in PAIRS
        if kernel == "triton" or (takes(kv_dtype, dim) and count * heads // kv_heads <= HOPPER_ROWS)
    ]


def takes(kv_dtype, dim):
    """Whether the kernel for Hopper does: of codes all that fill words."""
    words = {4: 8, 3: 32, 2: 16}
    fills = [bits in words and dim % words[bits] == 0 for bits in code_bits(kv_dtype)]
    return dim in HOPPER_DIMS or all(fills)


def implementation(kernel, query, cache, tables):
    """A call of `kernel`; where the GPU is no Hopper perhaps a skip that says so."""
    from turbojax.caches.paged import api

    [chosen] = [i for i in api.PAGED.implementations if i.name == kernel]
    refusal = chosen.unsupported(
        query=jax.ShapeDtypeStruct(
            query.shape, jnp.float32 if code_bits(cache.kv_dtype)[0] else query.dtype
        ),
        cache=cache,
        block_tables=tables,
        options=Options(True, scale=1.0),
    )
    if refusal is not None:
        assert needs_hopper() is not None, refusal
        pytest.skip(f"{kernel}: {refusal}")
    return functools.partial(attend, implementation=kernel)


def matches(kernel, query, cache, tables, lengths, **options):
    call = implementation(kernel, query, cache, tables)
    units = kernel_units(cache)
    assert_matches_oracle(query, cache, tables, lengths, units=units, call=call, **options)


@pytest.mark.quick(11)
@pytest.mark.parametrize(("name", "kv_dtype", "kernel"), grid(SHAPES))
def test_equals_the_oracle(name, kv_dtype, kernel):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    for dtype in (jnp.bfloat16, widest(kv_dtype, kernel)):
        cache, tables = filled(kv_dtype, lengths, kv_heads, dim, dtype=dtype)
        query = normal(3, (len(lengths), count, heads, dim), dtype)
        matches(kernel, query, cache, tables, lengths)


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, kv_dtype, kernel):
    head_dim = 64 if kernel == "mosaic_gpu" else None
    arguments, options = options_of(name, kv_dtype, jnp.bfloat16, head_dim)
    matches(kernel, *arguments, **options)


# Lengths, KV heads, head dim, query heads and tokens, page size: full sizes, against plain JAX.
LARGE = {
    "Llama-3-8B": ((4096, 4000, 1, 0), 8, 128, 32, 1, 64),
    "three tokens": ((5000, 777), 8, 128, 32, 3, 64),
    "a chunk of 16": ((3000, 1030), 4, 128, 16, 16, 16),
    "a prompt": ((1300,), 2, 128, 8, 200, 64),
    "head dim 64, window": ((3000, 128), 8, 64, 64, 2, 32),
    "head dim 256": ((2100, 65), 2, 256, 16, 3, 128),
    "eight heads a group": ((2500, 1025), 2, 128, 16, 1, 128),
}


@pytest.mark.quick(11)
@pytest.mark.parametrize(("name", "kv_dtype", "kernel"), grid(LARGE))
def test_full_sizes(name, kv_dtype, kernel):
    """Twice the same bits, and plain JAX's numbers but for the rounding of weights and queries."""
    lengths, kv_heads, dim, heads, count, page_size = LARGE[name]
    cache, tables = filled(kv_dtype, lengths, kv_heads, dim, page_size, dtype=jnp.bfloat16)
    query = normal(4, (len(lengths), count, heads, dim), jnp.bfloat16)
    options = {"local_window_size": (1000, 0)} if "window" in name else {}
    arguments = query, cache, tables, np.asarray(lengths, np.int32)
    run = implementation(kernel, query, cache, tables)
    got = run(*arguments, return_residual=True, **options)
    equal(run(*arguments, return_residual=True, **options), got)
    want = attend(*arguments, return_residual=True, implementation="xla", **options)
    assert_near(got[0], want[0], jnp.bfloat16, 2.0**-8)
    is_integer = code_bits(kv_dtype)[0] or int8_sides(kv_dtype)[0]
    assert_near(got[1], want[1], jnp.float32, 1e-3 if is_integer else 2e-5)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_page_sizes_do_not_matter(kv_dtype, kernel):
    lengths, query = (1300, 17), normal(6, (2, 2, 4, 128), jnp.bfloat16)
    want = None
    for page_size in paged.PAGE_SIZES:
        cache, tables = filled(kv_dtype, lengths, 2, 128, page_size, dtype=jnp.bfloat16)
        run = implementation(kernel, query, cache, tables)
        got = run(query, cache, tables, np.asarray(lengths, np.int32), return_residual=True)
        want = got if want is None else want
        equal(got, want)


def runs(kernel, kv_dtype, head_dim=128, dtype=jnp.bfloat16):
    """`implementation` for pages of this kind, which are not made for it."""
    pool = functools.partial(
        paged.init_paged_cache, 8, 16, 2, head_dim, kv_dtype=kv_dtype, dtype=dtype
    )
    query = jax.ShapeDtypeStruct((2, 1, 4, head_dim), dtype)
    tables = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    return implementation(kernel, query, jax.eval_shape(pool), tables)


@pytest.mark.quick(7)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_neighbours_and_places_do_not_matter(kv_dtype, kernel):
    check_neighbours_and_places(runs(kernel, kv_dtype), kv_dtype, jnp.bfloat16, 128)


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_a_merge_of_one_part_changes_no_bit(kv_dtype, kernel):
    """Of outputs; logarithms are taken by other instructions."""
    lengths, query = (500, 70), normal(6, (2, 2, 4, 128), jnp.bfloat16)
    one, several = (
        filled(kv_dtype, lengths, head_dim=128, dtype=jnp.bfloat16, width=width)
        for width in (32, 200)
    )
    run = runs(kernel, kv_dtype)
    want, want_lse = run(query, *one, np.asarray(lengths, np.int32), return_residual=True)
    got, lse = run(query, *several, np.asarray(lengths, np.int32), return_residual=True)
    equal(got, want)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "tokens", "options"),
    [
        ("turbo4", 128, 1, {}),
        ("turbo4", 64, 3, {"window": (700, 0)}),
        ("turbo4", 256, 4, {"logits_soft_cap": 20.0}),
        ("turbo4", 128, 4, {}),
        ("fp8_e4m3", 128, 1, {"window": (100, 0)}),
        ("fp8_e5m2", 64, 4, {}),
        ("fp8_e4m3", 256, 2, {}),
        ("auto", 128, 1, {}),
        ("auto", 64, 4, {"logits_soft_cap": 20.0}),
        ("auto", 256, 2, {"window": (700, 0)}),
        ("k8v4", 64, 3, {"window": (700, 0)}),
        ("int8", 128, 2, {}),
        ("int8", 64, 1, {"window": (700, 0)}),
        ("int8_v4", 256, 1, {}),
        ("turbo_k2v3", 128, 1, {}),
        ("turbo_k3v4", 256, 2, {}),
    ],
)
def test_how_programs_are_cut_changes_no_bit(kv_dtype, head_dim, tokens, options):
    """On Hopper: a few blocks a program, a part, and with other parts the same numbers."""
    from turbojax.caches.paged import mosaic_gpu

    lengths = (9000, 2049, 255, 1, 0)
    cache, tables = filled(kv_dtype, lengths, 2, head_dim, dtype=jnp.bfloat16)
    query = normal(6, (len(lengths), tokens, 8, head_dim), jnp.bfloat16)
    implementation("mosaic_gpu", query, cache, tables)  # a skip where there is no Hopper
    counts = jnp.minimum(jnp.asarray(lengths, jnp.int32), tokens)
    arrays = (query, cache, jnp.asarray(tables), jnp.asarray(lengths, jnp.int32), counts)
    given = Options(True, scale=0.1, **options)
    split, whole, other = (
        mosaic_gpu.attend(*arrays, options=given, launch=launch)
        for launch in (
            mosaic_gpu.Launch(is_split=True),
            mosaic_gpu.Launch(is_split=False, stages=1),
            mosaic_gpu.Launch(is_split=False, part=1024),
        )
    )
    assert np.isfinite(np.asarray(whole[0].astype(jnp.float32))).all()
    equal(split[0], whole[0])
    equal(split[1], whole[1])
    assert_near(other[0], whole[0], jnp.bfloat16, 2.0**-8)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_do_not_matter(head_dim, kv_dtype, kernel):
    call = runs(kernel, kv_dtype, head_dim)
    check_chunks(call, kv_dtype, jnp.bfloat16, head_dim)


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_what_is_not_finite_reaches_what_attends_to_it(kv_dtype, kernel):
    dtype = widest(kv_dtype, kernel)
    check_nan(runs(kernel, kv_dtype, 64, dtype), kv_dtype, dtype, head_dim=64)


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
@pytest.mark.parametrize("width", [4, 200], ids=["one part", "several"])
def test_padding_gives_0_beside_what_is_not_finite(width, kv_dtype, kernel):
    lengths = (60, 31, 31)
    cache, tables = filled(kv_dtype, lengths, head_dim=128, dtype=jnp.bfloat16, width=width)
    for side in ("key", "value"):
        cache = spoil(spoil(cache, tables, 0, 0, 3, side), tables, 1, 1, 3, side)
    run = runs(kernel, kv_dtype)
    query = normal(7, (3, 2, 4, 128), jnp.bfloat16)
    counts = np.asarray((1, 0, 0), np.int32)
    out, lse = run(
        query, cache, tables, np.asarray(lengths, np.int32),
        query_seq_lengths=counts, return_residual=True,
    )  # fmt: skip
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    assert np.isnan(out[0, 0, :2]).any(-1).all()
    assert np.isfinite(out[0, 0, 2:]).all()
    assert not out[0, 1].any()
    assert not out[1:].any()
    assert np.all(lse[0, 1] == -np.inf)
    assert np.all(lse[1:] == -np.inf)


@pytest.mark.quick(10)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
@pytest.mark.parametrize("size", [1e-39, 1e-30, 1e30])
def test_queries_of_any_size_are_finite(size, kv_dtype, kernel):
    cache, tables = filled(kv_dtype, (40, 33), head_dim=128, dtype=jnp.bfloat16)
    query = (normal(1, (2, 1, 4, 128)) * size).astype(jnp.bfloat16)
    scale = 1e-3 / max(size, 1e-3)
    out = runs(kernel, kv_dtype)(query, cache, tables, np.asarray((40, 33)), scale=scale)
    assert np.isfinite(np.asarray(out.astype(jnp.float32))).all()


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
@pytest.mark.parametrize("width", [4, 200], ids=["one part", "several"])
def test_several_pools_at_once(width, kv_dtype, kernel):
    """Mapped over pools, as layers may be."""
    lengths = np.asarray((40, 33), np.int32)
    pools = [
        filled(kv_dtype, (40, 33), head_dim=128, dtype=jnp.bfloat16, seed=seed, width=width)
        for seed in (0, 1)
    ]
    query = normal(1, (2, 2, 1, 4, 128), jnp.bfloat16)
    run = runs(kernel, kv_dtype)
    cache, tables = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *pools)
    got = jax.vmap(lambda q, c, t: run(q, c, t, jnp.asarray(lengths)))(query, cache, tables)
    for i, (one, table) in enumerate(pools):
        assert_near(got[i], run(query[i], one, table, lengths), jnp.bfloat16, 2.0**-8)


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_what_is_not_finite_in_16_bits(kv_dtype, kernel):
    check_nan(runs(kernel, kv_dtype, 128), kv_dtype, jnp.bfloat16, 128)


@pytest.mark.quick(7)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_append_and_attend_with_a_donated_pool(kv_dtype, kernel):
    check_donated(runs(kernel, kv_dtype, 128), kv_dtype, jnp.bfloat16, 128)


@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
def test_what_is_out_of_range_is_nan_under_jit(kv_dtype, kernel):
    lengths = np.asarray((1100, 33), np.int32)
    cache, tables = filled(kv_dtype, (1100, 33), head_dim=128, dtype=jnp.bfloat16)
    query = normal(8, (2, 1, 4, 128), jnp.bfloat16)
    run = implementation(kernel, query, cache, tables)
    want = run(query, cache, tables, lengths)
    for broken in (-1, cache.num_pages, 2**31 - 1):
        got = run(query, cache, tables.at[0, 40].set(broken), lengths)
        equal(got[1], want[1])
        assert np.isnan(np.asarray(got[0].astype(jnp.float32))).all()


@pytest.mark.quick(9)
@pytest.mark.parametrize(("kv_dtype", "kernel"), FEWER)
@pytest.mark.parametrize("tokens", [2, 40], ids=["2 queries", "40 queries"])
def test_pages_before_the_windows_may_be_anything(tokens, kv_dtype, kernel):
    """Of few query rows of a KV head, and of more than the kernels for few take."""
    check_windowed_tables(runs(kernel, kv_dtype), kv_dtype, jnp.bfloat16, 128, tokens)


def test_xla_equals_the_oracle():
    for kv_dtype in KV_DTYPES:
        lengths = (1100, 20)
        cache, tables = filled(kv_dtype, lengths, 2, 64)
        query = normal(5, (2, 2, 4, 64))
        call = functools.partial(attend, implementation="xla")
        assert_matches_oracle(query, cache, tables, lengths, call=call)


def test_the_gpu_chooses_a_kernel():
    for kv_dtype in KV_DTYPES:
        cache, tables = filled(kv_dtype, (40, 33), head_dim=128, dtype=jnp.bfloat16)
        query = normal(1, (2, 1, 4, 128), jnp.bfloat16)
        text = attend.lower(query, cache, tables, jnp.asarray((40, 33))).as_text()
        assert "turbojax_paged" in text


def test_the_grids_meet_every_kind_of_pages_and_head_dim():
    wanted = {(*pair, dim) for pair in PAIRS for dim in HOPPER_DIMS}
    shapes = {**SHAPES, **LARGE}
    assert wanted <= {(kind, kernel, shapes[name][2]) for name, kind, kernel in grid(shapes)}
