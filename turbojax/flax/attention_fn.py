"""Attention functions for Flax's own modules, nnx's and linen's.

Flax hands over a mask; the kernels know lengths, causality and windows. So lengths are read from
the mask, or segments or bounds, and it is compared with what they and the static options imply.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax import _checks
from turbojax._registry import ImplementationName
from turbojax.attention.options import check_implementation
from turbojax.attention.pooled import pooled_attention
from turbojax.attention.turbo import turbo_attention
from turbojax.caches.pooled import check_pooled
from turbojax.flax._masks import MaskRule, as_mask, read_mask
from turbojax.levels import Pattern, Policy, select_levels
from turbojax.numerics.config import TurboConfig

_Operands = tuple[jax.Array, jax.Array, jax.Array]
"""Query ``[B, T, N, H]``, key and value ``[B, S, K, H]``."""


class _AttentionFn:
    """What the attention functions have in common: Flax's arguments."""

    is_causal: bool
    warn: bool
    segments: bool
    bounds: bool = False
    local_window_size: int | tuple[int, int] | None = None

    def __call__(  # noqa: D417
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        input_positions: jax.Array | None = None,
        query_segment_ids: jax.Array | None = None,
        key_value_segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attends; the arguments are those that Flax's modules pass, in their order.

        Those that are not named here must be None, or have no meaning: weights never exist as a
        whole, so that `module` cannot keep them, the kernels have a precision of their own, and a
        softmax in float32. Queries and keys are rotated before, instead of `input_positions`.

        Args:
          query: ``[batch..., T, N, H]``.
          key: ``[batch..., S, K, H]``; `N` is a multiple of `K`.
          value: ``[batch..., S, K, H]``.
          bias: None: scores have no bias here.
          mask: optional, broadcastable to ``[batch..., N, T, S]``, True or nonzero for what is
            visible. It may hide keys and queries past a length per sequence, and what causality and
            the window hide; with `segments` also keys and queries anywhere, and keys of other
            packed sequences; with `bounds` of each query all keys before and after some; the same
            for all heads. Where the function is causal, and not the call, it must hide what
            causality hides; a window hides more than the mask does. Any other mask raises outside
            `jit`. Under it, its sequences become NaN, which `checkify` and a warning report. A
            single query under a mask is the newest token that it shows, as in decoding.
          dropout_rate: 0, unless `deterministic`.
          deterministic: whether there is no dropout.
          dtype: of the computation; that of the operands, promoted, if not given.
          is_causal: whether query `t` sees only keys up to `t` of those that the mask shows.
          query_segment_ids: optional integers ``[batch..., T]``, of packed sequences: a query sees
            keys of an equal id alone, of those that the mask shows. Flax's modules do not pass
            them; a function with them bound may be given to a module that is called once.
          key_value_segment_ids: integers ``[batch..., S]`` beside them.

        Returns:
          ``[batch..., T, N, H]`` in `dtype`. Queries that see nothing give 0.

        Raises:
          TypeError: if dtypes are not supported.
          ValueError: if a shape does not fit, or, outside `jit`, a mask that is not as above; if
            the function is causal, and the mask has one row for many queries, or there is none and
            the number of keys is not that of queries.
          NotImplementedError: for active dropout, and for what must be None.
        """
        if dropout_rate > 0 and not deterministic:
            raise NotImplementedError(
                f"{dropout_rate=} must be 0, or deterministic True: there is no dropout here"
            )
        _refuse(
            bias=bias,
            precision=precision,
            module=module,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            input_positions=input_positions,
        )
        query, key, value = _promote(query, key, value, dtype)
        shape = _check_shapes(query, key, value)
        if mask is not None:
            mask = as_mask(mask, query, key)
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        ids = {
            "query_segment_ids": query_segment_ids,
            "key_value_segment_ids": key_value_segment_ids,
        }
        given = {k: _flat(k, x, shape[:-3]) for k, x in ids.items() if x is not None}
        return self._masked((query, key, value), mask, bool(is_causal), given).reshape(shape)

    def _masked(
        self, operands: _Operands, mask: jax.Array | None, is_causal: bool, given: dict[str, Any]
    ) -> jax.Array:
        """Attends to what a mask ``[B or 1, N or 1, T or 1, S]`` shows.

        Causality of the call is added to the mask, as Flax does; a function that is causal where
        the call is not needs a mask that says so, too.
        """
        expects_causal = self.is_causal and not is_causal
        is_causal, (query, key, _) = is_causal or self.is_causal, operands
        if mask is None:
            if expects_causal and query.shape[1] != key.shape[1]:
                raise ValueError(
                    f"{query.shape=} and {key.shape=}: where there are not as many keys as "
                    "queries, a causal function needs a mask, or is_causal=True in the call, which "
                    "lets query t see keys up to t; for cross-attention take a function with "
                    "is_causal=False"
                )
            return self._attend(operands, is_causal, given)
        batch, tokens = query.shape[:2]
        is_newest = tokens == 1 < key.shape[1]
        if is_newest and given:
            raise NotImplementedError("a single query under a mask has no segments")
        window = _checks.normalize_window(self.local_window_size)
        segments, bounds = self.segments and not (is_newest or given), self.bounds and not is_newest
        rule = MaskRule(is_causal, expects_causal, window, segments, bounds)
        one, other, fits = read_mask(mask, batch, tokens, rule, self if self.warn else None)
        if is_newest:
            out = self._attend_newest(operands, other)
        else:
            if segments:
                given |= {"query_segment_ids": one, "key_value_segment_ids": other}
            elif bounds:
                given |= {"key_bounds": (one, other)}
            else:
                given |= {"query_seq_lengths": one, "key_value_seq_lengths": other}
            out = self._attend(operands, is_causal, given)
        # Multiplied, not selected, so that gradients become NaN as well.
        broken = jnp.where(fits, 1, jnp.nan).astype(out.dtype)
        return out * broken[:, None, None, None]

    def _attend(self, operands: _Operands, is_causal: bool, given: dict[str, Any]) -> jax.Array:
        """Attends, with further arguments of the op: lengths, segments or bounds."""
        raise NotImplementedError

    def _attend_newest(self, operands: _Operands, key_length: jax.Array) -> jax.Array:
        """Attends the token at ``key_length - 1``, ``[B, 1, N, H]``."""
        raise NotImplementedError


def _check_switches(**switches: object) -> None:
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name}={switch!r} must be a bool")


def _flat(name: str, ids: Any, batch: tuple[int, ...]) -> jax.Array:
    """Segments ``[batch..., T]`` as int32 ``[B, T]``; the op checks the rest."""
    ids = _checks.as_int32(name, ids)
    if ids.ndim != len(batch) + 1 or ids.shape[:-1] != batch:
        raise ValueError(
            f"{name}.shape={ids.shape} must be the batch axes {batch} and one of tokens"
        )
    return ids.reshape(-1, ids.shape[-1])


@dataclasses.dataclass(frozen=True)
class TurboAttentionFn(_AttentionFn):
    """`turbojax.turbo_attention` as the `attention_fn` of Flax's attention modules.

    Frozen and hashable: modules with equal functions share what is compiled. For modules that are
    trained or used with a causal mask, set `is_causal`: a mask is data, and cannot say it. It is
    compared with the function, so that a mask that shows more is an error, not causal attention.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import turbojax as tj
    >>> causal = tj.flax.TurboAttentionFn(is_causal=True)
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=64, attention_fn=causal, decode=False, rngs=nnx.Rngs(0)
    ... )
    >>> layer(jnp.ones((2, 10, 64))).shape
    (2, 10, 64)

    Attributes:
      config: numerics and block sizes.
      is_causal: query `t` sees keys up to `t`; masks must say so too.
      local_window_size: optional `w` or ``(left, right)``, see `turbojax.turbo_attention`.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      implementation: see `turbojax.turbo_attention`.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      segments: whether masks may also hide keys of other packed sequences, as they do where
        `flax.linen.make_attention_mask` made them of ids with ``jnp.equal``, and keys and queries
        anywhere, such as padding on the left. Segments are then read from every mask, in place of
        lengths, and blocks without a common one take no time. That a mask may have them cannot
        follow from its values under `jit`. A single query still is the newest token; in a call
        with ids, the mask is one of lengths.
      bounds: whether masks may show each query any keys that follow each other, as those of
        prefix-LMs and images do, where tokens see each other in both directions: in place of
        lengths the first and the last of them are read, as `key_bounds`. Not with `segments`. Give
        no `is_causal` then: the mask says what is causal.
      warn: whether programs under `jit` issue a `MaskWarning` when a mask makes NaN, once for each
        function. The warning is a callback, so jax can neither export such a program nor keep it
        in its persistent cache.

    Raises:
      TypeError: if `config` is not a `TurboConfig`, `is_causal`, `segments`, `bounds` or `warn` not
        a bool, or the scale or the cap not a number.
      ValueError: if the window, the scale or the cap is out of range, there is no such
        implementation, or both `segments` and `bounds` are True.
    """

    config: TurboConfig = TurboConfig()
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    implementation: ImplementationName | None = None
    warn: bool = True
    scale: float | None = None
    segments: bool = False
    bounds: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.config, TurboConfig):
            raise TypeError(f"config={self.config!r} must be a TurboConfig")
        switches = {"segments": self.segments, "bounds": self.bounds}
        _check_switches(is_causal=self.is_causal, warn=self.warn, **switches)
        if self.segments and self.bounds:
            raise ValueError(f"{switches} must not both be True: a mask is read as one of them")
        check_implementation(self.implementation)
        _checks.check_number("scale", self.scale)
        # Windows in one form, so that functions with equal windows are equal.
        window = _checks.normalize_window(self.local_window_size)
        object.__setattr__(self, "local_window_size", window)
        _checks.check_number("logits_soft_cap", self.logits_soft_cap)
        _checks.check_positive("logits_soft_cap", self.logits_soft_cap)

    def _attend(self, operands: _Operands, is_causal: bool, given: dict[str, Any]) -> jax.Array:
        out = turbo_attention(
            *operands,
            config=self.config,
            scale=self.scale,
            is_causal=is_causal,
            **given,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            implementation=self.implementation,
        )
        assert isinstance(out, jax.Array)
        return out

    def _attend_newest(self, operands: _Operands, key_length: jax.Array) -> jax.Array:
        query, key, value = operands
        window = _checks.normalize_window(self.local_window_size)
        if window is not None:
            key, value, key_length = _take_newest(key, value, key_length, window[0] + 1)
        whole = dataclasses.replace(self, local_window_size=None)
        return whole._attend((query, key, value), False, {"key_value_seq_lengths": key_length})


@dataclasses.dataclass(frozen=True)
class PooledAttentionFn(_AttentionFn):
    """`turbojax.pooled_attention` as the `attention_fn` of Flax's attention modules.

    A single query under a mask, as in decoding, attends to the keys one by one.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> import turbojax as tj
    >>> pooled = tj.flax.PooledAttentionFn(tj.levels.TopK(), is_causal=True)
    >>> layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=pooled)
    >>> x = jnp.ones((2, 300, 64))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 300, 64)

    Attributes:
      policy: see `turbojax.levels`. Levels of a pattern are made when a function is traced, the
        others in every call; they have no gradient.
      block_q: queries that share a row of levels.
      block_kv: keys that share a level, a multiple of 8.
      is_causal: query `t` sees keys up to `t`; masks must say so too.
      implementation: see `turbojax.pooled_attention`.
      query_samples: of `turbojax.select_levels`, for policies that estimate.
      key_means: the same.
      warn: see `TurboAttentionFn`.
      segments: see `TurboAttentionFn`. Levels are chosen in each call then.

    Raises:
      TypeError: if `policy` is not one of `turbojax.levels`, `is_causal`, `segments` or `warn` not
        a bool, or a size not an integer.
      ValueError: if a size is out of range, or there is no such implementation.
    """

    policy: Policy
    block_q: int = 128
    block_kv: int = 128
    is_causal: bool = False
    implementation: ImplementationName | None = None
    query_samples: int = 4
    key_means: int = 4
    warn: bool = True
    segments: bool = False

    def __post_init__(self) -> None:
        check_pooled(
            self.policy,
            self.block_q,
            self.block_kv,
            self.implementation,
            self.query_samples,
            self.key_means,
        )
        _check_switches(is_causal=self.is_causal, warn=self.warn, segments=self.segments)

    def _attend(self, operands: _Operands, is_causal: bool, given: dict[str, Any]) -> jax.Array:
        query, key, _ = operands
        blocks: dict[str, Any] = {"block_q": self.block_q, "block_kv": self.block_kv}
        if isinstance(self.policy, Pattern) and "query_segment_ids" not in given:
            # From positions alone: a constant of the program, which `pooled_attention` can check.
            with jax.ensure_compile_time_eval():
                levels = self.policy.levels(
                    query.shape[1], key.shape[1], is_causal=is_causal, **blocks
                )
        else:
            levels = select_levels(
                query,
                key,
                self.policy,
                **blocks,
                is_causal=is_causal,
                **given,
                query_samples=self.query_samples,
                key_means=self.key_means,
            )
        return self._pooled(operands, levels, is_causal, given)

    def _attend_newest(self, operands: _Operands, key_length: jax.Array) -> jax.Array:
        # A constant, like a pattern's levels.
        levels = np.ones((1, 1, 1, -(-operands[1].shape[1] // self.block_kv)), np.int8)
        return self._pooled(operands, levels, False, {"key_value_seq_lengths": key_length})

    def _pooled(
        self, operands: _Operands, levels: Any, is_causal: bool, given: dict[str, Any]
    ) -> jax.Array:
        out = pooled_attention(
            *(*operands, levels),
            block_q=self.block_q,
            block_kv=self.block_kv,
            is_causal=is_causal,
            **given,
            implementation=self.implementation,
        )
        assert isinstance(out, jax.Array)
        return out


attention_fn = TurboAttentionFn()
"""`TurboAttentionFn` with the default `turbojax.TurboConfig`, not causal by itself."""


def _refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is not None."""
    for name, x in arguments.items():
        if x is not None:
            shown = f"of shape {x.shape}" if isinstance(x, jax.Array | np.ndarray) else repr(x)
            reasons = {
                "bias": "scores have no bias here",
                "module": "attention weights never exist as a whole, so none can be sown",
                "input_positions": "rotate queries and keys before they attend",
            }
            why = reasons.get(name, "the products' precision is the configuration's")
            raise NotImplementedError(f"{name} {shown} must be None: {why}")


def _promote(
    query: jax.Array, key: jax.Array, value: jax.Array, dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    common = jnp.result_type(query, key, value) if dtype is None else jnp.dtype(dtype)
    query, key, value = (jnp.asarray(x, common) for x in (query, key, value))
    return query, key, value


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    """The shape of the result; the attention itself checks the rest."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name}.shape={x.shape} must be [batch..., tokens, heads, channels]")
    if key.shape[:-3] != query.shape[:-3]:
        raise ValueError(f"{query.shape=} and {key.shape=} must have the same batch axes")
    if value.shape != key.shape:
        raise ValueError(f"{value.shape=} must equal {key.shape=}")
    return query.shape


def _take_newest(
    key: jax.Array, value: jax.Array, lengths: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last `count` keys and values of each sequence, moved to the front, and their number."""
    first = jnp.maximum(lengths - count, 0)
    index = first[:, None] + jnp.arange(min(count, key.shape[1]))[None]
    index = index[:, :, None, None]
    key, value = (jnp.take_along_axis(x, index, axis=1) for x in (key, value))
    return key, value, lengths - first
