"""Self-attention with a compressed cache, as a Flax nnx module."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from turbojax.attention.options import PLAIN
from turbojax.caches import AttentionOptions, CacheKind, LayerCache
from turbojax.caches.whole import WholeAttention
from turbojax.flax._self_attention import SelfAttention
from turbojax.flax.projections import AttentionProjections
from turbojax.numerics.config import TurboConfig
from turbojax.rotary import Rope


class TurboAttention(AttentionProjections):
    """Causal self-attention with grouped queries, rotary positions and a compressed cache.

    Called with whole sequences it attends without a cache and has a gradient. For generation,
    `init_cache` makes a cache, `prefill` attends within prompts and fills it, and `decode` takes
    the tokens after that. Parameters are `nnx.Param`, the cache is an `nnx.Cache`, so
    ``nnx.split(module, nnx.Param, nnx.Cache)`` tells them apart.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import turbojax as tj
    >>> attention = tj.flax.TurboAttention(64, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 10, 64))
    >>> attention(x).shape
    (2, 10, 64)
    >>> attention.init_cache(batch_size=2, max_length=256)
    >>> attention.prefill(x, lengths=jnp.array([10, 7])).shape
    (2, 10, 64)
    >>> attention.decode(jnp.ones((2, 1, 64))).shape
    (2, 1, 64)
    >>> attention.cache.lengths
    Array([11,  8], dtype=int32)

    Attributes:
      core: how it attends.
      kv_cache: `nnx.Cache` with the cache, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        cache: CacheKind = TurboConfig(),
        attention: WholeAttention | None = None,
        options: AttentionOptions = PLAIN,
        rope: Rope | Literal["default"] | None = "default",
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        use_sinks: bool = False,
        sharding: tuple[str | None, str | None] | None = None,
        implementation: str | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes random parameters.

        Args:
          hidden_size: channels `D` of a token.
          num_heads: query heads `N`.
          num_kv_heads: key/value heads `K`, of which `N` is a multiple; `N` if not given.
          head_dim: channels `H` of a head; those of `rope`, or ``D / N``, if not given.
          cache: kind of the cache, see `turbojax.caches.init_layer_cache`.
          attention: what attends within whole sequences and within prompts, to their own keys and
            values: ``"exact"``, `turbo_attention` of a config, or pooled attention. If not given,
            both attend with the cache's config, or exactly. Prompts differ with two kinds of cache:
            with ``"kv4"`` they attend in e4m3, and with pages to keys and values as stored there,
            as `decode` does.
          options: scale, window and cap of scores.
          rope: rotary embedding; None for none. The default is ``Rope(head_dim)``.
          qkv_bias: whether queries, keys and values have biases.
          output_bias: whether the output has one.
          qk_norm_eps: epsilon of RMSNorms of queries and keys; None for no such norms.
          use_sinks: whether there is a parameter ``sinks`` ``[N]``: a learned logit per query head
            in the softmax's denominator, 0 at first.
          sharding: mesh axes over which the residual stream and the heads are split, such as
            ``(None, "model")``, see `AttentionProjections`.
          implementation: of the cache's ops, those that attend and those that write; None to
            choose. With an exact cache ``"xla"``, ``"cudnn"``, ``"mosaic_gpu"`` or
            ``"repeatable"``, else a name that `turbojax.turbo_attention` takes. It goes to
            `turbo_attention` within whole sequences and prompts as well, unless the cache is exact,
            and to exact attention only if it is; otherwise these choose for themselves. A
            `PooledAttention` names its own.
          dtype: of the computation and the output, `param_dtype` if not given.
          param_dtype: of the parameters.
          rngs: source of the initial parameters (stream `params`).

        Raises:
          TypeError: if a size is not an integer, or another argument of another kind.
          ValueError: if sizes do not fit, the cache is of no known kind, or `implementation`,
            `qk_norm_eps` or `sharding` is invalid.
          NotImplementedError: if pooled attention cannot attend with the options.
        """
        dtype = param_dtype if dtype is None else dtype
        self.core = SelfAttention(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            cache=cache,
            attention=attention,
            options=options,
            implementation=implementation,
            dtype=dtype,
        )
        super().__init__(
            hidden_size,
            num_heads,
            self.core.num_kv_heads,
            self.core.rope,
            head_dim=self.core.head_dim,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm_eps=qk_norm_eps,
            use_sinks=use_sinks,
            sharding=sharding,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.kv_cache: nnx.Cache | None = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Attends within whole sequences; the cache is neither read nor written.

        Args:
          x: ``[B, T, D]``.
          positions: optional integers ``[B, T]``, those of the tokens; ``0..T-1`` if not given.
          lengths: optional integers ``[B]``; what lies past them is padding, which changes nothing
            and gives 0. Under `jit` values outside ``0..T`` act as the nearest bound.

        Returns:
          ``[B, T, D]`` in the module's dtype.

        Raises:
          TypeError: if dtypes are not supported.
          ValueError: if a shape or a length does not fit.
        """
        return self.core.whole(self, x, positions, lengths)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Makes an empty cache; an earlier one is discarded.

        Args:
          batch_size: sequences.
          max_length: tokens each can hold.
        """
        self.kv_cache = nnx.Cache(self.core.init_cache(batch_size, max_length))

    @property
    def cache(self) -> LayerCache:
        """The cache, with `lengths`, `overflowed`, `nbytes` and `compression_ratio`.

        Raises:
          ValueError: if there is none.
        """
        if self.kv_cache is None:
            raise ValueError("there is no cache: call init_cache(batch_size, max_length) first")
        return self.kv_cache.get_value()

    def prefill(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Attends within prompts and stores them in the cache, which must be empty.

        Args:
          x: ``[B, T, D]``; with padding on the right.
          lengths: optional integers ``[B]``, of the prompts; what lies past them changes nothing
            and gives 0. Under `jit` values outside ``0..T`` act as the nearest bound.

        Returns:
          ``[B, T, D]`` in the module's dtype. Under `jit`, sequences that were not empty, or whose
          prompt exceeds `max_length`, turn `cache.overflowed`; the former keep what they hold, and
          give 0.

        Raises:
          TypeError: if dtypes are not supported.
          ValueError: if there is no cache, a shape or length does not fit, or, outside `jit`, a
            sequence is not empty or a prompt longer than `max_length`.
          NotImplementedError: from a compressed cache, when it is differentiated.
        """
        out, cache = self.core.prefill(self, x, lengths, self.cache)
        self._store(cache)
        return out

    def decode(self, x: jax.Array) -> jax.Array:
        """Attends one or more new tokens of each sequence to all before them, and stores them.

        Args:
          x: ``[B, T, D]``, usually `T` = 1; their positions follow what the cache holds.

        Returns:
          ``[B, T, D]`` in the module's dtype. Under `jit`, sequences that would exceed `max_length`
          turn `cache.overflowed`, and hold what fits.

        Raises:
          TypeError: if dtypes are not supported.
          ValueError: if there is no cache, a shape does not fit, or, outside `jit`, a sequence
            would exceed `max_length`.
          NotImplementedError: from a compressed cache, when it is differentiated.
        """
        out, cache = self.core.decode(self, x, self.cache)
        self._store(cache)
        return out

    def _store(self, cache: LayerCache) -> None:
        assert self.kv_cache is not None
        self.kv_cache.set_value(cache)
