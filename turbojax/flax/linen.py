"""`TurboAttention` for Flax linen: the same computation, parameters and names as in nnx."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from turbojax.attention.options import PLAIN
from turbojax.caches import AttentionOptions, CacheKind, LayerCache
from turbojax.caches.whole import WholeAttention
from turbojax.flax._self_attention import SelfAttention
from turbojax.flax.norms import rms_norm
from turbojax.flax.projections import (
    check_norm_eps,
    check_sharding,
    dot_general,
    kernel_init,
    rotate,
)
from turbojax.numerics.config import TurboConfig
from turbojax.rotary import Rope

_COLLECTION, _NAME = "cache", "kv_cache"


class RMSNorm(nn.Module):
    """`turbojax.flax.norms.rms_norm` with its scale, a parameter ``[size]``."""

    size: int
    eps: float
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., size]``, in `x`'s dtype."""
        scale = self.param("scale", nn.initializers.ones, (self.size,), self.param_dtype)
        return rms_norm(x, scale, self.eps)


class TurboAttention(nn.Module):
    """The twin of `turbojax.flax.TurboAttention`, which describes the attributes.

    Parameters have the names and shapes of the nnx module's, so they can be copied as they are.
    The cache lies in the collection ``"cache"``, under ``"kv_cache"``; methods that change it need
    ``mutable=["cache"]``. With `sharding`, parameters are boxed as by `nn.with_partitioning`.

    >>> import jax, jax.numpy as jnp
    >>> import turbojax as tj
    >>> attention = tj.flax.linen.TurboAttention(64, num_heads=4, num_kv_heads=2)
    >>> x = jnp.ones((2, 10, 64))
    >>> variables = attention.init(jax.random.key(0), x)
    >>> attention.apply(variables, x).shape
    (2, 10, 64)
    >>> change = {"mutable": ["cache"]}
    >>> _, cache = attention.apply(variables, 2, 256, method="init_cache", **change)
    >>> out, cache = attention.apply({**variables, **cache}, x, method="prefill", **change)
    >>> new = jnp.ones((2, 1, 64))
    >>> out, cache = attention.apply({**variables, **cache}, new, method="decode", **change)
    >>> out.shape, cache["cache"]["kv_cache"].lengths
    ((2, 1, 64), Array([11, 11], dtype=int32))
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    cache: CacheKind = TurboConfig()
    attention: WholeAttention | None = None
    options: AttentionOptions = PLAIN
    rope: Rope | Literal["default"] | None = "default"
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    use_sinks: bool = False
    sharding: tuple[str | None, str | None] | None = None
    implementation: str | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        """Makes the layers; raises what the nnx module's constructor raises."""
        check_norm_eps(self.qk_norm_eps)
        check_sharding(self.sharding)
        dtype = self.param_dtype if self.dtype is None else self.dtype
        names = [field.name for field in dataclasses.fields(SelfAttention)]
        given = {name: getattr(self, name) for name in names}
        self.core = core = SelfAttention(**{**given, "dtype": dtype})
        inward = outward = None
        if self.sharding is not None:
            inward, outward = tuple(self.sharding), tuple(self.sharding[::-1])
        make = functools.partial(_linear, dtype=dtype, param_dtype=self.param_dtype)
        width, kv_width = (n * core.head_dim for n in (self.num_heads, core.num_kv_heads))
        self.q_proj = make(width, inward, self.qkv_bias)
        self.k_proj = make(kv_width, inward, self.qkv_bias)
        self.v_proj = make(kv_width, inward, self.qkv_bias)
        self.o_proj = make(self.hidden_size, outward, self.output_bias)
        self.q_norm = self.k_norm = None
        if self.qk_norm_eps is not None:
            norm = functools.partial(RMSNorm, core.head_dim, self.qk_norm_eps, self.param_dtype)
            self.q_norm, self.k_norm = norm(), norm()
        self.sinks = None
        if self.use_sinks:
            init = nn.initializers.zeros_init()
            self.sinks = self.param("sinks", init, (self.num_heads,), self.param_dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Attends within whole sequences ``[B, T, D]``; see the nnx module."""
        return self.core.whole(self, x, positions, lengths)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Makes an empty cache; an earlier one is discarded. Needs no parameters."""
        self._store(self.core.init_cache(batch_size, max_length))

    def prefill(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Attends within prompts ``[B, T, D]`` and stores them; see the nnx module."""
        out, cache = self.core.prefill(self, x, lengths, self._held())
        self._store(cache)
        return out

    def decode(self, x: jax.Array) -> jax.Array:
        """Attends new tokens ``[B, T, D]`` to all before them; see the nnx module."""
        out, cache = self.core.decode(self, x, self._held())
        self._store(cache)
        return out

    def heads(
        self, x: jax.Array, angles: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, see `AttentionProjections.heads`."""
        shape = (*x.shape[:2], -1, self.core.head_dim)
        query, key = self.q_proj(x).reshape(shape), self.k_proj(x).reshape(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        value = self.v_proj(x).reshape(shape)
        return *rotate(self.core.rope, query, key, angles), value

    def given_sinks(self) -> tuple[jax.Array, ...]:
        """The sinks, if there are any."""
        return () if self.sinks is None else (self.sinks,)

    def output(self, attended: jax.Array) -> jax.Array:
        """Maps attended values ``[B, T, N, H]`` to ``[B, T, D]``."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def _held(self) -> LayerCache:
        if not self.has_variable(_COLLECTION, _NAME):
            raise ValueError(
                "there is no cache: make one with apply(..., batch_size, max_length, "
                'method="init_cache", mutable=["cache"])'
            )
        return self.get_variable(_COLLECTION, _NAME)

    def _store(self, cache: LayerCache) -> None:
        self.put_variable(_COLLECTION, _NAME, cache)


def _linear(
    out_size: int,
    sharding: tuple[str | None, ...] | None,
    use_bias: bool,
    *,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
) -> nn.Dense:
    init: Any = kernel_init(1.0)
    bias_init: Any = nn.initializers.zeros_init()
    if sharding is not None:
        init = nn.with_partitioning(init, sharding)
        bias_init = nn.with_partitioning(bias_init, sharding[1:])
    return nn.Dense(
        out_size,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=init,
        bias_init=bias_init,
        dot_general=dot_general,
    )
