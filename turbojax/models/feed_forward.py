"""Gated feed-forward layers of a `Transformer`: one for all tokens, or experts, a few per token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from turbojax.flax.projections import linear, summed, without_bias
from turbojax.matmul.grouped.tiles import cut, most_tiles
from turbojax.matmul.routing import combine, dispatch, route
from turbojax.models.config import ExpertsConfig, TransformerConfig


def activate(x: jax.Array, config: TransformerConfig) -> jax.Array:
    """The activation of the feed-forward layer's gate."""
    return jax.nn.silu(x) if config.activation == "silu" else jax.nn.gelu(x, approximate=True)


def output_gain(config: TransformerConfig) -> float:
    """Initial gain that keeps the residual stream's variance the same at any depth."""
    return (2 * config.num_layers) ** -0.5


class FeedForward(nnx.Module):
    """A gated layer: ``down(activation(gate(x)) * up(x))``; SwiGLU with SiLU."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        width: int | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        size, inner = config.hidden_size, width or config.intermediate_size
        make = functools.partial(
            linear, use_bias=config.mlp_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.config = config
        self.gate_proj = make(size, inner)
        self.up_proj = make(size, inner)
        self.down_proj = make(inner, size, gain=output_gain(config))

    def __call__(self, x: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Maps ``[B, T, D]`` to ``[B, T, D]``; `over` are axes that split the inner size."""
        return summed(self.down_proj, self._inner(x), over)

    def part(self, x: jax.Array) -> jax.Array:
        """This device's part of the result; the sum over devices still lacks the bias."""
        return without_bias(self.down_proj, self._inner(x))

    def _inner(self, x: jax.Array) -> jax.Array:
        return activate(self.gate_proj(x), self.config) * self.up_proj(x)


def gated(gate: jax.Array, up: jax.Array, config: TransformerConfig) -> jax.Array:
    """The activated gate times its partner; for experts see `ExpertsConfig.swiglu_limit`."""
    experts = config.experts
    if experts is None or experts.swiglu_limit is None:
        return activate(gate, config) * up
    limit, alpha = experts.swiglu_limit, experts.swiglu_alpha
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(gate * alpha) * (up + 1)


def apply_experts(
    x: jax.Array,
    router: jax.Array,
    experts: ExpertsConfig,
    compute: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    bias: jax.Array | None = None,
    correction: jax.Array | None = None,
) -> jax.Array:
    """``sum_k w_k expert_k(x)`` over each token's experts, ``[..., D]`` in `x`'s dtype.

    `router` is ``[D, E]``, its `bias` ``[E]``; for `correction` see `route`. The router's logits,
    the weights and the sum are float32. ``compute(x, group_sizes)`` applies the experts to tokens
    ``[M, D]`` that are sorted by expert; int32 ``[E]`` says how many each has, perhaps none.
    """
    tokens = x.reshape(-1, x.shape[-1])
    wide = (tokens.astype(jnp.float32), router.astype(jnp.float32))
    logits = jnp.dot(*wide, precision=jax.lax.Precision.HIGHEST)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None]
    routing = route(
        logits,
        experts.per_token,
        softmax=experts.softmax,
        normalize=experts.normalize,
        scores=experts.scores,
        correction=correction,
        groups=experts.groups,
        top_groups=experts.top_groups,
        scaling=experts.scaling,
    )
    sorted_by = dispatch(routing.experts, experts.count)
    y = compute(tokens[sorted_by.tokens], sorted_by.group_sizes)
    return combine(y, sorted_by.places, routing.weights).reshape(x.shape)


def once(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """`x`, the same on all devices, as part of a sum over `over`: zeros on all but the first."""
    return jnp.where(jax.lax.axis_index(over) == 0, x, jnp.zeros_like(x)) if over else x


# How many products a GPU's matrix unit makes while one weight is read from memory; and how many
# times as long a weight takes that is copied.
_PRODUCTS, _COPIES = 240, 3


def tile_of(rows: int, experts: int) -> int | None:
    """Rows of a tile, or None where `ragged_dot` costs less; `rows` are tokens sorted by expert.

    On most devices `ragged_dot` multiplies every row with every expert, and holds the rows as
    often. Tiles are so large that an expert has one on average: there are at most twice as many
    tiles as experts, each with a copy of its weights. For 2,048 tokens of Qwen3-30B-A3B, 8 of 128
    experts each, that is twice the operations that are needed in place of 128 times, and 5 GB in
    place of 20 on a CPU.
    """
    if rows == 0:
        return None
    tile = 1 << (-(-rows // experts) - 1).bit_length()
    tiles = most_tiles(rows, experts, tile) * (tile + _COPIES * _PRODUCTS)
    return tile if tiles < experts * (rows + _PRODUCTS) else None


class StackedLinear(nnx.Module):
    """A linear layer of each expert: `kernel` ``[E, in, out]``, and `bias` ``[E, out]`` or None."""

    def __init__(
        self,
        experts: int,
        in_size: int,
        out_size: int,
        *,
        gain: float = 1.0,
        use_bias: bool = False,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        init = jax.nn.initializers.variance_scaling(
            gain**2, "fan_in", "truncated_normal", batch_axis=(0,)
        )
        self.dtype = dtype
        self.kernel = nnx.Param(init(rngs.params(), (experts, in_size, out_size), param_dtype))
        self.bias = nnx.Param(jnp.zeros((experts, out_size), param_dtype)) if use_bias else None

    def __call__(
        self, x: jax.Array, group_sizes: jax.Array, over: tuple[str, ...] = ()
    ) -> jax.Array:
        """Maps ``[M, in]``, sorted by expert, to ``[M, out]``.

        Within `shard_map` the inputs may be split over axes of a mesh, `over`: then the result is
        a part of a sum, and only the first device's part has the bias.
        """
        kernel = self.kernel.get_value().astype(self.dtype)
        y = jax.lax.ragged_dot(x.astype(self.dtype), kernel, group_sizes)
        bias = self._bias(y.dtype, over)
        if bias is None:
            return y
        return y + jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=x.shape[0])

    def of_tiles(self, x: jax.Array, experts: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Maps tiles ``[U, t, in]``, each of one of the `experts` ``[U]``, to ``[U, t, out]``."""
        kernel = self.kernel.get_value()[experts].astype(self.dtype)
        y = jnp.einsum("uti,uio->uto", x.astype(self.dtype), kernel)
        bias = self._bias(y.dtype, over)
        return y if bias is None else y + bias[experts][:, None]

    def _bias(self, dtype: DTypeLike, over: tuple[str, ...]) -> jax.Array | None:
        return None if self.bias is None else once(self.bias.get_value().astype(dtype), over)


class Router(nnx.Module):
    """What experts are chosen by: `kernel` ``[D, E]``, and `bias` ``[E]`` or None.

    `correction` is float32 ``[E]`` whatever the dtype of the others, or None; see `route`.
    """

    def __init__(
        self, in_size: int, experts: ExpertsConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        count, is_corrected = experts.count, experts.scores == "sigmoid"
        self.kernel = nnx.Param(init(rngs.params(), (in_size, count), param_dtype))
        self.bias = nnx.Param(jnp.zeros(count, param_dtype)) if experts.has_biases else None
        self.correction = nnx.Param(jnp.zeros(count, jnp.float32)) if is_corrected else None


class Experts(nnx.Module):
    """Gated layers of which a router chooses some for each token; no token is dropped."""

    def __init__(
        self, config: TransformerConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        assert config.experts is not None
        experts, size = config.experts, config.hidden_size
        count, inner, shared = experts.count, experts.intermediate_size, experts.shared_size
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        make: Any = functools.partial(
            StackedLinear, count, use_bias=experts.has_biases, rngs=rngs, **dtypes
        )
        self.config = config
        self.router = Router(size, experts, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj = make(size, inner)
        self.up_proj = make(size, inner)
        self.down_proj = make(inner, size, gain=output_gain(config))
        self.shared = (
            None if shared is None else FeedForward(config, width=shared, rngs=rngs, **dtypes)
        )

    def __call__(self, x: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """Maps ``[B, T, D]`` to ``[B, T, D]``; `over` are axes that split inner sizes."""
        experts = self.config.experts
        assert experts is not None

        def compute(x: jax.Array, sizes: jax.Array) -> jax.Array:
            tile = tile_of(x.shape[0], experts.count)
            if tile is None:
                return self.of_sorted(x, sizes, over)
            return self.in_tiles(x, sizes, tile, over)

        bias, correction = (
            None if part is None else part.get_value()
            for part in (self.router.bias, self.router.correction)
        )
        kernel = self.router.kernel.get_value()
        y = apply_experts(x, kernel, experts, compute, bias=bias, correction=correction)
        if self.shared is not None:
            y = y + (self.shared.part(x) if over else self.shared(x))
        return jax.lax.psum(y, over) if over else y

    def of_sorted(self, x: jax.Array, sizes: jax.Array, over: tuple[str, ...] = ()) -> jax.Array:
        """The experts' outputs for ``[M, D]``, of which each has the next ``sizes[e]`` rows."""
        gate, up = self.gate_proj(x, sizes), self.up_proj(x, sizes)
        return self.down_proj(gated(gate, up, self.config), sizes, over)

    def in_tiles(
        self, x: jax.Array, sizes: jax.Array, tile: int, over: tuple[str, ...] = ()
    ) -> jax.Array:
        """The same as `of_sorted`, in tiles of so many rows of one expert, see `tile_of`."""
        count = x.shape[0]
        tiles = cut(sizes, count, tile)
        number = jnp.arange(tiles.expert.shape[0], dtype=jnp.int32) - tiles.start
        row = (tiles.first + number * tile)[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]
        is_there = row < tiles.end[:, None]
        # Zeros, so that other experts' tokens do not reach a weight's gradient.
        mine = jnp.where(is_there[..., None], x[jnp.minimum(row, count - 1)], 0)
        gate, up = (layer.of_tiles(mine, tiles.expert) for layer in (self.gate_proj, self.up_proj))
        y = self.down_proj.of_tiles(gated(gate, up, self.config), tiles.expert, over)
        out = jnp.zeros((count, y.shape[-1]), y.dtype)
        return out.at[jnp.where(is_there, row, count)].set(y, mode="drop")
