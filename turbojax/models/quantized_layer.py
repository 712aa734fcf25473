"""A decoder layer with INT4 linear layers: it computes all that a `Block` does."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._pytrees import pytree
from turbojax.caches import Attend, AttentionOptions
from turbojax.caches.base import Cache
from turbojax.flax.norms import rms_norm
from turbojax.matmul.fp8_tokens import rms_norm_quantize
from turbojax.matmul.grouped import grouped_matmul
from turbojax.matmul.int4 import matmul
from turbojax.matmul.int4.static import Activation, Gradient, TokenKind
from turbojax.matmul.int4.weight import Int4Weight, concatenate, gate_and_up
from turbojax.models.config import TransformerConfig
from turbojax.models.feed_forward import apply_experts, gated
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.models.transformer import scale_added
from turbojax.numerics.fp8 import Fp8Tokens
from turbojax.rotary import Rope
from turbojax.sharding import Axes
from turbojax.smoothing import scale_rotated

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of the linear layers that `join_layer` takes."""
NORMS = (
    *("attention_norm", "mlp_norm", "q_norm", "k_norm"),
    *("attention_post_norm", "mlp_post_norm"),
)
"""Names of the norms of a `QuantizedLayer`."""


@pytree
@dataclasses.dataclass(frozen=True)
class QuantizedLinear:
    """``act(x W^T + bias) + residual``: the only place where a layer multiplies with a weight.

    Attributes:
      weight: ``[out, in]``, perhaps gated.
      bias: float32 ``[out]``, for a gated weight that of the gate first, or None.
      inputs: int32 ``[in]``, the input that each column of the weight belongs to, or None where
        they are in order. Weights of GPTQ's act-order have their inputs sorted by group.
      activations: what tokens are multiplied as, see `matmul`.
    """

    weight: Int4Weight
    bias: jax.Array | None = None
    inputs: jax.Array | None = None
    activations: TokenKind = dataclasses.field(default="e4m3", metadata={"static": True})

    def __call__(
        self,
        x: jax.Array | Fp8Tokens,
        *,
        activation: Activation | None = None,
        residual: jax.Array | None = None,
        gradient: Gradient = "exact",
    ) -> jax.Array:
        """Maps ``[..., in]`` to ``[..., out]``; `matmul` rounds tokens that are not rounded yet."""
        return matmul(
            self._in_order(x),
            self.weight,
            bias=self.bias,
            activation=activation,
            residual=residual,
            activations=self.activations,
            gradient=gradient,
        )

    def after_norm(
        self, hidden: jax.Array, norm: jax.Array, eps: float, activation: Activation | None = None
    ) -> jax.Array:
        """Applies the layer to the RMSNorm of ``[..., in]``; the norm rounds to e4m3, if at all."""
        if self.activations == "e4m3":
            return self(rms_norm_quantize(hidden, norm, eps), activation=activation)
        return self(rms_norm(hidden, norm, eps), activation=activation)

    def _in_order(self, x: jax.Array | Fp8Tokens) -> jax.Array | Fp8Tokens:
        """Tokens whose channels are in the order of the weight's columns."""
        if self.inputs is None:
            return x
        if isinstance(x, Fp8Tokens):
            return dataclasses.replace(x, codes=_take(x.codes, self.inputs))
        return _take(x, self.inputs)


@pytree
@dataclasses.dataclass(frozen=True)
class QuantizedMlp:
    """A gated feed-forward layer; `gate_up` is gated, of ``[F, D]`` each, `down` ``[D, F]``."""

    gate_up: QuantizedLinear
    down: QuantizedLinear

    def __call__(
        self,
        hidden: jax.Array,
        norm: jax.Array | None,
        config: TransformerConfig,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Maps the residual stream ``[B, T, D]`` to what is added to it, plus `residual`.

        `norm` is float32 ``[D]``, factor of the norm before the layer, or None.
        """
        activation: Activation = "swiglu" if config.activation == "silu" else "geglu"
        inner = _of_input(self.gate_up, hidden, norm, config, activation)
        return self.down(inner, residual=residual)


@pytree
@dataclasses.dataclass(frozen=True)
class QuantizedExperts:
    """``sum_k w_k down_k(activation(gate_k(x)) * up_k(x))`` over a token's experts.

    Attributes:
      router: float32 ``[D, E]``, not rounded.
      gate_up: two ``[F, D]`` for each of `E` experts, the leading axis: a gated weight, or, if the
        SwiGLU is clamped (`ExpertsConfig.swiglu_limit`), gate above up.
      down: ``[D, F]``, the same.
      router_bias: float32 ``[E]``, or None.
      gate_up_bias: float32 ``[E, 2 F]``, that of the gate first, or None.
      down_bias: float32 ``[E, D]``, or None.
    """

    router: jax.Array
    gate_up: Int4Weight
    down: Int4Weight
    router_bias: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    def __call__(
        self,
        hidden: jax.Array,
        norm: jax.Array | None,
        config: TransformerConfig,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Maps the residual stream ``[B, T, D]`` to what is added to it; see `QuantizedMlp`."""
        experts = config.experts
        assert experts is not None
        assert norm is not None
        activation: Activation = "swiglu" if config.activation == "silu" else "geglu"

        def compute(x: jax.Array, sizes: jax.Array) -> jax.Array:
            first: Any = functools.partial(
                grouped_matmul, x, self.gate_up, sizes, bias=self.gate_up_bias
            )
            if experts.swiglu_limit is None:
                inner = first(activation=activation)
            else:
                gate, up = jnp.split(first(), 2, axis=-1)
                inner = gated(gate, up, config)
            return grouped_matmul(inner, self.down, sizes, bias=self.down_bias)

        # The router reads unrounded tokens.
        normed = rms_norm(hidden, norm, config.norm_eps)
        out = apply_experts(normed, self.router, experts, compute, bias=self.router_bias)
        return out if residual is None else residual + out


@pytree
@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """One layer of a `QuantizedDecoder`.

    Factors of norms include any offset that checkpoints leave out.

    Attributes:
      attention_norm: float32 ``[D]``, factor of the first norm, or None.
      qkv: ``[(N + 2 K) H, D]``, query, key and value projections one after the other.
      o: ``[D, N H]``.
      mlp_norm: float32 ``[D]``, or None: where there is none, or the first serves both.
      mlp: the feed-forward layer, or one of experts.
      q_norm: float32 ``[N, H]``, factors of the norm of each head's queries, or None.
      k_norm: float32 ``[K, H]``, the same for keys; None if `q_norm` is.
      attention_post_norm: float32 ``[D]``, factor of the norm of what attention adds to the
        residual stream, or None.
      mlp_post_norm: the same for the feed-forward layer.
      key_channel_scale: float32 ``[K, H]`` or None: rotated keys are divided by it, and the queries
        of their group multiplied (CRS).
      sinks: float32 ``[N]``, see `AttentionProjections`, or None.
    """

    attention_norm: jax.Array | None
    qkv: QuantizedLinear
    o: QuantizedLinear
    mlp_norm: jax.Array | None
    mlp: QuantizedMlp | QuantizedExperts
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    attention_post_norm: jax.Array | None = None
    mlp_post_norm: jax.Array | None = None
    key_channel_scale: jax.Array | None = None
    sinks: jax.Array | None = None

    def __call__(
        self,
        hidden: jax.Array,
        angles: jax.Array | None,
        attend: Attend,
        cache: Cache,
        options: AttentionOptions,
        rope: Rope | None,
        *,
        config: TransformerConfig,
        axes: Axes | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Does what `Block` does; within `shard_map` over `axes`, `config` is that of a device."""
        over = hidden_axes(axes)
        joined = _of_input(self.qkv, hidden, self.attention_norm, config)
        query, key, value = _heads(joined, config)
        if self.q_norm is not None and self.k_norm is not None:
            query = _norm_heads(query, self.q_norm, config, over)
            of_kv = () if axes is None else axes.of_dimension("heads")
            key = _norm_heads(key, self.k_norm, config, of_kv)
        if rope is not None and angles is not None:
            query, key = rope.rotate(query, angles), rope.rotate(key, angles)
        if self.key_channel_scale is not None:
            query, key = scale_rotated(query, key, self.key_channel_scale)
        sinks = () if self.sinks is None else (self.sinks,)
        out, cache = attend(query, key, value, cache, options, *sinks)
        output = functools.partial(self.o, out.reshape(*hidden.shape[:2], -1))
        # Bound before attention is added to `hidden`: a parallel layer reads the same input.
        first = functools.partial(self.mlp, hidden, self.attention_norm, config)
        hidden = _add(hidden, output, self.attention_post_norm, config, over)
        mlp = (
            first if config.parallel else functools.partial(self.mlp, hidden, self.mlp_norm, config)
        )
        return _add(hidden, mlp, self.mlp_post_norm, config, over), cache


def join_layer(
    linears: Mapping[str, QuantizedLinear],
    norms: Mapping[str, jax.Array | None],
    key_channel_scale: jax.Array | None = None,
    *,
    experts: QuantizedExperts | None = None,
    sinks: jax.Array | None = None,
) -> QuantizedLayer:
    """Makes a layer, joining linear layers of the same input; no code or scale changes.

    `linears` have the names of `LINEARS`; their weights have the same group size and kind of scales
    and are not gated. Either all of q, k and v have a bias or none, and likewise gate and up.
    `norms` are float32 by the names of `NORMS`; missing ones are None. `experts` replace gate, up
    and down.
    """

    def joined(
        names: tuple[str, ...], join: Callable[[list[Int4Weight]], Int4Weight]
    ) -> QuantizedLinear:
        parts = [linears[name] for name in names]
        biases = [part.bias for part in parts if part.bias is not None]
        if len(biases) not in (0, len(parts)):
            raise ValueError(f"all of {', '.join(names)} must have a bias, or none of them")
        first = parts[0]
        if any(part.activations != first.activations for part in parts):
            raise ValueError(f"activations of {', '.join(names)} must be alike")
        if not all(_same(part.inputs, first.inputs) for part in parts):
            raise NotImplementedError(
                f"inputs of {', '.join(names)} must be in the same order: others cannot be joined"
            )
        return dataclasses.replace(
            first,
            weight=join([part.weight for part in parts]),
            bias=jnp.concatenate(biases) if biases else None,
        )

    qkv, o = joined(("q", "k", "v"), concatenate), linears["o"]
    mlp: QuantizedMlp | QuantizedExperts
    if experts is None:
        gate_up = joined(("gate", "up"), lambda weights: gate_and_up(*weights))
        mlp = QuantizedMlp(gate_up, linears["down"])
    else:
        mlp = experts
    factors: dict[str, Any] = {name: norms.get(name) for name in NORMS}
    factors |= {"key_channel_scale": key_channel_scale, "sinks": sinks}
    return QuantizedLayer(qkv=qkv, o=o, mlp=mlp, **factors)


def _heads(qkv: jax.Array, config: TransformerConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits ``[B, T, (N + 2 K) H]`` into heads of queries, keys and values."""
    heads = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    first, second = config.num_heads, config.num_heads + config.num_kv_heads
    return heads[:, :, :first], heads[:, :, first:second], heads[:, :, second:]


def _add(
    hidden: jax.Array,
    compute: Callable[..., jax.Array],
    post_norm: jax.Array | None,
    config: TransformerConfig,
    over: tuple[str, ...],
) -> jax.Array:
    """Adds a result to the residual stream, in its epilogue unless something comes between."""
    if post_norm is None and config.residual_scale is None and not over:
        return compute(residual=hidden)
    out = compute()
    if over:
        out = jax.lax.psum(out, over)
    if post_norm is not None:
        out = rms_norm(out, post_norm, config.norm_eps, centered=config.layer_norm)
    return hidden + scale_added(out, config)


def _of_input(
    linear: Any,
    hidden: jax.Array,
    norm: jax.Array | None,
    config: TransformerConfig,
    activation: Activation | None = None,
) -> jax.Array:
    """Applies a linear layer to the residual stream, normed first if there is a norm."""
    if norm is None:
        return linear(hidden, activation=activation)
    if config.layer_norm:
        normed = rms_norm(hidden, norm, config.norm_eps, centered=True)
        return linear(normed, activation=activation)
    return linear.after_norm(hidden, norm, config.norm_eps, activation)


def _norm_heads(
    x: jax.Array, factor: jax.Array, config: TransformerConfig, over: tuple[str, ...]
) -> jax.Array:
    """Norms heads ``[B, T, heads, H]``, one by one or all of a token, split over axes `over`."""
    if not config.joint_qk_norm:
        return rms_norm(x, factor, config.norm_eps)
    flat = x.reshape(*x.shape[:2], -1)
    joint = rms_norm(flat, factor.reshape(-1), config.norm_eps, over=over)
    return joint.reshape(x.shape)


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    """Channels ``[..., in]`` in another order."""
    return x.at[..., order].get(mode="promise_in_bounds", unique_indices=True)


def _same(one: jax.Array | None, other: jax.Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or bool(jnp.array_equal(one, other))
