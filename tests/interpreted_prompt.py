"""Attention of many queries to pages by Pallas' own interpreter: see `interpreted_pooled`.

    python tests/interpreted_prompt.py plain

What the interpreter cannot run, code for single lanes, is replaced by what it computes: tiles of
values are made finite by array operations.
"""

import os
import sys

os.environ["NPROC"] = "16"  # Threads of XLA's pool; before jax starts.


import interpreted_pooled as interpreted
import jax.numpy as jnp
from paged_helpers import assert_matches_oracle, check_nan, filled, normal
from paged_prompt_helpers import with_many

from pallas_kernels.mosaic.hopper.paged_prompt import kernel, lost, products
from turbojax.ops.options import Options
from turbojax.ops.paged_attention import mosaic_prompt


def clean(values, found, count):
    """`lost.clean` of arrays."""
    x = values[...]
    there = jnp.arange(x.shape[0])[:, None] < count
    finite = jnp.abs(x.astype(jnp.float32)) < jnp.inf
    bad = jnp.any(there & ~finite, axis=1)
    values[...] = jnp.where(there & finite, x, jnp.zeros_like(x))
    shift = jnp.arange(x.shape[0]) % lost.BITS
    bits = jnp.left_shift(bad.astype(jnp.int32), shift).reshape(-1, lost.BITS).sum(1)
    for i in range(bits.shape[0]):
        found[i] = bits[i]


def install():
    interpreted.install()
    products.accumulator = interpreted.Accumulator
    lost.clean = clean
    mosaic_prompt.multiprocessors = lambda: 2
    kernel.attention = interpreted.interpreted(kernel.attention)


# Lengths, KV heads, query heads and tokens, page size, options.
CASES = {
    "plain": ((150, 40), 1, 4, 37, 16, {}),
    "window": ((300,), 1, 2, 70, 64, {"local_window_size": (100, 0), "logits_soft_cap": 3.0}),
}


def call(query, cache, tables, lengths, *, return_residual, query_seq_lengths=None, **given):
    """`paged_attention` by the kernel."""
    assert return_residual
    batch, count, _, head_dim = query.shape
    given = {"local_window_size": None, "logits_soft_cap": None, **given}
    options = Options.complete(head_dim, scale=None, is_causal=True, **given)
    if query_seq_lengths is None:
        query_seq_lengths = jnp.full(batch, count, jnp.int32)
    arrays = (query, cache, jnp.asarray(tables), jnp.asarray(lengths), query_seq_lengths)
    return mosaic_prompt.attend(*arrays, options=options)


def run(name):
    lengths, kv_heads, heads, count, page_size, options = CASES[name]
    cache, tables = filled("auto", lengths, kv_heads, 64, page_size, dtype=jnp.bfloat16)
    query = normal(3, (len(lengths), count, heads, 64), jnp.bfloat16)
    units = (float(jnp.finfo(jnp.bfloat16).eps) / 2, 0.0)
    assert_matches_oracle(query, cache, tables, lengths, units=units, call=call, **options)


if __name__ == "__main__":
    install()
    if sys.argv[1] == "lost":
        check_nan(with_many(call), "auto", jnp.bfloat16, 64)
    else:
        run(sys.argv[1])
