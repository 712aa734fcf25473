"""Latent attention (MLA; DeepSeek-V2, 2024): the linear layers around it, and its two forms.

From each token one latent and one rotary key are made, which all heads share. A head's key is
``W_UK latent`` beside the rotary key, and its value ``W_UV latent``. So attention can be computed
in two ways, which differ only in rounding:

- expanded, like grouped queries: every head has keys and values of its own;
- absorbed: ``W_UK`` multiplies queries, and ``W_UV`` the result of attention, so that all heads
  attend to the latents themselves, and only these have to be kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from turbojax.caches import Attend, AttentionOptions, attend_latents, holds_latents
from turbojax.caches.base import Cache
from turbojax.flax.norms import RMSNorm
from turbojax.flax.projections import AdaptedLinear, linear, summed
from turbojax.models.config import TransformerConfig
from turbojax.models.families import LatentConfig
from turbojax.rotary import Rope

# Not the config's epsilon: DeepSeek's own code does not pass it to these norms.
NORM_EPS = 1e-6


class LatentAttention(nnx.Module):
    """The linear layers that make queries, keys and values by way of latents, and the output.

    Attributes:
      q_proj: ``[D, N (nope + R)]``, or None where queries have a latent of their own:
      q_a_proj: ``[D, query_rank]``, or None.
      q_b_proj: ``[query_rank, N (nope + R)]``, or None; `q_a_norm` stands before it.
      kv_a_proj: ``[D, C + R]``, the latent and the rotary key; `kv_a_norm` norms the latent.
      kv_b_proj: ``[C, N (nope + value)]``, for each head the key's part first.
      o_proj: ``[N value, D]``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        output_gain: float = 1.0,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes random parameters; `output_gain` is that of the output's weights."""
        assert config.latent is not None
        latent, heads, size = config.latent, config.num_heads, config.hidden_size
        make = functools.partial(linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm: Any = functools.partial(RMSNorm, eps=NORM_EPS, param_dtype=param_dtype)
        rank, width = latent.query_rank, heads * latent.key_dim
        self.latent, self.num_heads = latent, heads
        self.q_proj = make(size, width) if rank is None else None
        self.q_a_proj = None if rank is None else make(size, rank, use_bias=config.qkv_bias)
        self.q_a_norm = None if rank is None else norm(rank)
        self.q_b_proj = None if rank is None else make(rank, width)
        self.kv_a_proj = make(size, latent.rank + latent.rope_dim, use_bias=config.qkv_bias)
        self.kv_a_norm = norm(latent.rank)
        self.kv_b_proj = make(latent.rank, heads * (latent.nope_dim + latent.value_dim))
        self.o_proj = make(
            heads * latent.value_dim, size, gain=output_gain, use_bias=config.output_bias
        )

    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        attend: Attend,
        cache: Cache,
        options: AttentionOptions,
        rope: Rope,
        over: tuple[str, ...] = (),
    ) -> tuple[jax.Array, Cache]:
        """What attention adds to the residual stream, ``[B, T, D]``, and the new cache.

        `x` is ``[B, T, D]``, normed. Absorbed if the cache holds latents, which then are all that
        it gets; otherwise expanded. Within `shard_map` heads are split over the axes `over`.
        """
        if not holds_latents(cache):
            out, cache = attend(*self.heads(x, angles, rope), cache, options)
            return self.output(out, over), cache
        query = self.absorbed_queries(x, angles, rope)
        latent, rotary = self.latents(x, angles, rope)
        out, cache = attend_latents(attend, query, latent, rotary[:, :, 0], cache, options)
        return self.absorbed_output(out, over), cache

    def heads(
        self, x: jax.Array, angles: jax.Array, rope: Rope
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value ``[B, T, N, nope + R]`` in expanded form; values end with zeros.

        `x` is ``[B, T, D]``; `angles` are float32 ``[B, T, 1, R/2]``, see `Rope.angles`, from
        `rope`.
        """
        query, rotated = self._queries(x, angles, rope)
        latent, rotary = self.latents(x, angles, rope)
        each = self.kv_b_proj(latent).reshape(*x.shape[:2], self.num_heads, -1)
        key, value = jnp.split(each, [self.latent.nope_dim], axis=-1)
        rotary = jnp.broadcast_to(rotary, (*key.shape[:3], rotary.shape[-1]))
        padding = self.latent.key_dim - self.latent.value_dim
        return (
            jnp.concatenate([query, rotated], axis=-1),
            jnp.concatenate([key, rotary], axis=-1),
            jnp.pad(value, ((0, 0),) * 3 + ((0, padding),)),
        )

    def latents(self, x: jax.Array, angles: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """What is kept of tokens: normed latents ``[B, T, C]``, rotary keys ``[B, T, 1, R]``."""
        latent, rotary = jnp.split(self.kv_a_proj(x), [self.latent.rank], axis=-1)
        return self.kv_a_norm(latent), _rotate(rotary[:, :, None], angles, rope, self.latent)

    def absorbed_queries(
        self, x: jax.Array, angles: jax.Array, rope: Rope
    ) -> tuple[jax.Array, jax.Array]:
        """Queries for latents ``[B, T, N, C]`` and for rotary keys ``[B, T, N, R]``."""
        query, rotated = self._queries(x, angles, rope)
        up, _ = self._up()
        return jnp.einsum("btnh,cnh->btnc", query, up), rotated

    def absorbed_output(self, attended: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Maps attended latents ``[B, T, N, C]`` to ``[B, T, D]``; see `summed`."""
        _, up = self._up()
        values = jnp.einsum("btnc,cnh->btnh", attended, up)
        return summed(self.o_proj, values.reshape(*values.shape[:2], -1), over)

    def output(self, attended: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Maps attended values ``[B, T, N, nope + R]``, padded as in `heads`, to ``[B, T, D]``."""
        values = attended[..., : self.latent.value_dim]
        return summed(self.o_proj, values.reshape(*values.shape[:2], -1), over)

    def _queries(self, x: jax.Array, angles: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """Both parts of queries, the second one rotated."""
        if self.q_proj is not None:
            joined = self.q_proj(x)
        else:
            assert self.q_a_proj is not None
            assert self.q_b_proj is not None
            assert self.q_a_norm is not None
            joined = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        each = joined.reshape(*x.shape[:2], self.num_heads, -1)
        query, rotary = jnp.split(each, [self.latent.nope_dim], axis=-1)
        return query, _rotate(rotary, angles, rope, self.latent)

    def _up(self) -> tuple[jax.Array, jax.Array]:
        """``W_UK`` ``[C, N, nope]`` and ``W_UV`` ``[C, N, value]`` in the computation's dtype."""
        layer = self.kv_b_proj
        if isinstance(layer, AdaptedLinear):
            kernel = layer.merged_kernel()
        else:
            kernel = layer.kernel[...].astype(layer.dtype)
        each = kernel.reshape(self.latent.rank, self.num_heads, -1)
        key, value = jnp.split(each, [self.latent.nope_dim], axis=-1)
        return key, value


def _rotate(x: jax.Array, angles: jax.Array, rope: Rope, latent: LatentConfig) -> jax.Array:
    """Rotates ``[B, T, heads, R]``.

    Pairs that lie side by side are taken apart first, in queries and keys alike, so that their
    products stay the same.
    """
    if latent.interleaved:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        x = jnp.swapaxes(pairs, -1, -2).reshape(x.shape)
    return rope.rotate(x, angles)
