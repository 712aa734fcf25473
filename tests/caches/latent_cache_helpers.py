"""Latent attention: a float64 oracle over what is stored, and caches to ask it about."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention.paged_helpers import normal, place
from tests.oracles import paged as oracle
from tests.oracles.polar import signs
from turbojax import paged

UNIT = 2.0**-24
LATENT, ROPE, HEADS, SCALE = 64, 16, 4, 0.2
FORMATS = ("bfloat16", "fp8_e4m3", "turbo4")
_STATIC = ("scale", "local_window_size", "implementation", "return_residual")

attend = jax.jit(paged.latent_attention, static_argnames=_STATIC)
append = jax.jit(paged.append_latents)


def content(latent, scale, kv_dtype, seed=0):
    """Latents that arrays ``[..., W]`` and ``[...]`` stand for, in float64."""
    if kv_dtype == "turbo4":
        codes = oracle.unpacked(latent, 4, 2 * latent.shape[-1])
        return oracle.decoded(codes, np.asarray(scale), signs(codes.shape[-1], seed))
    latent = np.asarray(latent).astype(np.float64)
    return latent if scale is None else latent * np.asarray(scale, np.float64)[..., None]


@functools.cache
def filled(kv_dtype, lengths, page_size=16, dtype="float32", seed=0):
    """A pool that holds these sequences among pages of NaN, and their tables."""
    needed = sum(-(-n // page_size) for n in lengths)
    pool = paged.init_latent_pages(
        needed + 2, page_size, LATENT, ROPE, kv_dtype=kv_dtype, dtype=dtype, seed=seed
    )
    bad = pool.scale if pool.scale is None else jnp.full_like(pool.scale, jnp.nan)
    latent = pool.latent if kv_dtype == "turbo4" else jnp.full_like(pool.latent, jnp.nan)
    rope = jnp.full_like(pool.rope, jnp.nan)
    pool = type(pool)(latent, bad, rope, pool.dropped_tokens, kv_dtype, LATENT, pool.dtype, seed)
    tables = place(lengths, page_size, needed + 2)
    longest = max(1, *lengths)
    latents = normal(1, (len(lengths), longest, LATENT), dtype)
    ropes = normal(2, (len(lengths), longest, ROPE), dtype)
    start = jnp.zeros(len(lengths), jnp.int32)
    new = jnp.asarray(lengths, jnp.int32)
    pool = append(pool, latents, ropes, tables, start, new_lengths=new)
    assert int(pool.dropped_tokens) == 0
    return pool, tables


def queries(batch, tokens, dtype=jnp.float32, heads=HEADS):
    return (
        normal(3, (batch, tokens, heads, LATENT), dtype),
        normal(4, (batch, tokens, heads, ROPE), dtype),
    )


def stored(pool, table, length):
    """Latents and rotary keys of one sequence in float64."""
    where = [(table[p // pool.page_size], p % pool.page_size) for p in range(length)]
    pages, slots = np.array(where, int).reshape(-1, 2).T
    scale = None if pool.scale is None else np.asarray(pool.scale)[pages, slots]
    latent = content(np.asarray(pool.latent)[pages, slots], scale, pool.kv_dtype, pool.seed)
    return latent, np.asarray(pool.rope)[pages, slots].astype(np.float64)


def expected(query, latent, rope, scale, first=0):
    """One query's output, log-sum-exp and how far float32 may be from either, by whole vectors.

    A score is a sum of products, each rounded; an exponential makes that a relative error of the
    weight, and weights multiply latents, which a rotation may mix.
    """
    key = np.concatenate([latent, rope], axis=-1)[first:]
    value, q = latent[first:], np.concatenate(query).astype(np.float64)
    score = scale * key @ q
    size = abs(scale) * np.linalg.norm(key, axis=-1) * np.linalg.norm(q)
    top = score.max()
    error = (key.shape[1] + 32) * UNIT * size
    error = error + (np.abs(score - top) + abs(top) + 8 + len(key)) * 4 * UNIT
    p = np.exp(score - top)
    out = p @ value / p.sum()
    spread = p * error @ np.linalg.norm(value, axis=-1)
    spread = spread + (p @ error + 16 * UNIT * p.sum()) * np.linalg.norm(out)
    lse = top + np.log(p.sum())
    return out, lse, spread / p.sum(), error.max() + 4 * UNIT * (1 + abs(lse))


def assert_matches(query, pool, tables, lengths, *, call=attend, real=None, window=None, more=0.0):
    """Held to the oracle; `more` is what an implementation rounds beyond float32, of an output."""
    ql, qr = (np.asarray(x).astype(np.float64) for x in query)
    options = {"scale": SCALE, "local_window_size": window, "return_residual": True}
    if real is not None:
        options["query_seq_lengths"] = jnp.asarray(real, jnp.int32)
    out, lse = call(*query, pool, tables, jnp.asarray(lengths, jnp.int32), **options)
    assert (out.shape, out.dtype) == (ql.shape, query[0].dtype)
    assert (lse.shape, lse.dtype) == (ql.shape[:3], jnp.float32)
    own = 0 if out.dtype == jnp.float32 else float(jnp.finfo(out.dtype).eps)
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse)
    for b, t, h in np.ndindex(*ql.shape[:3]):
        n = ql.shape[1] if real is None else int(real[b])
        position = int(lengths[b]) - n + t
        if t >= n or position < 0:
            assert not out[b, t, h].any()
            assert lse[b, t, h] == -np.inf
            continue
        latent, rope = stored(pool, tables[b], position + 1)
        first = 0 if window is None else max(0, position - window[0])
        query_of = ql[b, t, h], qr[b, t, h]
        want, want_lse, slack, lse_slack = expected(query_of, latent, rope, SCALE, first)
        limit = slack + (own + more) * np.linalg.norm(want)
        assert np.linalg.norm(out[b, t, h] - want) <= limit, (b, t, h)
        assert abs(lse[b, t, h] - want_lse) <= lse_slack + more * (1 + abs(want_lse))
        assert slack <= 1e-2 * np.linalg.norm(want) + 1e-30
