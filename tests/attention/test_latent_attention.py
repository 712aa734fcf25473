"""The contract of `latent_attention`: float64 oracles, both forms, NaN, transforms, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.paged_helpers import normal
from tests.caches.latent_cache_helpers import (
    FORMATS,
    HEADS,
    LATENT,
    ROPE,
    SCALE,
    assert_matches,
    attend,
    expected,
    filled,
    queries,
)
from turbojax import paged
from turbojax.attention.options import Options
from turbojax.caches.latent.api import LATENT as REGISTRY

LENGTHS = (300, 17, 1, 0)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_equals_the_oracle(kv_dtype):
    assert_matches(queries(4, 3), *filled(kv_dtype, LENGTHS), LENGTHS)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", pytest.param("turbo4", marks=pytest.mark.slow)])
def test_windows_and_padding(kv_dtype):
    pool, tables = filled(kv_dtype, LENGTHS)
    assert_matches(queries(4, 3), pool, tables, LENGTHS, real=(3, 1, 1, 0), window=(20, 0))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("page_size", "seed"), [(64, 0), (128, 3)])
def test_page_sizes_and_seeds(page_size, seed):
    lengths = (130, 64)
    pool, tables = filled("turbo4", lengths, page_size, seed=seed)
    assert_matches(queries(2, 1), pool, tables, lengths)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype):
    lengths = (40, 5)
    pool, tables = filled("turbo4", lengths, dtype=dtype)
    assert_matches(queries(2, 2, dtype), pool, tables, lengths)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_contiguous_cache_gives_the_bits_of_pages(kv_dtype):
    lengths = jnp.asarray([70, 9])
    latent, rope = normal(1, (2, 70, LATENT)), normal(2, (2, 70, ROPE))
    cache = tj.init_latent_cache(2, 100, LATENT, ROPE, kv_dtype=kv_dtype, dtype=jnp.float32)
    cache = tj.append_latents(cache, latent, rope, lengths=lengths)
    pool = paged.init_latent_pages(4, 64, LATENT, ROPE, kv_dtype=kv_dtype, dtype=jnp.float32)
    tables = jnp.asarray([[3, 0], [1, -1]])
    start = jnp.zeros(2, jnp.int32)
    pool = paged.append_latents(pool, latent, rope, tables, start, new_lengths=lengths)
    query = queries(2, 2)
    options = {"scale": SCALE, "return_residual": True}
    one = tj.latent_attention(*query, cache, **options)
    other = paged.latent_attention(*query, pool, tables, lengths, **options)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_both_forms_agree():
    """Absorbed and expanded in float64, and ours between them; DeepSeek's sizes, a few tokens."""
    rng = np.random.default_rng(0)
    heads, nope, rotary, width, rank, tokens = 2, 128, 64, 128, 512, 9
    up_key, up_value = (rng.normal(size=(rank, heads, n)) / 22 for n in (nope, width))
    latent, rope = rng.normal(size=(tokens, rank)), rng.normal(size=(tokens, rotary))
    q, q_rope = rng.normal(size=(tokens, heads, nope)), rng.normal(size=(tokens, heads, rotary))
    scale = (nope + rotary) ** -0.5
    key = np.concatenate(
        [np.einsum("sc,cnh->snh", latent, up_key), np.repeat(rope[:, None], heads, 1)], -1
    )
    value, query = np.einsum("sc,cnh->snh", latent, up_value), np.concatenate([q, q_rope], -1)
    absorbed = np.einsum("tnh,cnh->tnc", q, up_key)
    want = np.zeros((tokens, heads, width))
    for t, h in np.ndindex(tokens, heads):
        weights = np.exp(scale * key[: t + 1, h] @ query[t, h])
        want[t, h] = weights @ value[: t + 1, h] / weights.sum()
        out, *_ = expected((absorbed[t, h], q_rope[t, h]), latent[: t + 1], rope[: t + 1], scale)
        np.testing.assert_allclose(out @ up_value[:, h], want[t, h], rtol=1e-9, atol=1e-12)

    def single(x):
        return jnp.asarray(x[None], jnp.float32)

    cache = tj.init_latent_cache(1, tokens, dtype=jnp.float32)
    cache = tj.append_latents(cache, single(latent), single(rope))
    out = tj.latent_attention(single(absorbed), single(q_rope), cache, scale=scale)
    ours = np.einsum("tnc,cnh->tnh", np.asarray(out[0], np.float64), up_value)
    np.testing.assert_allclose(ours, want, atol=2e-5)
    out = tj.expanded_latent_attention(
        *map(single, (query, key, value)), attention=causal, scale=scale
    )
    np.testing.assert_allclose(out[0], want, atol=2e-5)


causal = functools.partial(
    tj.turbo_attention,
    is_causal=True,
    config=tj.TurboConfig(mode="float", softmax="exact"),
    implementation="xla",
)


def test_values_of_fewer_channels_have_a_gradient():
    q, k, v = (normal(i, (1, 12, 2, n)) for i, n in enumerate((24, 24, 16)))
    weight = normal(3, v.shape)

    def loss(attention, q, k, v):
        return jnp.sum(weight * attention(q, k, v))

    def plain(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 24**-0.5
        mask = jnp.tril(jnp.ones((12, 12), jnp.bool_))[None, None]
        p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    ours = functools.partial(tj.expanded_latent_attention, attention=causal)
    got = jax.jit(jax.grad(functools.partial(loss, ours), (0, 1, 2)))(q, k, v)
    want = jax.jit(jax.grad(functools.partial(loss, plain), (0, 1, 2)))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    both = tj.expanded_latent_attention(q, k, v, attention=causal, return_residual=True)
    assert both[0].shape == v.shape
    assert both[1].shape == (1, 12, 2)


# What is not finite -------------------------------------------------------------------------------


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("what", ["latent", "rope"])
def test_nan_reaches_who_sees_it_and_nobody_else(kv_dtype, what):
    """One bad token of one sequence: queries before it, or with a window past it, see nothing."""
    value = jnp.nan if kv_dtype == "turbo4" else jnp.inf
    latent, rope = normal(1, (2, 40, LATENT)), normal(2, (2, 40, ROPE))
    if what == "latent":
        latent = latent.at[0, 37, 5].set(value)
    else:
        rope = rope.at[0, 37, 5].set(value)
    tables, start = jnp.asarray([[2, 0, 1], [5, 3, 4]]), jnp.zeros(2, jnp.int32)
    pool = paged.init_latent_pages(6, 16, LATENT, ROPE, kv_dtype=kv_dtype, dtype=jnp.float32)
    pool = paged.append_latents(pool, latent, rope, tables, start)
    out, lse = attend(
        *queries(2, 5),
        pool,
        tables,
        start + 40,
        scale=SCALE,
        local_window_size=(1, 0),
        return_residual=True,
    )
    # Queries are at 35 to 39, of which 37 and 38 see the token.
    want = np.zeros((2, 5, HEADS), bool)
    want[0, 2:4] = True
    np.testing.assert_array_equal(np.isnan(lse), want)
    np.testing.assert_array_equal(np.isnan(out), np.repeat(want[..., None], LATENT, -1))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_an_infinite_rotary_key_is_stored_as_nan(kv_dtype):
    """As infinity it could score ``-inf`` in a kernel, as if the token were not there."""
    latent, rope = normal(1, (1, 5, LATENT)), normal(2, (1, 5, ROPE)).at[0, 3, 2].set(-jnp.inf)
    tables, start = jnp.asarray([[0]]), jnp.zeros(1, jnp.int32)
    pool = paged.init_latent_pages(1, 16, LATENT, ROPE, kv_dtype=kv_dtype, dtype=jnp.float32)
    pool = paged.append_latents(pool, latent, rope, tables, start)
    want = rope.at[0, 3, 2].set(jnp.nan)
    np.testing.assert_array_equal(pool.rope[0, :5], want[0])


def test_a_query_that_is_nan():
    pool, tables = filled("turbo4", LENGTHS)
    latent, rope = queries(4, 3)
    latent, rope = latent.at[0, 1, 2, 3].set(jnp.nan), rope.at[1, 2, 0, 0].set(jnp.nan)
    lengths = jnp.asarray(LENGTHS)
    _, lse = attend(latent, rope, pool, tables, lengths, scale=SCALE, return_residual=True)
    want = np.zeros(lse.shape, bool)
    want[0, 1, 2] = want[1, 2, 0] = True
    np.testing.assert_array_equal(np.isnan(lse), want)


def test_what_cannot_be_read_is_nan_under_jit_and_an_error_outside():
    pool, tables = filled("fp8_e4m3", LENGTHS)
    query, lengths = queries(4, 1), jnp.asarray(LENGTHS)
    broken = tables.copy()
    broken[0, 3] = -1
    out = attend(*query, pool, broken, lengths, scale=SCALE)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], attend(*query, pool, tables, lengths, scale=SCALE)[1:])
    with pytest.raises(ValueError, match=r"block_tables\[0, 3\]=-1 is needed"):
        paged.latent_attention(*query, pool, broken, lengths, scale=SCALE)
    # Not where a window is past it.
    window = attend(*query, pool, broken, lengths, scale=SCALE, local_window_size=(9, 0))
    assert np.isfinite(window).all()


# Transforms ---------------------------------------------------------------------------------------


def test_mapped_over_pools():
    pool, tables = filled("turbo4", (40, 5))
    both = jax.tree.map(lambda x: jnp.stack([x, x]), pool)
    query, lengths = queries(2, 1), jnp.asarray((40, 5))
    one = functools.partial(paged.latent_attention, scale=SCALE)
    out = jax.jit(jax.vmap(lambda p: one(*query, p, tables, lengths)))(both)
    want = one(*query, pool, tables, lengths)
    np.testing.assert_allclose(out[1], want, atol=1e-6)


def test_neighbours_and_places_change_no_bit():
    pool, tables = filled("fp8_e4m3", (300, 17))
    query, lengths = queries(2, 2), jnp.asarray((300, 17))
    both = attend(*query, pool, tables, lengths, scale=SCALE)
    # The other sequence is empty, and the pool in another order.
    order = np.random.default_rng(0).permutation(pool.num_pages)
    moved = jax.tree.map(lambda x: x[order] if x.ndim else x, pool)
    where = np.where(tables < 0, -1, np.argsort(order)[tables])
    alone = attend(*query, moved, where, jnp.asarray((0, 17)), scale=SCALE)
    np.testing.assert_array_equal(alone[1], both[1])


def test_has_no_gradient():
    pool, tables = filled("bfloat16", LENGTHS)
    query, lengths = queries(4, 1), jnp.asarray(LENGTHS)

    def loss(q):
        return paged.latent_attention(q, query[1], pool, tables, lengths, scale=SCALE).sum()

    with pytest.raises(NotImplementedError, match="latent_attention has no gradient"):
        jax.grad(loss)(query[0])


# Refusals -----------------------------------------------------------------------------------------


def _call(**changes):
    pool, tables = filled("bfloat16", LENGTHS)
    latent, rope = queries(4, 2)
    given = {"query_latent": latent, "query_rope": rope, "cache": pool, "block_tables": tables}
    given |= {"lengths": jnp.asarray(LENGTHS), "scale": SCALE, **changes}
    return paged.latent_attention(**given)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cache": {}}, TypeError, "cache is a dict, must be a LatentPages"),
        ({"query_latent": normal(0, (4, 2, 4, 32))}, ValueError, r"must be \[B, T, N, 64\]"),
        ({"query_rope": normal(0, (4, 2, 4, 64))}, ValueError, r"must be \[B, T, N, 16\]"),
        ({"query_rope": normal(0, (4, 1, 4, 16))}, ValueError, "must have the same"),
        ({"query_latent": normal(0, (4, 0, 4, 64))}, ValueError, "no axis empty"),
        ({"query_rope": normal(0, (4, 2, 4, 16), jnp.bfloat16)}, TypeError, "must equal cache"),
        ({"scale": None}, TypeError, "scale is None, must be a number"),
        ({"scale": float("nan")}, ValueError, "scale=nan must be finite"),
        ({"lengths": jnp.asarray([1.0, 1, 1, 1])}, TypeError, "must be an integer type"),
        ({"lengths": jnp.asarray([400, 1, 1, 1])}, ValueError, "must be between 0 and"),
        ({"query_seq_lengths": jnp.asarray([3, 1, 1, 1])}, ValueError, "between 0 and 2"),
        ({"local_window_size": -1}, ValueError, "local_window_size=-1"),
        ({"block_tables": jnp.zeros((3, 2), jnp.int32)}, ValueError, r"must be \[4, max_pages\]"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' must be"),
        ({"implementation": "triton"}, NotImplementedError, "has no implementation='triton'"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "mosaic_gpu: "),
    ],
)
def test_refusals(changes, error, words):
    with pytest.raises(error, match=words):
        _call(**changes)


def test_refusals_of_a_contiguous_cache():
    cache = tj.init_latent_cache(2, 8, LATENT, ROPE, dtype=jnp.float32)
    with pytest.raises(TypeError, match="must be a LatentCache"):
        tj.latent_attention(*queries(2, 1), filled("bfloat16", LENGTHS)[0], scale=SCALE)
    with pytest.raises(ValueError, match="must have 2 sequences"):
        tj.latent_attention(*queries(3, 1), cache, scale=SCALE)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 4, 2, 24), (1, 4, 2, 24), (1, 4, 2, 32)), "must have 1 to 24 channels"),
        (((1, 4, 2, 24), (1, 4, 2, 24), (1, 3, 2, 16)), "but for the last axis"),
        (((1, 4, 24), (1, 4, 2, 24), (1, 4, 2, 16)), r"must be \[B, T, N, H\]"),
    ],
)
def test_refusals_of_the_expanded_form(shapes, words):
    with pytest.raises(ValueError, match=words):
        tj.expanded_latent_attention(*(normal(0, s) for s in shapes), attention=causal)


def test_what_the_kernel_takes(monkeypatch):
    """Chosen where it can run; the widths it was not written for are refused in words."""
    from turbojax.caches.latent import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "_has_kernel", lambda: True)
    monkeypatch.setattr(mosaic_gpu, "needs_hopper", lambda: None)

    def select(name, **sizes):
        pool = jax.eval_shape(lambda: paged.init_latent_pages(4, 64, **sizes))
        shape = (2, 1, 16)
        return REGISTRY.select(
            name,
            query_latent=jax.ShapeDtypeStruct((*shape, pool.latent_dim), pool.dtype),
            query_rope=jax.ShapeDtypeStruct((*shape, pool.rope_dim), pool.dtype),
            cache=pool,
            block_tables=jax.ShapeDtypeStruct((2, 2), jnp.int32),
            options=Options(is_causal=True, scale=1.0),
        ).name

    assert {select(None, kv_dtype=kv_dtype) for kv_dtype in FORMATS} == {"mosaic_gpu"}
    assert select(None, latent_dim=256) == select(None, dtype=jnp.float32) == "xla"
    with pytest.raises(NotImplementedError, match="latent_dim=256 and rope_dim=64 must be 512"):
        select("mosaic_gpu", latent_dim=256)
    with pytest.raises(NotImplementedError, match="must be bfloat16 or float16"):
        select("mosaic_gpu", dtype=jnp.float32)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_kernel_is_lowered_for_what_the_op_gives_it(monkeypatch, kv_dtype):
    from turbojax.caches.latent import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "needs_hopper", lambda: None)
    pool = jax.eval_shape(lambda: paged.init_latent_pages(8, 64, kv_dtype=kv_dtype))
    attend = functools.partial(
        paged.latent_attention,
        scale=SCALE,
        local_window_size=(99, 0),
        implementation="mosaic_gpu",
        return_residual=True,
    )
    queries = (jax.ShapeDtypeStruct((2, 3, 16, n), jnp.bfloat16) for n in (512, 64))
    tables, lengths = (jax.ShapeDtypeStruct(n, jnp.int32) for n in ((2, 4), (2,)))
    traced = jax.jit(attend).trace(*queries, pool, tables, lengths)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("turbojax_latent_hopper") > 0


def test_caps_of_scores_are_refused():
    from turbojax.caches.latent import attend_pages

    pool, tables = filled("bfloat16", LENGTHS)
    options = Options(is_causal=True, scale=1.0, logits_soft_cap=3.0)
    with pytest.raises(NotImplementedError, match="must be None"):
        attend_pages(*queries(4, 1), pool, tables, jnp.asarray(LENGTHS), options=options)


def test_a_cache_is_a_pytree_of_its_arrays():
    pool, _ = filled("turbo4", LENGTHS)
    assert len(jax.tree.leaves(pool)) == 4
    assert dataclasses.replace(pool, seed=1).rotation.head_dim == LATENT


def _cache_of(latent, rope):
    cache = tj.init_latent_cache(2, 80, LATENT, ROPE, dtype=jnp.float32)
    return tj.append_latents(cache, latent, rope)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("window", [None, (45, 0)])
def test_merged_parts_are_the_whole(window):
    """Two caches with the positions of their first tokens, joined; the second holds the newest."""
    latent, rope, query = normal(1, (2, 70, LATENT)), normal(2, (2, 70, ROPE)), queries(2, 3)
    options = {"scale": SCALE, "local_window_size": window, "return_residual": True}
    options["output_dtype"] = jnp.float32
    want = tj.latent_attention(*query, _cache_of(latent, rope), **options)
    parts = [
        tj.latent_attention(
            *query,
            _cache_of(latent[:, part], rope[:, part]),
            query_offset=67,
            key_offset=part.start,
            **options,
        )
        for part in (slice(0, 40), slice(40, 70))
    ]
    got = tj.merge_attention(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_query_sees_up_to_its_own_position():
    """With an offset in the middle of the cache: what a shorter cache gives its newest token."""
    latent, rope, query = normal(1, (2, 70, LATENT)), normal(2, (2, 70, ROPE)), queries(2, 1)
    options = {"scale": SCALE, "return_residual": True}
    got = tj.latent_attention(*query, _cache_of(latent, rope), query_offset=29, **options)
    want = tj.latent_attention(*query, _cache_of(latent[:, :30], rope[:, :30]), **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    nothing = tj.latent_attention(
        *query, _cache_of(latent, rope), query_offset=5, key_offset=6, **options
    )
    assert not np.any(nothing[0])
    assert np.all(np.isneginf(nothing[1]))


def test_sinks():
    latent, rope, query = normal(1, (2, 70, LATENT)), normal(2, (2, 70, ROPE)), queries(2, 3)
    cache, sinks = _cache_of(latent, rope), np.linspace(-2, 5, HEADS).astype(np.float32)
    options = {"scale": SCALE, "return_residual": True, "query_seq_lengths": jnp.array([3, 1])}
    out, lse = (np.asarray(x, np.float64) for x in tj.latent_attention(*query, cache, **options))
    got = tj.latent_attention(*query, cache, sinks=sinks, **options)
    real = (np.arange(3) < np.array([[3], [1]]))[..., None]
    want = np.where(real, np.logaddexp(lse, sinks), -np.inf)
    np.testing.assert_allclose(got[1], want, rtol=1e-6)
    share = np.where(real, np.exp(np.where(real, lse, 0) - np.where(real, want, 0)), 0)
    np.testing.assert_allclose(got[0], out * share[..., None], rtol=1e-5, atol=1e-6)


def test_options_that_the_kernel_lacks():
    query, cache = queries(1, 1), tj.init_latent_cache(1, 8, LATENT, ROPE, dtype=jnp.float32)
    for given in ({"query_offset": 3}, {"output_dtype": jnp.float32}):
        (name,) = given
        with pytest.raises(NotImplementedError, match=f"mosaic_gpu: it has no {name}"):
            tj.latent_attention(*query, cache, scale=1.0, implementation="mosaic_gpu", **given)
    with pytest.raises(ValueError, match="query_offset=-1 must be between"):
        tj.latent_attention(*query, cache, scale=1.0, query_offset=-1)
