"""Exact caches on a GPU: Hopper's kernel against float64, against pages, and its choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.paged_helpers import equal, normal
from tests.gpu.gpu_helpers import on_hopper
from turbojax.attention.options import Options
from turbojax.caches import paged as paged_attention
from turbojax.caches.exact import api
from turbojax.caches.exact import cache as exact
from turbojax.caches.paged import pool as paged

pytestmark = [pytest.mark.gpu, on_hopper]

STATIC = ("local_window_size", "logits_soft_cap", "implementation")
decode = jax.jit(tj.decode, static_argnames=STATIC)
LENGTHS = (3000, 2049, 700, 33, 1, 0)


@functools.cache
def filled(head_dim, dtype):
    """A cache of `LENGTHS` with two KV heads, NaN past the end of each sequence."""
    room = max(LENGTHS) + 7
    key, value = (normal(i, (len(LENGTHS), room, 2, head_dim), dtype) for i in (1, 2))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    past = (jnp.arange(room)[None] >= lengths[:, None])[..., None, None]
    key, value = (jnp.where(past, jnp.nan, x) for x in (key, value))
    return exact.ExactCache(key, value, lengths, jnp.zeros(len(LENGTHS), jnp.bool_))


CASES = {
    "one query": (128, jnp.bfloat16, 1, 8, {}),
    "a window": (128, jnp.bfloat16, 1, 8, {"local_window_size": (1023, 0)}),
    "a window and several queries": (64, jnp.float16, 3, 8, {"local_window_size": (99, 0)}),
    "256 channels, window and cap": (
        256, jnp.bfloat16, 1, 4, {"local_window_size": (511, 0), "logits_soft_cap": 30.0},
    ),
    "many queries": (128, jnp.float16, 16, 4, {"logits_soft_cap": 5.0}),
    "heads of their own": (256, jnp.float16, 2, 2, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_equals_float64(name):
    head_dim, dtype, tokens, heads, options = CASES[name]
    cache = filled(head_dim, dtype)
    query = normal(3, (len(LENGTHS), tokens, heads, head_dim), dtype)
    out = np.asarray(decode(query, cache, implementation="mosaic_gpu", **options), np.float64)
    position = np.asarray(LENGTHS)[:, None] - tokens + np.arange(tokens)
    where = np.arange(cache.max_length)
    mask = where <= position[..., None]
    if "local_window_size" in options:
        mask &= where >= position[..., None] - options["local_window_size"][0]
    key, value = (np.nan_to_num(np.asarray(x, np.float64)) for x in (cache.key, cache.value))
    want = oracles.plain_attention(
        np.asarray(query, np.float64), key, value, mask=mask,
        logits_soft_cap=options.get("logits_soft_cap"),
    )  # fmt: skip
    seen = position >= 0
    assert not out[~seen].any()
    # Outputs are rounded; what is lost before is far less, of whole vectors.
    error, unit = np.abs(out[seen] - want[seen]), float(jnp.finfo(dtype).eps)
    assert np.all(error <= unit * (np.abs(want[seen]) + 0.02))


def test_bits_are_those_of_pages():
    cache = filled(128, jnp.bfloat16)
    room, lengths = 3008, cache.lengths
    pool = paged.init_paged_cache(len(LENGTHS) * room // 64, 64, 2, 128, kv_dtype="auto")
    tables = jnp.arange(len(LENGTHS) * room // 64, dtype=jnp.int32).reshape(len(LENGTHS), -1)
    pool = paged.append(
        pool, cache.key, cache.value, tables, jnp.zeros_like(lengths), new_lengths=lengths
    )
    query = normal(3, (len(LENGTHS), 2, 8, 128), jnp.bfloat16)
    query = query.at[4, 1].set(query[4, 0])
    options = Options(True, (999, 0), scale=0.1, implementation="mosaic_gpu")
    counts = jnp.minimum(lengths, 2)
    want, _ = paged_attention.attend(query, pool, tables, lengths, counts, options=options)
    got = api.decode(query, cache, options=options)[0]
    # The one before the first token is padding there, at another place.
    equal([got[:4], got[4, 1]], [want[:4], want[4, 0]])


def test_bits_of_rolling_buffers_are_those_of_whole_caches():
    whole, window = filled(128, jnp.bfloat16), (699, 0)
    rolling = exact.append(
        exact.init_cache(len(LENGTHS), 4000, 2, 128, local_window_size=window),
        whole.key,
        whole.value,
        lengths=whole.lengths,
    )
    assert rolling.is_rolling
    query = normal(3, (len(LENGTHS), 4, 8, 128), jnp.bfloat16)
    options = {"local_window_size": window, "implementation": "mosaic_gpu"}
    equal(decode(query, rolling, **options), decode(query, whole, **options))


def test_nan_reaches_what_attends_to_it_and_nothing_else():
    cache = filled(128, jnp.bfloat16)
    options = {"local_window_size": (99, 0), "implementation": "mosaic_gpu"}
    query = normal(3, (len(LENGTHS), 1, 8, 128), jnp.bfloat16)
    clean = decode(query, cache, **options)
    assert np.isfinite(np.asarray(clean, np.float32)).all()
    for position, is_seen in ((2999, True), (2900, True), (2899, False)):
        value = cache.value.at[0, position, 1, 5].set(jnp.nan)
        broken = exact.ExactCache(cache.key, value, cache.lengths, cache.overflowed)
        is_nan = np.isnan(np.asarray(decode(query, broken, **options), np.float32)).any(-1)
        want = np.zeros_like(is_nan)
        want[0, 0, 4:] = is_seen
        np.testing.assert_array_equal(is_nan, want)


def test_it_is_chosen_where_cudnn_cannot():
    cache = filled(128, jnp.bfloat16)
    query = normal(3, (len(LENGTHS), 1, 8, 128), jnp.bfloat16)
    name = "turbojax_paged_hopper"
    assert name not in decode.lower(query, cache).as_text()
    assert name in decode.lower(query, cache, local_window_size=(99, 0)).as_text()
    assert name in decode.lower(query, cache, logits_soft_cap=9.0).as_text()
