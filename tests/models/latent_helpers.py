"""Pages of latents for tests of their kernels, and attention to them in float64."""

import dataclasses
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.mosaic.hopper.latent import kernel
from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec
from turbojax import polar

LATENT, ROPE = 512, 64
SCALE = 0.07
FORMATS = ("bfloat16", "float16", "fp8_e4m3", "turbo4")


@dataclasses.dataclass
class Case:
    """What a kernel is given, and what it stands for, in float64.

    Attributes:
      arrays: arguments of `kernel.attend` but the settings.
      latent: ``[B][length, 512]``.
      rope: ``[B][length, 64]``.
    """

    arrays: tuple
    latent: list
    rope: list


def codec_of(name):
    if name == "turbo4":
        table, middle, step = polar.integer_centroids(4)
        return Codec(tuple(table), middle, step / math.sqrt(LATENT))
    return Codec() if name == "fp8_e4m3" else None


def stored(name, rng, shape, dtype):
    """Latents in a format: data, scale, and what they stand for."""
    x = rng.standard_normal((*shape, LATENT)).astype(np.float32)
    if name == "fp8_e4m3":
        scale = np.abs(x).max(-1) / 448
        data = (x / scale[..., None]).astype(ml_dtypes.float8_e4m3fn)
        return data, scale, data.astype(np.float64) * scale[..., None]
    if name == "turbo4":
        codec = codec_of(name)
        codes = rng.integers(0, 16, (*shape, LATENT), dtype=np.uint8)
        scale = rng.uniform(0.5, 2, shape).astype(np.float32) * np.float32(math.sqrt(LATENT))
        numbers = (np.asarray(codec.centroids) - codec.middle) * codec.unit
        data = codes[..., ::2] | (codes[..., 1::2] << 4)
        return data, scale, numbers[codes] * scale[..., None]
    data = x.astype(dtype)
    return data, None, data.astype(np.float64)


def make(name, lengths, *, heads=16, tokens=1, page_size=64, query_lengths=None, extra=2, seed=0):
    """A case: pages in random order, some of nobody's, full of NaN, and NaN past each end."""
    rng = np.random.default_rng(seed)
    dtype = ml_dtypes.bfloat16 if name != "float16" else np.float16
    batch, most = len(lengths), max(1, -(-max(lengths) // page_size)) + extra
    pool = sum(-(-max(n, 0) // page_size) for n in lengths) + 1
    data, scale, latent = stored(name, rng, (pool, page_size), dtype)
    rope = rng.standard_normal((pool, page_size, ROPE)).astype(dtype)
    order, at = rng.permutation(pool), 1
    tables = np.full((batch, most), order[0], np.int32)
    known = ([], [])
    is_hidden = np.ones((pool, page_size), bool)
    for b, length in enumerate(lengths):
        count = -(-max(length, 0) // page_size)
        tables[b, :count] = order[at : at + count]
        at += count
        own = tables[b, :count]
        for found, x in zip(known, (latent, rope.astype(np.float64)), strict=True):
            found.append(x[own].reshape(-1, x.shape[-1])[: max(length, 0)])
        is_hidden[own] = (np.arange(count * page_size) >= length).reshape(count, page_size)
    rope[is_hidden] = np.nan
    if scale is None:
        data[is_hidden] = np.nan
    else:
        scale[is_hidden] = np.nan
    q = rng.standard_normal((batch, tokens, heads, LATENT)).astype(dtype)
    q_rope = rng.standard_normal((batch, tokens, heads, ROPE)).astype(dtype)
    arrays = (q, q_rope, data, scale, rope, tables, lengths, query_lengths)
    arrays = [None if x is None else jnp.asarray(x) for x in arrays]
    arrays[5:] = [None if x is None else x.astype(jnp.int32) for x in arrays[5:]]
    return Case(tuple(arrays), *known)


def oracle(case, *, window=None, scale=SCALE):
    """Outputs and log-sum-exps in float64."""
    q, q_rope, *_, lengths, real = (np.asarray(x) if x is not None else None for x in case.arrays)
    q, q_rope = q.astype(np.float64), q_rope.astype(np.float64)
    batch, tokens, heads, _ = q.shape
    real = np.full(batch, tokens) if real is None else real
    out, lse = np.zeros(q.shape), np.full((batch, tokens, heads), -np.inf)
    for b in range(batch):
        if lengths[b] < 0:
            out[b], lse[b] = np.nan, np.nan
            continue
        for t in range(real[b]):
            last = lengths[b] - real[b] + t
            first = 0 if window is None else max(last - window, 0)
            x, r = case.latent[b][first : last + 1], case.rope[b][first : last + 1]
            if last < 0 or not len(x):
                continue
            scores = (q[b, t] @ x.T + q_rope[b, t] @ r.T) * scale
            top = scores.max(-1, keepdims=True)
            p = np.exp(scores - top)
            out[b, t] = p @ x / p.sum(-1, keepdims=True)
            lse[b, t] = np.log(p.sum(-1)) + top[:, 0]
    return out, lse


def run(case, name, *, window=None, parts=None, longest=8192, programs=132, scale=SCALE):
    """By the kernel."""
    sizes = case.arrays[0].shape[:3]
    s = kernel.settings(scale, *sizes, window=window, codec=codec_of(name), programs=programs)
    if parts is not None:
        s = dataclasses.replace(s, parts=parts, shortest=64, longest=longest)
    return kernel.attend(*case.arrays, s)


def error(found, want):
    """Of outputs: the root of the mean square, relative."""
    found = np.asarray(found, np.float64)
    scale = np.sqrt(np.mean(np.square(want))) or 1.0
    return np.sqrt(np.mean(np.square(found - want))) / scale


def assert_close(found, want, most=0.01):
    """Outputs and log-sum-exps."""
    out, lse = (np.asarray(x, np.float64) for x in found)
    assert np.array_equal(np.isfinite(lse), np.isfinite(want[1]))
    there = np.isfinite(want[1])
    # Queries and latents are rounded to 16 bits, each by up to 2**-9 of its size.
    np.testing.assert_allclose(lse[there], want[1][there], rtol=2**-8, atol=2e-2)
    assert np.array_equal(np.isnan(out), np.isnan(want[0]))
    assert error(np.nan_to_num(out), np.nan_to_num(want[0])) < most
