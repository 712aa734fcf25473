"""Caches and pages of latents: what is stored; overflow, refusals, files, moved pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from tests.attention.paged_helpers import normal
from tests.caches.latent_cache_helpers import FORMATS, LATENT, ROPE, append, content, filled, stored
from tests.oracles import paged as oracle
from tests.oracles.polar import signs
from turbojax import caches as kv
from turbojax import models, paged
from turbojax.caches.latent.cache import as_pages

LENGTHS = (37, 1, 0)
START = jnp.zeros(3, jnp.int32)


@functools.cache
def tokens(dtype="float32"):
    latent = normal(1, (3, 37, LATENT), dtype) * jnp.exp(normal(5, (3, 37, 1), dtype))
    # One of zeros, and one whose largest value is far larger than the others.
    latent = latent.at[0, 3].set(0).at[0, 4, 7].set(3000)
    return latent, normal(2, (3, 37, ROPE), dtype)


def empty(kv_dtype, dtype=jnp.float32, **given):
    return tj.init_latent_cache(3, 40, LATENT, ROPE, kv_dtype=kv_dtype, dtype=dtype, **given)


def e4m3(x):
    """Codes and scales by definition, rounded once, from float32 quotients."""
    x = np.asarray(x).astype(np.float32)
    scale = np.abs(x).max(-1) * np.float32(1 / 448)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    return (x * (np.float32(1) / scale)[..., None]).clip(-448, 448), scale


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_stored(dtype):
    """Codes and scales are those of independent oracles; errors are what the formats promise."""
    latent, rope = tokens(dtype)
    exact = np.asarray(latent).astype(np.float64)[0]
    length = np.linalg.norm(exact, axis=-1)
    for kv_dtype in FORMATS:
        cache = tj.append_latents(empty(kv_dtype, dtype), latent, rope, lengths=jnp.array(LENGTHS))
        cache.validate()
        data, scale = np.asarray(cache.latent[0, :37]), cache.scale
        np.testing.assert_array_equal(cache.rope[0, :37], rope[0])
        if kv_dtype == "bfloat16":
            assert scale is None
            np.testing.assert_array_equal(data, latent[0])
            continue
        scale = np.asarray(scale[0, :37])
        got = content(data, scale, kv_dtype)
        np.testing.assert_allclose(tj.dequantize_latents(cache)[0][0, :37], got, atol=1e-3)
        if kv_dtype == "fp8_e4m3":
            quotients, scales = e4m3(latent[0])
            np.testing.assert_array_equal(scale, scales)
            codes = quotients.astype(ml_dtypes.float8_e4m3fn)
            # A reciprocal may be another last bit: so may a code next to a tie.
            assert np.mean(data.astype(np.float32) != codes.astype(np.float32)) < 1e-3
            # Half a unit of three bits of mantissa, or of the subnormal numbers.
            assert (np.abs(got - exact) <= np.abs(exact) / 15.9 + scales[:, None] * 2**-10).all()
        else:
            codes, packed, norms = oracle.encoded(latent[0], signs(LATENT, 0))
            np.testing.assert_allclose(scale, norms.astype(np.float32), rtol=2**-10)
            whole = length > 0
            assert np.mean(data[whole] != packed[whole]) < 1e-3
            # Lloyd and Max lose 0.95 % of a normal vector's square; 64 channels vary around it.
            loss = ((got - exact) ** 2).sum(-1)[whole] / length[whole] ** 2
            assert np.median(loss) < 0.011
            assert loss.max() < 0.035
            np.testing.assert_allclose(np.linalg.norm(got, axis=-1), length, rtol=0.01)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_bits_depend_on_nothing_but_the_token(kv_dtype):
    """At once, or in pieces under `jit`; in a cache, or in pages of whatever order."""
    latent, rope = tokens()
    lengths = jnp.array([37, 20, 30])
    whole = tj.append_latents(empty(kv_dtype), latent, rope, lengths=lengths)
    pieces, extend = empty(kv_dtype), jax.jit(tj.append_latents)
    for first in range(0, 40, 8):
        part = jnp.pad(latent, ((0, 0), (0, 3), (0, 0)))[:, first : first + 8]
        rotated = jnp.pad(rope, ((0, 0), (0, 3), (0, 0)))[:, first : first + 8]
        pieces = extend(pieces, part, rotated, lengths=jnp.clip(lengths - first, 0, 8))
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)
    pool = paged.init_latent_pages(9, 16, LATENT, ROPE, kv_dtype=kv_dtype, dtype=jnp.float32)
    tables = jnp.array([[8, 1, 2], [0, 7, -1], [3, 4, -1]])
    pool = append(pool, latent, rope, tables, START, new_lengths=lengths)
    for x, y in zip(jax.tree.leaves(pool.tokens), jax.tree.leaves(whole.tokens), strict=True):
        for b, n in enumerate(lengths):
            paged_rows = x[tables[b, : -(-n // 16)]].reshape(-1, *x.shape[2:])
            np.testing.assert_array_equal(paged_rows[:n], y[b, :n])
    latents, ropes = paged.gather_latents(pool, tables, lengths)
    others, rotated = tj.dequantize_latents(whole)
    np.testing.assert_allclose(latents[:, :40], others, atol=1e-3)
    np.testing.assert_array_equal(ropes[:, :40], rotated)
    view, of = as_pages(whole)
    np.testing.assert_allclose(
        paged.gather_latents(view, of, lengths)[0][:, :40], others, atol=1e-3
    )


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_is_not_finite_stays_so(kv_dtype):
    latent, rope = tokens()
    latent = latent.at[0, 2, 9].set(jnp.inf).at[0, 5, 0].set(jnp.nan)
    rope = rope.at[0, 7, 1].set(-jnp.inf)
    cache = tj.append_latents(empty(kv_dtype), latent, rope)
    latents, ropes = tj.dequantize_latents(cache)
    bad = np.flatnonzero(~np.isfinite(latents[0, :37]).all(-1))
    assert bad.tolist() == [2, 5]
    assert np.flatnonzero(~np.isfinite(ropes[0]).all(-1)).tolist() == [7]


def test_overflow_is_an_error_outside_jit_and_reported_under_it():
    latent, rope = tokens()
    cache = tj.append_latents(empty("fp8_e4m3"), latent, rope, lengths=jnp.array([37, 30, 0]))
    new = latent[:, :8], rope[:, :8]
    with pytest.raises(ValueError, match=r"would give lengths \[45, 38, 8\], which must be at mos"):
        tj.append_latents(cache, *new)
    full = jax.jit(tj.append_latents)(cache, *new)
    assert full.lengths.tolist() == [40, 38, 8]
    assert full.overflowed.tolist() == [True, False, False]
    want = tj.append_latents(cache, *new, lengths=jnp.array([3, 8, 8]))
    np.testing.assert_array_equal(tj.dequantize_latents(full)[0], tj.dequantize_latents(want)[0])
    # No row past `max_length` is written, though there is one.
    np.testing.assert_array_equal(full.latent[:, 40:].astype(jnp.float32), 0)


def test_tokens_without_a_page_are_errors_outside_jit_and_counted_under_it():
    latent, rope = tokens()
    pool = paged.init_latent_pages(4, 16, LATENT, ROPE, kv_dtype="turbo4", dtype=jnp.float32)
    tables = jnp.array([[0, 9], [1, -1], [2, -1]])
    new = pool, latent[:, :20], rope[:, :20], tables, START
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\]=9 is needed"):
        paged.append_latents(*new)
    assert int(append(*new).dropped_tokens) == 12
    shared = jnp.array([[0, -1], [0, -1], [3, -1]])
    with pytest.raises(ValueError, match="two tokens would be written to slot 0 of page 0"):
        paged.append_latents(pool, latent[:, :9], rope[:, :9], shared, START)


def test_latents_too_long_for_codes():
    latent, rope = tokens()
    long = latent.at[0, 1].set(9e3)
    with pytest.raises(ValueError, match=r"latent\[0, 1\] has length 72000"):
        tj.append_latents(empty("turbo4"), long, rope)
    # Not of padding, and with a scale of its own every finite latent fits.
    tj.append_latents(empty("turbo4"), long, rope, lengths=jnp.array([1, 37, 37]))
    tj.append_latents(empty("fp8_e4m3"), long * 1e30, rope)
    cache = jax.jit(tj.append_latents)(empty("turbo4"), long, rope)
    assert np.flatnonzero(np.isnan(cache.scale[0])).tolist() == [1]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "turbo4"])
def test_pages_are_copied_and_moved(kv_dtype):
    pool, tables = filled(kv_dtype, (37, 5))
    spare = sorted(set(range(pool.num_pages)) - set(tables[tables >= 0].tolist()))
    copied = paged.copy_pages(pool, jnp.array([tables[0, 1], -1]), jnp.array([spare[0], spare[1]]))
    moved = tables.copy()
    moved[0, 1] = spare[0]
    same(stored(copied, moved[0], 37), stored(pool, tables[0], 37))
    held = paged.read_pages(pool, jnp.asarray(tables[0]))
    fresh = jax.tree.map(jnp.zeros_like, pool)
    back = paged.write_pages(fresh, jnp.asarray(tables[0]), jax.device_get(held))
    same(stored(back, tables[0], 37), stored(pool, tables[0], 37))
    with pytest.raises(ValueError, match="must have"):
        paged.write_pages(pool, jnp.array([0]), {"latent": held["latent"]})


def test_sizes():
    pools = {
        f: paged.init_latent_pages(4, 64, kv_dtype=f).token_bytes for f in ("bfloat16", *FORMATS)
    }
    assert pools == {"bfloat16": 1152, "fp8_e4m3": 644, "turbo4": 388}
    pool = paged.init_latent_pages(4, 64, kv_dtype="turbo4")
    assert pool.page_bytes * 4 + 4 == pool.nbytes
    assert pool.compression_ratio == pytest.approx(1152 / 388)
    cache = tj.init_latent_cache(2, 100, kv_dtype="turbo4")
    assert (cache.room, cache.max_length, cache.head_dim, cache.num_kv_heads) == (128, 100, 576, 1)
    pool.validate()
    with pytest.raises(ValueError, match="cache.scale is None, must be"):
        dataclasses.replace(pool, scale=None).validate()
    with pytest.raises(ValueError, match="dropped_tokens=-1 must not be negative"):
        dataclasses.replace(pool, dropped_tokens=jnp.int32(-1)).validate()
    with pytest.raises(ValueError, match=r"lengths=\[101, 0\] must be between 0 and 100"):
        dataclasses.replace(cache, lengths=jnp.array([101, 0])).validate()
    with pytest.raises(ValueError, match="has no rotation"):
        _ = empty("bfloat16").rotation


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"kv_dtype": "auto"}, ValueError, "kv_dtype='auto' must be one of bfloat16, fp8_e4m3"),
        ({"page_size": 48}, ValueError, "page_size=48 must be one of 16, 32, 64, 128"),
        ({"latent_dim": 0}, ValueError, "latent_dim=0 must be at least 1"),
        ({"rope_dim": 1.5}, TypeError, "rope_dim=1.5 must be an integer"),
        ({"latent_dim": 72, "kv_dtype": "turbo4"}, ValueError, "head_dim=72 must be a power of"),
        ({"dtype": jnp.float64}, TypeError, "must be bfloat16, float16 or float32"),
        ({"seed": 1}, ValueError, "seed=1 has no use with kv_dtype='bfloat16'"),
        ({"seed": -1, "kv_dtype": "turbo4"}, ValueError, "must not be negative"),
    ],
)
def test_pools_that_cannot_be(given, error, words):
    with pytest.raises(error, match=words):
        paged.init_latent_pages(**{"num_pages": 4, "page_size": 16, **given})


@pytest.mark.parametrize(
    ("latent", "rope", "error", "words"),
    [
        ((3, 5, 32), (3, 5, ROPE), ValueError, r"latent.shape=\(3, 5, 32\) must be \[B, T, 64\]"),
        ((3, 5, LATENT), (3, 5, 8), ValueError, r"must be \[B, T, 16\]"),
        ((3, 5, LATENT), (3, 4, ROPE), ValueError, "must have the same"),
        ((3, 0, LATENT), (3, 0, ROPE), ValueError, "no axis empty"),
        ((2, 5, LATENT), (2, 5, ROPE), ValueError, "must have 3 sequences"),
    ],
)
def test_tokens_that_do_not_fit(latent, rope, error, words):
    with pytest.raises(error, match=words):
        tj.append_latents(empty("bfloat16"), normal(0, latent), normal(0, rope))


def test_other_kinds_and_dtypes_are_refused():
    latent, rope = tokens()
    with pytest.raises(TypeError, match="cache is a dict, must be a LatentCache"):
        tj.append_latents({}, latent, rope)
    with pytest.raises(TypeError, match="must be a PagedCache or a LatentPages"):
        paged.read_pages(empty("bfloat16"), jnp.array([0]))
    with pytest.raises(TypeError, match=r"latent.dtype=bfloat16 must equal cache.dtype=float32"):
        tj.append_latents(empty("bfloat16"), latent.astype(jnp.bfloat16), rope)
    with pytest.raises(NotImplementedError, match="append has no gradient"):
        jax.grad(lambda x: tj.append_latents(empty("turbo4"), x, rope).scale.sum())(latent)


# As a layer's cache -------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", kv.LATENT_CACHE_NAMES)
def test_as_a_layers_cache(kind, tmp_path, monkeypatch):
    """A prompt, in chunks too, gives what its tokens give one by one; files; parts of a batch."""
    latent, rope = (x[:2, :12] for x in tokens())
    query = normal(3, (2, 12, 4, LATENT)), normal(4, (2, 12, 4, ROPE))
    options = kv.AttentionOptions(scale=0.2, local_window_size=9)
    sizes = {"dtype": jnp.float32, "rope_dim": ROPE}
    cache = kv.init_layer_cache(2, 16, 1, LATENT + ROPE, kind=kind, **sizes)
    lengths = jnp.array([12, 5])

    def prompt():
        attend = kv.attend_prompt(lengths)
        return kv.attend_latents(attend, query, latent, rope, cache, options)

    out, held = prompt()
    monkeypatch.setattr("turbojax.caches.latent.kind._QUERY_ROWS", 40)
    np.testing.assert_allclose(prompt()[0], out, atol=1e-6)
    single, outs = cache, []
    step = jax.jit(
        lambda q, x, y, c: kv.attend_latents(kv.attend_new_tokens(), q, x, y, c, options)
    )
    for t in range(12):
        now = slice(t, t + 1)
        new, single = step(
            (query[0][:, now], query[1][:, now]), latent[:, now], rope[:, now], single
        )
        outs.append(new)
    alone = jnp.concatenate(outs, axis=1)
    np.testing.assert_allclose(alone[0], out[0], atol=1e-5)
    np.testing.assert_allclose(alone[1, :5], out[1, :5], atol=1e-5)
    models.save_cache(tmp_path / "cache.safetensors", held)
    loaded, _ = models.load_cache(tmp_path / "cache.safetensors")
    for a, b in zip(tj.dequantize_latents(loaded), tj.dequantize_latents(held), strict=True):
        np.testing.assert_array_equal(a, b)
    part = kv.kind_of(held).take(held, 1, 1)
    assert part.lengths.tolist() == [5]
    np.testing.assert_array_equal(kv.kind_of(held).put(held, part, 1).latent, held.latent)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "latent"}, "rope_dim=None must be an integer for a cache of kind 'latent'"),
        ({"kind": "exact", "rope_dim": 8}, "rope_dim=8 must be None for a cache of kind 'exact'"),
        ({"kind": "latent", "rope_dim": 80}, "rope_dim=80 must be at least 1 and less than"),
        ({"kind": "latent", "rope_dim": 8, "num_kv_heads": 2}, "num_kv_heads=2 must be 1"),
        ({"kind": "latents"}, "cache='latents' must be"),
    ],
)
def test_layers_caches_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=words):
        kv.init_layer_cache(2, 16, **{"num_kv_heads": 1, "head_dim": 80, **given})
    with pytest.raises(NotImplementedError, match="keeps all tokens"):
        kv.init_layer_cache(2, 16, 1, 80, kind="latent", rope_dim=16, local_window_size=4)


def test_sinks_are_refused():
    cache = kv.init_layer_cache(2, 16, 1, 80, kind="latent", rope_dim=16, dtype=jnp.float32)
    attend = kv.attend_new_tokens()
    tokens = normal(0, (2, 1, 1, 16)), normal(0, (2, 1, 1, 64))
    with pytest.raises(NotImplementedError, match="cannot attend with sinks"):
        attend(normal(0, (2, 1, 4, 80)), *tokens, cache, sinks=jnp.zeros(4))
    with pytest.raises(TypeError, match="must hold keys and values of heads"):
        tj.decode(normal(0, (2, 1, 4, 80)), cache)


def test_keys_and_values_of_several_heads_are_refused():
    cache = kv.init_layer_cache(2, 16, 1, 80, kind="latent", rope_dim=16, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"key.shape=\(2, 1, 2, 16\) must be \[B, T, 1, ch"):
        kv.kind_of(cache).append(cache, normal(0, (2, 1, 2, 16)), normal(0, (2, 1, 2, 64)))
