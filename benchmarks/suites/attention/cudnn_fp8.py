"""cuDNN's attention in e4m3, the peer of the 8-bit modes.

jax reaches it only through a private module, on which nothing but this row of the benchmarks
depends. Operands are e4m3 already and have as many KV heads as heads, which the call is not
charged for; the output is e4m3 too.
"""

import jax
import jax.numpy as jnp

from benchmarks._compat import cudnn_attention

# Of samples, whose standard deviation is 1 and some of whose channels are louder.
_SCALE = 16.0
# Conversion makes NaN of what is beyond.
_LARGEST = 448.0


def quantized(x: jax.Array, group: int = 1) -> jax.Array:
    """Samples in e4m3, each KV head repeated for the heads of its group."""
    scaled = jnp.clip(x.astype(jnp.float32) * _SCALE, -_LARGEST, _LARGEST)
    codes = scaled.astype(jnp.float8_e4m3fn)
    return jnp.repeat(codes, group, axis=2) if group > 1 else codes


def dequantized(out: jax.Array) -> jax.Array:
    """`attend`'s output in bfloat16."""
    return (out.astype(jnp.float32) / _SCALE).astype(jnp.bfloat16)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    """Attention of `quantized` operands ``[B, S, N, H]``; see `dequantized`."""
    cudnn = cudnn_attention()
    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    params = dict.fromkeys(cudnn.fp8_params_keys, one)
    # Weights are at most 1: their scale uses the range of e4m3.
    params |= {"scale_s": 256 * one, "descale_s": one / 256}
    out, *_ = cudnn.dot_product_attention(
        *(q, k, v),
        scale=q.shape[-1] ** -0.5 / _SCALE**2,
        mask_type=mask,
        use_fp8=True,
        fp8_params=params,
    )
    return out
