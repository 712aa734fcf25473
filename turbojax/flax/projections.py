"""The linear layers around an attention with grouped queries, and their rotary positions."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from turbojax import _checks, _device
from turbojax.flax.norms import RMSNorm
from turbojax.rotary import Rope


class AttentionProjections(nnx.Module):
    """Queries, keys and values of tokens, and what becomes of the attended values.

    Kernels are ``[D, N H]`` of `q_proj`, ``[D, K H]`` of `k_proj` and `v_proj`, ``[N H, D]`` of
    `o_proj`. `q_norm` and `k_norm` are `RMSNorm`s of each head's query or key, or of all together,
    before they are rotated. `sinks`, float ``[N]``, are logits that are only in the softmax's
    denominator. What is missing is None.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        rope: Rope | None,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        norm_offset: float = 0.0,
        joint_qk_norm: bool = False,
        output_gain: float = 1.0,
        use_sinks: bool = False,
        sharding: tuple[str | None, str | None] | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes random parameters; those of `TurboAttention` mean the same here.

        `head_dim` is needed without a rotary embedding. `norm_offset` is that of `rms_norm` for the
        norms of queries and keys, and with `joint_qk_norm` all heads of a token are normed
        together, not each alone. `output_gain` is that of the output's initial weights, see
        `linear`. Sinks begin at 0, each as a key of score 0. `sharding` names mesh axes, or logical
        ones, over which the residual stream and the heads are split, such as ``(None, "model")``;
        None for no annotations. With them Flax needs a mesh where parameters are made.

        Raises TypeError if `qk_norm_eps` is not a number, or `sharding` holds no names; ValueError
        if `head_dim` is missing, or another one than the rotary embedding's, `qk_norm_eps` is
        negative or `sharding` no pair.
        """
        check_norm_eps(qk_norm_eps)
        check_sharding(sharding)
        self.rope = rope
        self.head_dim = check_head_dim(rope, head_dim)
        make = functools.partial(linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        inward = outward = None
        if sharding is not None:
            inward, outward = tuple(sharding), tuple(sharding[::-1])
        self.q_proj = make(hidden_size, width, sharding=inward, use_bias=qkv_bias)
        self.k_proj = make(hidden_size, kv_width, sharding=inward, use_bias=qkv_bias)
        self.v_proj = make(hidden_size, kv_width, sharding=inward, use_bias=qkv_bias)
        self.o_proj = make(
            width, hidden_size, sharding=outward, gain=output_gain, use_bias=output_bias
        )
        norm = functools.partial(
            RMSNorm, eps=qk_norm_eps or 0.0, offset=norm_offset, param_dtype=param_dtype
        )
        self.joint_qk_norm = joint_qk_norm
        sizes = (width, kv_width) if joint_qk_norm else (self.head_dim, self.head_dim)
        self.q_norm = None if qk_norm_eps is None else norm(sizes[0])
        self.k_norm = None if qk_norm_eps is None else norm(sizes[1])
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None

    def heads(
        self,
        x: jax.Array,
        angles: jax.Array | None,
        rope: Rope | None = None,
        *,
        rotates: bool = True,
        over: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query ``[B, T, N, H]`` and key ``[B, T, K, H]``, rotated, and value ``[B, T, K, H]``.

        `x` is ``[B, T, D]``, and `angles` float32 ``[B, T, 1, R/2]``, see `Rope.angles`; `rope` is
        given if they are of another one than the module's own. Without `rotates`, no position
        rotates queries and keys, whatever the module has. Within `shard_map`, `over` are the axes
        of a mesh over which query heads, and those over which KV heads are split.

        Raises ValueError if there are angles and no rotary embedding, or the other way round.
        """
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key = self.q_proj(x), self.k_proj(x)
        if not self.joint_qk_norm:
            query, key = query.reshape(shape), key.reshape(shape)
        if self.q_norm is not None and self.k_norm is not None:
            joint = over if self.joint_qk_norm else ((), ())
            query, key = self.q_norm(query, joint[0]), self.k_norm(key, joint[1])
        query, key, value = (y.reshape(shape) for y in (query, key, self.v_proj(x)))
        own = self.rope if rope is None and rotates else rope
        return *rotate(own, query, key, angles), value

    def given_sinks(self) -> tuple[jax.Array, ...]:
        """The sinks, if there are any: the last argument of an `Attend`."""
        return () if self.sinks is None else (self.sinks[...],)

    def output(self, attended: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Maps attended values ``[B, T, N, H]`` to ``[B, T, D]``; see `summed`."""
        return summed(self.o_proj, attended.reshape(*attended.shape[:2], -1), over)


def check_head_dim(rope: Rope | None, head_dim: int | None) -> int:
    """The width of a head, from either argument; ValueError if both lack it, or they differ."""
    if rope is None:
        if head_dim is None:
            raise ValueError("head_dim=None must be given where rope=None does not say it")
        return head_dim
    if head_dim not in (None, rope.head_dim):
        raise ValueError(f"{head_dim=} must equal rope.head_dim={rope.head_dim}")
    return rope.head_dim


def check_norm_eps(eps: float | None) -> None:
    """Raises unless an epsilon is None or a finite number that is not negative."""
    _checks.check_number("qk_norm_eps", eps)
    if eps is not None and eps < 0:
        raise ValueError(f"qk_norm_eps={eps} must be at least 0")


def check_sharding(sharding: object) -> None:
    """Raises unless it is None or two names of axes, each of which may be None."""
    if sharding is None:
        return
    if isinstance(sharding, str) or not isinstance(sharding, Sequence):
        raise TypeError(f"{sharding=} must be None or a pair of names of axes")
    if len(sharding) != 2:
        raise ValueError(f"{sharding=} must be a pair: axes of the residual stream and the heads")
    if not all(name is None or isinstance(name, str) for name in sharding):
        raise TypeError(f"{sharding=} must hold names of axes, or None")


def rotate(
    rope: Rope | None, query: jax.Array, key: jax.Array, angles: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys at their positions; unchanged without a rotary embedding.

    Raises ValueError if there are angles and no rotary embedding, or the other way round.
    """
    if (rope is None) != (angles is None):
        raise ValueError(f"{rope=} must have angles if and only if it is not None")
    if rope is None or angles is None:
        return query, key
    return rope.rotate(query, angles), rope.rotate(key, angles)


def linear(
    in_size: int,
    out_size: int,
    *,
    sharding: tuple[str | None, ...] | None = None,
    gain: float = 1.0,
    use_bias: bool = False,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A linear layer whose initial weights have variance ``gain**2 / in_size``.

    `sharding` names the axes over which inputs and outputs are split, see `AttentionProjections`.
    """
    metadata: dict[str, Any] = {}
    if sharding is not None:
        metadata["kernel_metadata"] = {"out_sharding": sharding}
        if use_bias:
            metadata["bias_metadata"] = {"out_sharding": sharding[1:]}
    return nnx.Linear(
        in_size,
        out_size,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=kernel_init(gain),
        dot_general=dot_general,
        rngs=rngs,
        **metadata,
    )


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general`; a single row is multiplied beside one of zeros on a GPU.

    Of a row times a matrix of up to ten million numbers XLA (of jax 0.11) makes a kernel that
    writes every product to memory, rounded to the operands' dtype, and one that adds them up: three
    times the bytes. Two rows take a matrix product.
    """
    rest: Any = {"precision": precision, "preferred_element_type": preferred_element_type}
    if (
        set(lhs.shape[:-1]) != {1}
        or dimension_numbers != (((lhs.ndim - 1,), (0,)), ((), ()))
        or out_sharding is not None
        or not _device.has_gpu()
    ):
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, **rest, out_sharding=out_sharding)
    rows = jnp.pad(lhs, [(0, 1), *[(0, 0)] * (lhs.ndim - 1)])
    product: jax.Array = jax.lax.dot_general(rows, rhs, dimension_numbers, **rest)
    return product[:1]


class AdaptedLinear(nnx.Linear):
    """A linear layer with a low-rank adapter beside it: ``x W + bias + (x A) B``.

    `lora_a` is ``[in, R]`` and `lora_b` ``[R, out]``; both are cast to the layer's dtype.
    """

    def __init__(self, base: nnx.Linear, *, rngs: nnx.Rngs) -> None:
        """Initializes a layer of `base`'s sizes and dtypes, whose adapter adds nothing."""
        inputs, outputs = base.in_features, base.out_features
        same: dict[str, Any] = {"dtype": base.dtype, "param_dtype": base.param_dtype}
        same["dot_general"] = base.dot_general
        super().__init__(inputs, outputs, use_bias=base.use_bias, rngs=rngs, **same)
        self.lora_a = nnx.Param(jnp.zeros((inputs, 1), jnp.float32))
        self.lora_b = nnx.Param(jnp.zeros((1, outputs), jnp.float32))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps ``[..., in]`` to ``[..., out]``; for `out_sharding` see `nnx.Linear`."""
        y: jax.Array = super().__call__(inputs, out_sharding)
        return y + self.low_rank(inputs).astype(y.dtype)

    def merged_kernel(self) -> jax.Array:
        """``W + A B`` in the layer's dtype."""
        kernel = self.kernel[...].astype(self.dtype)
        return kernel + _product(self.lora_a[...], self.lora_b[...], self)

    def low_rank(self, x: jax.Array) -> jax.Array:
        """What the adapter adds to the output for ``[..., in]``."""
        for matrix in (self.lora_a, self.lora_b):
            x = _product(x, matrix[...], self)
        return x


def summed(layer: nnx.Linear, x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """A linear layer of which each device has some of the inputs.

    What the devices compute is added in the layer's dtype, then the bias, once. `layer`, made by
    `linear`, has the device's rows of the kernel and a whole bias; `x` is ``[..., in]``. `over` are
    the axes of a mesh, within `shard_map`, over which the inputs are split: none where the layer is
    whole. The result ``[..., out]`` is the same on all of those devices.
    """
    if not over:
        return layer(x)
    y = jax.lax.psum(without_bias(layer, x), over)
    if layer.bias is None:
        return y
    return y + layer.bias[...].astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


def without_bias(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """What a layer made by `linear` computes from ``[..., in]`` before its bias."""
    y = _product(x, layer.kernel[...], layer)
    return y + layer.low_rank(x) if isinstance(layer, AdaptedLinear) else y


def _product(x: jax.Array, matrix: jax.Array, layer: nnx.Linear) -> jax.Array:
    """``[..., in]`` times ``[in, out]`` in the layer's dtype and precision."""
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    operands = x.astype(layer.dtype), matrix.astype(layer.dtype)
    return dot_general(*operands, contract, precision=layer.precision)


def kernel_init(gain: float) -> jax.nn.initializers.Initializer:
    """Initial weights of variance ``gain**2`` over the number of inputs."""
    return jax.nn.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal")
