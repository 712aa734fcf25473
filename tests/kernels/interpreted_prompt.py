"""Attention of many queries to pages by Pallas' own interpreter: see `interpreted_pooled`.

    python -m tests.kernels.interpreted_prompt plain

What the interpreter cannot run, code for single lanes, is replaced by what it computes: tiles of
values are made finite, and results of parts joined, by array operations.
"""

import os
import sys

os.environ["NPROC"] = "16"  # Threads of XLA's pool; before jax starts.


import functools

import jax.numpy as jnp

from pallas_kernels.mosaic.hopper.paged_prompt import join, kernel, nonfinite, products
from tests.attention.paged_helpers import assert_matches_oracle, check_nan, filled, normal
from tests.attention.paged_prompt_helpers import with_many
from tests.kernels import interpreted_pooled as interpreted
from turbojax.attention.options import Options
from turbojax.caches.paged import mosaic_prompt


def clean(values, found, count):
    """`nonfinite.clean` of arrays."""
    x = values[...]
    there = jnp.arange(x.shape[0])[:, None] < count
    finite = jnp.abs(x.astype(jnp.float32)) < jnp.inf
    bad = jnp.any(there & ~finite, axis=1)
    values[...] = jnp.where(there & finite, x, jnp.zeros_like(x))
    shift = jnp.arange(x.shape[0]) % nonfinite.BITS
    bits = jnp.left_shift(bad.astype(jnp.int32), shift).reshape(-1, nonfinite.BITS).sum(1)
    for i in range(bits.shape[0]):
        found[i] = bits[i]


def joined(found, found_lse, lengths, query_lengths, shape, dtype, s):
    """`join.join` of arrays."""
    parts, batch, kv_heads, rows = found_lse.shape
    _, tokens, heads, _ = shape
    t = jnp.arange(rows) // s.group
    position = (lengths - query_lengths)[:, None] + t
    first = position - (2**30 if s.window is None else s.window)
    start = jnp.arange(parts)[:, None, None] * s.part
    seen = (t < query_lengths[:, None]) & (position >= 0)
    seen = seen & (position >= start) & (first < start + s.part)
    written = jnp.any(seen.reshape(parts, batch, -1, 128), -1, keepdims=True)
    written = jnp.broadcast_to(written, (*written.shape[:3], 128)).reshape(parts, batch, 1, rows)
    lse = jnp.where(written, found_lse, -jnp.inf)
    top = jnp.max(lse, 0)
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weight, 0)
    out = jnp.sum(jnp.where(written[..., None], found, 0.0) * weight[..., None], 0)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]

    def natural(x):
        x = jnp.moveaxis(x[:, :, : tokens * s.group], 1, 2)
        x = x.reshape(batch, tokens, s.group, kv_heads, *x.shape[3:])
        return x.swapaxes(2, 3).reshape(batch, tokens, heads, *x.shape[4:])

    return natural(out).astype(dtype), natural(top + jnp.log(total))


def install():
    interpreted.install()
    products.accumulator = interpreted.Accumulator
    nonfinite.clean = clean
    mosaic_prompt.multiprocessors = lambda: 2
    join.join = joined
    kernel.attention = interpreted.interpreted(kernel.attention)


WINDOW = {"local_window_size": (100, 0), "logits_soft_cap": 3.0}
# Lengths, KV heads, query heads and tokens, page size, tokens of a part, options.
CASES = {
    "plain": ((150, 40), 1, 4, 37, 16, None, {}),
    "window": ((300,), 1, 2, 70, 64, None, WINDOW),
    "nothing between": ((300, 40, 0, 3, 0, 0, 0, 7), 1, 4, 37, 16, None, {}),
    "parts": ((300, 40), 1, 3, 47, 16, 128, {}),
    "parts, window": ((600,), 1, 2, 70, 64, 256, WINDOW),
}


def call(
    query, cache, tables, lengths, *, return_residual, part=None, query_seq_lengths=None, **given
):
    """`paged_attention` by the kernel."""
    assert return_residual
    batch, count, _, head_dim = query.shape
    given = {"local_window_size": None, "logits_soft_cap": None, **given}
    options = Options.complete(head_dim, scale=None, is_causal=True, **given)
    if query_seq_lengths is None:
        query_seq_lengths = jnp.full(batch, count, jnp.int32)
    arrays = (query, cache, jnp.asarray(tables), jnp.asarray(lengths), query_seq_lengths)
    launch = mosaic_prompt.Launch(part, 4)
    return mosaic_prompt.attend(*arrays, options=options, launch=launch)


def run(name):
    lengths, kv_heads, heads, count, page_size, part, options = CASES[name]
    cache, tables = filled("auto", lengths, kv_heads, 64, page_size, dtype=jnp.bfloat16)
    query = normal(3, (len(lengths), count, heads, 64), jnp.bfloat16)
    units = (float(jnp.finfo(jnp.bfloat16).eps) / 2, 0.0)
    run = functools.partial(call, part=part)
    assert_matches_oracle(query, cache, tables, lengths, units=units, call=run, **options)


if __name__ == "__main__":
    install()
    if sys.argv[1] == "nonfinite":
        check_nan(with_many(call), "auto", jnp.bfloat16, 64)
    else:
        run(sys.argv[1])
