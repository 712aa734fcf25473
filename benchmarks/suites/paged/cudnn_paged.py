"""cuDNN's attention to pages in bfloat16, a peer of ours.

jax reaches it only through a private module, on which nothing but this row of the benchmarks
depends. It has no pages of 8-bit floats.
"""

import jax
import jax.numpy as jnp

from benchmarks._compat import cudnn_attention


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, tables: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Attention of one query token of each sequence.

    Args:
      query: bfloat16 ``[B, 1, N, H]``.
      key: ``[P, K, page_size, H]``, of which the tables name every page once.
      value: the same.
      tables: int32 ``[B, max_pages]``; every entry must be a page.
      lengths: int32 ``[B]``.
    """
    cudnn = cudnn_attention()
    tables = tables[:, None, :, None]
    out = cudnn.paged_attention(
        jnp.swapaxes(query, 1, 2),
        *(key, value, jnp.ones_like(lengths), lengths, tables, tables),
        scale=query.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
    )
    return jnp.swapaxes(out, 1, 2)
