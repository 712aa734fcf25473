"""Decode over latents by Pallas' own interpreter: see `interpreted_pooled`.

    python -m tests.kernels.interpreted_latent plain

What the interpreter cannot run, code for single lanes, is replaced by what it computes.
"""

import os
import sys

os.environ["NPROC"] = "16"  # Threads of XLA's pool; before jax starts.

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper.latent import join, kernel, softmax, tiles
from pallas_kernels.mosaic.hopper.paged_prompt import nonfinite
from pallas_kernels.mosaic.pipeline import ROWS
from tests.kernels import interpreted_pooled as interpreted
from tests.kernels import interpreted_prompt
from tests.models import latent_helpers as helpers


def stored(x, out, base, first, rows, channel=None):
    """`kernel.channels` or `kernel.numbers` of arrays."""
    b = base // rows
    is_part = len(out.shape) == (3 if channel is None else 4)
    lead = (b // out.shape[1], b % out.shape[1]) if is_part else (b,)
    for i in range(ROWS):

        @pl.when(first + i < rows)
        def _(i=i):
            if channel is None:
                out[(*lead, first + i)] = x[i]
            else:
                out[(*lead, first + i, pl.ds(channel, x.shape[1]))] = x[i].astype(out.dtype)


def joined(found, found_lse, lengths, query_lengths, shape, dtype, s):
    """`join.join` of arrays."""
    parts, rows = found_lse.shape[0], found_lse.shape[-1]
    _, tokens, heads, _ = shape
    t = jnp.arange(rows) // heads
    query_lengths = jnp.full_like(lengths, tokens) if query_lengths is None else query_lengths
    begin = (lengths - query_lengths)[:, None]
    position, window = begin + t, 2**30 if s.window is None else s.window
    at = jnp.maximum(begin - window, 0) // 64
    size = jnp.clip(
        -(-(-(-lengths[:, None] // 64) - at) // s.parts), s.shortest // 64, s.longest // 64
    )
    start = (at + jnp.arange(parts)[:, None, None] * size) * 64
    seen = (t < query_lengths[:, None]) & (position >= 0)
    seen = seen & (position >= start) & (position - window < start + size * 64)
    lse = jnp.where(seen, found_lse, -jnp.inf)
    top = jnp.max(lse, 0)
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weight, 0)
    out = jnp.sum(jnp.where(seen[..., None], found, 0.0) * weight[..., None], 0)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    lse = (top + jnp.log(total))[:, : tokens * heads].reshape(shape[:3])
    return out[:, : tokens * heads].reshape(shape).astype(dtype), lse


def maxima(scores, m, l, factor):
    """`softmax.maxima` of arrays."""
    top = jnp.max(scores, axis=1) * factor
    top = jnp.where(top > m + softmax.MARGIN, top, m)
    alpha = jnp.exp2(m - jnp.where(top == -jnp.inf, 0.0, top))
    return top, alpha, l * alpha


def weights(scores, m, l, factor, half):
    """`softmax.weights` of arrays."""
    shift = jnp.where(m == -jnp.inf, 0.0, m)
    p = jnp.exp2(scores[:, half * 32 : (half + 1) * 32] * factor - shift[:, None])
    return p, l + jnp.sum(p, axis=1)


def scores(slot, y):
    """`kernel._scores` of arrays."""
    found = jnp.zeros((ROWS, 64), jnp.float32)
    pairs = [(y.q[i], y.latent[slot, i]) for i in range(2)] + [(y.q_rope[...], y.rope[slot])]
    plgpu.commit_smem()
    for q, k in pairs:
        found = found + jnp.dot(q, k.T, preferred_element_type=jnp.float32)
    return found if y.unit is None else found * y.unit[slot][None]


def added(o, p, values, half):
    """`kernel._add` of arrays."""
    p, some = (x if isinstance(x, jax.Array) else x[...] for x in (p, values))
    # The matrix unit reads as copies write: no fence is needed between the two.
    plgpu.commit_smem()
    some = some[half * 32 : (half + 1) * 32]
    return o + jnp.dot(p, some, preferred_element_type=jnp.float32)


def expanded(codes, words, share, work, j, slot, y):
    """`kernel._expand` of arrays: a share of every 16 tokens."""
    x, codec, tokens = codes.x, codes.codec, codes.tokens(share)
    count = len(tokens)
    for warp in range(4):
        token = j * 64 + warp * 16
        held = jnp.minimum(token, (work.length - 1) // 16 * 16) + tokens.start
        at = x.tables[work.b, held // x.rope.shape[1]], pl.ds(held % x.rope.shape[1], count)
        numbers, unit = x.latent[at], x.scale[at]
        if codec.centroids:
            both = jnp.stack([numbers & 15, numbers >> 4], -1).reshape(count, -1)
            numbers = sum(jnp.where(both == i, c, 0) for i, c in enumerate(codec.centroids))
            numbers, unit = numbers - codec.middle, unit * codec.unit
        rows = pl.ds(warp * 16 + tokens.start, count)
        for half in range(2):
            part = numbers[:, half * 256 : (half + 1) * 256].astype(y.latent.dtype)
            y.latent[slot, half, rows] = part
        y.rope[slot, rows] = (x.rope[at].astype(jnp.float32) / unit[:, None]).astype(y.rope.dtype)
        y.unit[slot, rows] = unit
    plgpu.commit_smem()
    plgpu.barrier_arrive(y.ready.at[slot])
    return words


def install():
    interpreted.install()
    nonfinite.clean = interpreted_prompt.clean
    kernel.channels, kernel.numbers = stored, stored
    softmax.maxima, softmax.weights, softmax.total = maxima, weights, lambda l: l
    softmax.rescaled = lambda o, alpha: o * alpha[:, None]
    kernel._scores, kernel._add, kernel._added = scores, added, lambda o: o
    tiles.ask_for = lambda *_: None
    kernel._expand, kernel.Codes.load = expanded, lambda *_: []
    join.join = joined
    kernel.attend = interpreted.interpreted(kernel.attend)


# Format, lengths, heads and tokens, page size, parts, window, real queries.
CASES = {
    "plain": ("bfloat16", (150, 0, 1), 16, 1, 64, 1, None, None),
    "tokens, parts": ("bfloat16", (300, 40), 20, 4, 16, 3, None, (4, 3)),
    "rows, window": ("bfloat16", (200, 70), 24, 3, 128, 2, 100, None),
    "e4m3": ("fp8_e4m3", (330, 0, 70), 24, 3, 32, 2, None, None),
    "turbo4": ("turbo4", (200, 1), 16, 1, 128, 1, None, None),
}


def check(name):
    kind, lengths, heads, tokens, page_size, parts, window, real = CASES[name]
    given = {"heads": heads, "tokens": tokens, "page_size": page_size, "query_lengths": real}
    if real is not None:
        given["query_lengths"] = np.asarray(real, np.int32)
    case = helpers.make(kind, lengths, **given)
    found = helpers.run(case, kind, parts=parts, window=window, programs=2)
    helpers.assert_close(found, helpers.oracle(case, window=window))


if __name__ == "__main__":
    install()
    check(sys.argv[1])
