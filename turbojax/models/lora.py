"""Low-rank adapters (LoRA, Hu et al., 2021) beside the weights of a decoder, INT4 or floats.

A linear layer with an adapter computes ``x W^T + bias + alpha / rank * (x A^T) B^T``: `W` is
frozen, `A` and `B` are float32 and are trained. Adapters are a pytree of their own, so that
`jax.grad` and an optimizer take them directly; `with_adapters` puts them into a decoder, which then
runs like any other.

In the layers of a `Decoder` they are pairs by the names of linear layers, float32 ``[in, R]`` and
``[R, out]``, scaled: what `turbojax.flax.projections.AdaptedLinear` holds.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from turbojax import _checks
from turbojax._pytrees import pytree
from turbojax.flax.norms import rms_norm
from turbojax.matmul.int4.reference import activate
from turbojax.matmul.int4.static import GRADIENTS, Activation, Gradient
from turbojax.matmul.int4.weight import pad_rows
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, LayerParams, adapted_linears
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.quantized_layer import (
    LINEARS,
    QuantizedExperts,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedMlp,
)
from turbojax.models.tensor_parallel.layout import channels, hidden_axes, picked, qkv_outputs, share
from turbojax.models.tensor_parallel.specs import assemble, axes_named, spec_of
from turbojax.models.transformer import Transformer
from turbojax.sharding import Axes

RANK, ALPHA = 8, 16.0
LATENT_LINEARS = ("q_a", "q_b", "kv_a", "kv_b")
"""Names of linear layers of latent attention that other attention does not have."""
_OF_MLP = LINEARS[4:]

AnyDecoder = TypeVar("AnyDecoder", Decoder, QuantizedDecoder)
Mergeable = TypeVar("Mergeable", Decoder, Transformer)


@pytree
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A low-rank addition to a linear layer.

    Attributes:
      a: float32 ``[rank, in]``.
      b: float32 ``[out, rank]``.
    """

    a: jax.Array
    b: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a decoder: what is trained, saved and loaded.

    Attributes:
      layers: for each layer its adapters by the names of linear layers, some of `LINEARS` and
        `LATENT_LINEARS`.
      scale: factor of every adapter's output, ``alpha / rank``.
    """

    layers: tuple[dict[str, Adapter], ...]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the linear layers that have an adapter in at least one layer."""
        names = (*LINEARS, *LATENT_LINEARS)
        return tuple(name for name in names if any(name in layer for layer in self.layers))


@pytree
@dataclasses.dataclass(frozen=True)
class LoraLinear:
    """A `QuantizedLinear` with adapters, or none, which is differentiable: its tokens are floats.

    For layers that are joined, such as q, k and v, `a` has one adapter's rows after the other, and
    `b` their columns, with zeros where other adapters' outputs are.

    Attributes:
      base: the frozen layer.
      a: float32 ``[R, in]``, or None.
      b: float32 ``[out, R]``, scaled; for a gated layer the gate's outputs first. None without `a`.
      gradient: of the product with the base's weight, see `matmul`.
    """

    base: QuantizedLinear
    a: jax.Array | None
    b: jax.Array | None
    gradient: Gradient = dataclasses.field(metadata={"static": True})

    def __call__(
        self,
        x: jax.Array,
        *,
        activation: Activation | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Maps ``[..., in]`` to ``[..., out]``; see `QuantizedLinear`."""
        base = functools.partial(self._base, gradient=self.gradient)
        if self.a is None or self.b is None:
            return base(self.base, x, activation=activation, residual=residual)
        weight = self.base.weight
        if activation is None:
            delta = _product(_product(x, self.a), self.b)
            return base(self.base, x, residual=delta if residual is None else residual + delta)
        # Adapters add before the activation, so that is computed outside of the product. Rows are
        # those of the weight: gate and partner in turns.
        # float32 where sums could exceed float16, which those in a product's epilogue never do.
        dtype, x = x.dtype, x.astype(jnp.float32) if x.dtype == jnp.float16 else x
        delta = _product(_product(x, self.a), pad_rows(self.b, weight))
        bias = None if self.base.bias is None else pad_rows(self.base.bias, weight)
        plain = dataclasses.replace(weight, out_size=delta.shape[-1], gated=False)
        rows = dataclasses.replace(self.base, weight=plain, bias=bias)
        sums = base(rows, x, residual=delta).astype(jnp.float32)
        flat = activate(sums.reshape(-1, sums.shape[-1]), activation)[:, : weight.result_size]
        out = flat.reshape(*x.shape[:-1], -1).astype(dtype)
        return out if residual is None else out + residual

    def after_norm(
        self, hidden: jax.Array, norm: jax.Array, eps: float, activation: Activation | None = None
    ) -> jax.Array:
        """Applies the layer to an RMSNorm's output; see `QuantizedLinear`."""
        return self(rms_norm(hidden, norm, eps), activation=activation)

    @staticmethod
    def _base(linear: QuantizedLinear, x: jax.Array, **options: Any) -> jax.Array:
        if linear.weight.scale_dtype != "e4m3":
            options["gradient"] = "exact"
        return linear(x, **options)


def init_adapters(
    decoder: Decoder | QuantizedDecoder,
    *,
    rank: int = RANK,
    alpha: float = ALPHA,
    targets: Sequence[str] | None = None,
    seed: int = 0,
) -> Adapters:
    """New adapters, which change nothing yet: `B` is zero.

    Args:
      decoder: the model that they are for; its weights are not looked at.
      rank: of each.
      alpha: outputs are multiplied by ``alpha / rank``.
      targets: which linear layers have one, some of ``("q", "k", "v", "o", "gate", "up", "down")``,
        or of latent attention ``"q"``, or ``"q_a"`` and ``"q_b"`` where queries have a latent,
        ``"kv_a"``, ``"kv_b"`` and ``"o"``; None for all of them, or with experts for those of
        attention.
      seed: of `A`, whose numbers are uniform within ``1 / sqrt(in)``, as in PEFT.

    Returns:
      The adapters, float32.

    Raises:
      TypeError: if the decoder or a number is of another type.
      ValueError: if `rank` or `alpha` is not positive, or a target is unknown, named twice, or
        there is none.
      NotImplementedError: if a target is a linear layer of experts.
    """
    _check_decoder(decoder)
    _checks.check_sizes(rank=rank)
    _checks.check_number("alpha", alpha)
    if not alpha > 0:
        raise ValueError(f"{alpha=} must be positive")
    sizes = linear_sizes(decoder.config)
    if targets is None:
        inside = () if decoder.config.experts is None else _OF_MLP
        targets = [name for name in sizes if name not in inside]
    names = tuple(targets)
    if not names or len(set(names)) < len(names) or not set(names) <= set(sizes):
        raise ValueError(f"targets={names} must be some of {tuple(sizes)}, each once")
    for i in range(len(decoder.layers)):
        _refuse_experts(decoder.config, i, names)
    keys = iter(jax.random.split(jax.random.key(seed), len(names) * len(decoder.layers)))

    def adapter(name: str) -> Adapter:
        out_size, in_size = sizes[name]
        bound = in_size**-0.5
        a = jax.random.uniform(next(keys), (rank, in_size), jnp.float32, -bound, bound)
        return Adapter(a, jnp.zeros((out_size, rank), jnp.float32))

    layers = tuple({name: adapter(name) for name in names} for _ in decoder.layers)
    return Adapters(layers, float(alpha) / rank)


def with_adapters(
    decoder: AnyDecoder, adapters: Adapters, *, gradient: Gradient | None = None
) -> AnyDecoder:
    """A decoder with these adapters beside its linear layers, in place of any that it had.

    It shares the weights, and can be made anew in every training step. Its layers read tokens as
    floats, so gradients reach the adapters of all layers. Products with `A` and `B` are in the
    decoder's dtype.

    Args:
      decoder: the frozen model.
      adapters: of its sizes.
      gradient: of the products with weights whose scales are e4m3, see `turbojax.fireq.matmul`:
        ``"e4m3"`` for speed, the default, or ``"exact"``. None of a `Decoder`, whose gradients
        are exact.

    Returns:
      The decoder, for `generate`, `score`, the engine, and for training.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if adapters have other sizes, or the gradient is unknown, or given of a
        `Decoder`.
      NotImplementedError: if there are adapters of experts, or a layer has something other than
        gated feed-forward layers and experts.
    """
    _check_decoder(decoder)
    _check_kind(adapters)
    gradient = usual_gradient(decoder, gradient)
    check_adapters(adapters, decoder.config)
    config, axes = decoder.config, decoder.axes
    if isinstance(decoder, Decoder):
        scaled = [scaled_pairs(own, adapters.scale) for own in adapters.layers]
        add = functools.partial(added, config=config, axes=axes)
        floats = tuple(map(add, decoder.layers, scaled))
        return dataclasses.replace(decoder, layers=floats)
    assert gradient is not None
    layers = tuple(
        layer_with_adapters(layer, i, adapters, config, gradient, axes)
        for i, layer in enumerate(decoder.layers)
    )
    return dataclasses.replace(decoder, layers=layers)


def usual_gradient(
    decoder: Decoder | QuantizedDecoder, gradient: Gradient | None
) -> Gradient | None:
    """The gradient of products with INT4 weights, ``"e4m3"`` by default; None of float weights."""
    if isinstance(decoder, Decoder):
        if gradient is not None:
            raise ValueError(f"{gradient=} is for INT4 weights: must be None of others")
        return None
    if gradient is None:
        return "e4m3"
    if gradient not in GRADIENTS:
        raise ValueError(f"{gradient=} must be one of {GRADIENTS}")
    return gradient


def layer_with_adapters(
    layer: QuantizedLayer,
    number: int,
    adapters: Adapters,
    config: TransformerConfig,
    gradient: Gradient = "e4m3",
    axes: Axes | None = None,
) -> QuantizedLayer:
    """One layer with its adapters, see `with_adapters`; `axes` are those it is split over."""
    own, mlp = adapters.layers[number], layer.mlp
    _refuse_experts(config, number, tuple(own))
    if not isinstance(mlp, QuantizedMlp | QuantizedExperts):
        raise NotImplementedError(
            f"layers[{number}].mlp is a {type(mlp).__name__}: must be a QuantizedMlp or "
            "QuantizedExperts"
        )
    return joined_layer(layer, own, adapters.scale, config, gradient, axes)


def joined_layer(
    layer: QuantizedLayer,
    adapters: Mapping[str, Adapter],
    scale: float,
    config: TransformerConfig,
    gradient: Gradient,
    axes: Axes | None = None,
) -> QuantizedLayer:
    """A layer with these adapters, which fit it; see `layer_with_adapters`."""
    sizes = linear_sizes(config)

    def join(linear: Any, *names: str) -> Any:
        joined = _join(adapters, sizes, scale, gradient, linear, *names)
        return _split(joined, names, config, axes)

    mlp = layer.mlp
    if isinstance(mlp, QuantizedMlp):
        gate_up, down = join(mlp.gate_up, "gate", "up"), join(mlp.down, "down")
        mlp = dataclasses.replace(mlp, gate_up=gate_up, down=down)
    qkv, o = join(layer.qkv, "q", "k", "v"), join(layer.o, "o")
    return dataclasses.replace(layer, qkv=qkv, o=o, mlp=mlp)


def merge_adapters(model: Mergeable, adapters: Adapters) -> Mergeable:
    """A model whose weights are ``W + scale * B A``: it computes the same without adapters.

    Sums are float32, and are rounded once to the weights' dtype.

    Args:
      model: a `Decoder` without adapters, or a `Transformer`, which `save` writes. It is left as it
        is; the result shares all arrays that have no adapter.
      adapters: of its sizes.

    Raises:
      TypeError: if an argument is of another type, such as a `QuantizedDecoder`: its 4 bits would
        round adapters away.
      ValueError: if adapters have other sizes, or the decoder has adapters, or is split over a
        mesh: merge before `shard`.
      NotImplementedError: as `with_adapters`.
    """
    if not isinstance(model, Decoder | Transformer):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Decoder or a Transformer: adapters are "
            "merged into floating-point weights alone"
        )
    _check_kind(adapters)
    check_adapters(adapters, model.config)
    scaled = [scaled_pairs(own, adapters.scale) for own in adapters.layers]
    if isinstance(model, Transformer):
        return merged_transformer(model, scaled)
    if model.axes is not None:
        raise ValueError(f"decoder.axes={model.axes} must be None: merge before shard")
    layers = tuple(map(merged, model.layers, scaled))
    return dataclasses.replace(model, layers=layers)


def without_adapters(decoder: AnyDecoder) -> AnyDecoder:
    """The frozen decoder without its adapters: what `with_adapters` was given."""
    _check_decoder(decoder)
    if isinstance(decoder, Decoder):
        floats = tuple(map(removed, decoder.layers))
        return dataclasses.replace(decoder, layers=floats)

    def plain(layer: QuantizedLayer) -> QuantizedLayer:
        if not isinstance(layer.qkv, LoraLinear):
            return layer
        mlp = layer.mlp
        if isinstance(mlp, QuantizedMlp):
            gate_up, down = _base_of(mlp.gate_up), _base_of(mlp.down)
            mlp = dataclasses.replace(mlp, gate_up=gate_up, down=down)
        return dataclasses.replace(layer, qkv=_base_of(layer.qkv), o=_base_of(layer.o), mlp=mlp)

    return dataclasses.replace(decoder, layers=tuple(map(plain, decoder.layers)))


def linear_sizes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear layer by its name."""
    size, inner = config.hidden_size, config.intermediate_size
    heads, latent = config.num_heads, config.latent
    query, key = (n * config.head_dim for n in (heads, config.num_kv_heads))
    mlp = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
    if latent is None:
        return {"q": (query, size), "k": (key, size), "v": (key, size), "o": (size, query), **mlp}
    rank = latent.query_rank
    return {
        **({"q": (query, size)} if rank is None else {"q_a": (rank, size), "q_b": (query, rank)}),
        "kv_a": (latent.rank + latent.rope_dim, size),
        "kv_b": (heads * (latent.nope_dim + latent.value_dim), latent.rank),
        "o": (size, heads * latent.value_dim),
        **mlp,
    }


def check_adapters(adapters: Adapters, config: TransformerConfig) -> None:
    """Raises TypeError unless adapters are floating point, ValueError unless they fit the model."""
    if not math.isfinite(adapters.scale):
        raise ValueError(f"{adapters.scale=} must be finite")
    if len(adapters.layers) != config.num_layers:
        raise ValueError(f"adapters of {len(adapters.layers)} layers, must be {config.num_layers}")
    sizes = linear_sizes(config)
    for i, layer in enumerate(adapters.layers):
        for name, adapter in layer.items():
            if name not in sizes:
                raise ValueError(
                    f"layers[{i}] has an adapter of {name!r}, must be of {tuple(sizes)}"
                )
            for x in (adapter.a, adapter.b):
                _checks.check_float_dtype(f"layers[{i}].{name}", x)
            found = adapter.b.shape[:1] + adapter.a.shape[1:]
            if found != sizes[name] or adapter.a.shape[:1] != adapter.b.shape[1:]:
                raise ValueError(
                    f"layers[{i}].{name}: a.shape={adapter.a.shape} and b.shape={adapter.b.shape} "
                    f"must be [rank, {sizes[name][1]}] and [{sizes[name][0]}, rank]"
                )
        _refuse_experts(config, i, tuple(layer))


def _refuse_experts(config: TransformerConfig, layer: int, names: Sequence[str]) -> None:
    """Raises NotImplementedError if linear layers of these names are those of experts."""
    inside = sorted(set(names) & set(_OF_MLP))
    if inside and config.has_experts(layer):
        of_all = linear_sizes(config)
        raise NotImplementedError(
            f"adapters of {', '.join(inside)} in layer {layer} are not supported: it has experts, "
            f"beside which adapters must be of {', '.join(x for x in of_all if x not in _OF_MLP)}"
        )


def scaled_pairs(
    adapters: Mapping[str, Adapter], scale: float
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """``[in, R]`` and ``[R, out]``, scaled, as a layer of a `Decoder` has them; see `Pairs`."""
    return {name: (x.a.T, x.b.T * scale) for name, x in adapters.items()}


def _join(
    adapters: Mapping[str, Adapter],
    sizes: Mapping[str, tuple[int, int]],
    scale: float,
    gradient: Gradient,
    linear: QuantizedLinear | LoraLinear,
    *names: str,
) -> LoraLinear:
    """The adapters of the linear layers that `linear` joins, as one."""
    base = _base_of(linear)
    there = [adapters[name] for name in names if name in adapters]
    if not there:
        return LoraLinear(base, None, None, gradient)
    rank = sum(len(adapter.a) for adapter in there)
    blocks, first = [], 0
    for name in names:
        if name not in adapters:
            blocks.append(jnp.zeros((sizes[name][0], rank), jnp.float32))
            continue
        b = adapters[name].b * scale
        after = rank - first - b.shape[1]
        blocks.append(jnp.pad(b, ((0, 0), (first, after))))
        first += b.shape[1]
    a = jnp.concatenate([adapter.a for adapter in there])
    return LoraLinear(base, a, jnp.concatenate(blocks), gradient)


def _split(
    linear: LoraLinear, names: tuple[str, ...], config: TransformerConfig, axes: Axes | None
) -> LoraLinear:
    """The layer with the adapters' arrays split over the mesh like its weights."""
    if axes is None or linear.a is None or linear.b is None:
        return linear
    a: jax.Array = linear.a
    b: jax.Array = linear.b
    weight, heads = linear.base.weight, config.num_heads * config.head_dim
    is_outputs = len(names) > 1

    def part(index: int) -> tuple[jax.Array, jax.Array]:
        if names == ("q", "k", "v"):
            return a, picked(b, qkv_outputs(config, axes, index))
        if is_outputs:
            size = config.intermediate_size
            inner = channels(size, weight.result_size, index)
            both = np.concatenate([inner, np.where(inner < 0, inner, inner + size)])
            return a, picked(b, both)
        size = heads if names == ("o",) else config.intermediate_size
        return picked(a.T, channels(size, weight.in_size, index)).T, b

    over = hidden_axes(axes)
    whole, split = PartitionSpec(), PartitionSpec(over)
    specs = (whole, split) if is_outputs else (PartitionSpec(None, over), whole)
    split_a, split_b = assemble(part, lambda _: specs, axes)
    return dataclasses.replace(linear, a=split_a, b=split_b)


def _base_of(linear: QuantizedLinear | LoraLinear) -> QuantizedLinear:
    return linear.base if isinstance(linear, LoraLinear) else linear


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x w^T`` in `x`'s dtype, summed in float32."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, w.astype(x.dtype), contract, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def _check_decoder(decoder: Any) -> None:
    if not isinstance(decoder, Decoder | QuantizedDecoder):
        raise TypeError(
            f"decoder is a {type(decoder).__name__}, must be a QuantizedDecoder, or a Decoder, as "
            "load_decoder and unstack return it"
        )


def _check_kind(adapters: Any) -> None:
    if not isinstance(adapters, Adapters):
        raise TypeError(f"adapters is a {type(adapters).__name__}, must be Adapters")


Pairs = Mapping[str, tuple[jax.Array, jax.Array]]


def added(
    params: LayerParams, pairs: Pairs, *, config: TransformerConfig, axes: Axes | None
) -> LayerParams:
    """A layer with these adapters in place of any it had, split like its weights over `axes`.

    Outside of `shard_map`; for a device's arrays see `added_on_device`.
    """
    changed = removed(params)
    for name, pair in pairs.items():
        part, linear = _path(name)
        arrays = dict(changed[part][linear])
        kernel = arrays["kernel"]
        # On a mesh inner sizes have zeros at their end, so that all devices have equally much.
        wanted = (kernel.shape[0], pair[0].shape[1]), (pair[1].shape[0], kernel.shape[1])
        for leaf, matrix, shape in zip(("lora_a", "lora_b"), pair, wanted, strict=True):
            if axes is not None:
                more = [(0, new - old) for new, old in zip(shape, matrix.shape, strict=True)]
                spec = spec_of((part, linear, leaf), 2, config, axes)
                sharding = NamedSharding(axes.require_mesh(), spec)
                matrix = jax.device_put(jnp.pad(matrix, more), sharding)
            arrays[leaf] = matrix
        changed[part] = {**changed[part], linear: arrays}
    return changed


def added_on_device(
    params: LayerParams, pairs: Pairs, *, config: TransformerConfig, axes: Axes
) -> LayerParams:
    """A device's arrays of a layer with its part of these adapters, which it has whole.

    For use within `shard_map` over `axes`; differentiable in the adapters.
    """
    changed = removed(params)
    for name, pair in pairs.items():
        part, linear = _path(name)
        arrays = dict(changed[part][linear])
        for leaf, matrix in zip(("lora_a", "lora_b"), pair, strict=True):
            spec = spec_of((part, linear, leaf), 2, config, axes)
            for axis, names in enumerate(spec):
                matrix = _own(matrix, axis, axes_named(names))
            arrays[leaf] = matrix
        changed[part] = {**changed[part], linear: arrays}
    return changed


def _own(matrix: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
    """This device's part of a matrix along an axis, with zeros where all are used up."""
    if not names:
        return matrix
    count = jax.lax.axis_size(names)
    each = share(matrix.shape[axis], count)
    widths = [(0, 0)] * matrix.ndim
    widths[axis] = (0, count * each - matrix.shape[axis])
    first = jax.lax.axis_index(names) * each
    return jax.lax.dynamic_slice_in_dim(jnp.pad(matrix, widths), first, each, axis)


def removed(params: LayerParams) -> LayerParams:
    """A layer without its adapters."""
    changed = dict(params)
    for part, linear in adapted_linears(params):
        arrays = {k: x for k, x in params[part][linear].items() if k not in ("lora_a", "lora_b")}
        changed[part] = {**changed[part], linear: arrays}
    return changed


def merged(params: LayerParams, pairs: Pairs) -> LayerParams:
    """A layer whose kernels have the adapters' products added; ValueError if it has adapters."""
    if found := adapted_linears(params):
        raise ValueError(f"the decoder has adapters of {found}, must have none: without_adapters")
    changed = dict(params)
    for name, pair in pairs.items():
        part, linear = _path(name)
        arrays = changed[part][linear]
        kernel = _sum(arrays["kernel"], *pair)
        changed[part] = {**changed[part], linear: {**arrays, "kernel": kernel}}
    return changed


def merged_transformer(model: Transformer, layers: Sequence[Pairs]) -> Transformer:
    """The same of a `Transformer`, of which `layers` has the adapters of each layer."""
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: x, state)  # The model's own variables stay as they are.
    for layer, pairs in enumerate(layers):
        stack, number = model.config.stack_of(layer)
        for name, pair in pairs.items():
            part, linear = _path(name)
            kernel = state[stack][part][linear]["kernel"]
            stacked = kernel.get_value()
            kernel.set_value(stacked.at[number].set(_sum(stacked[number], *pair)))
    whole: Transformer = nnx.merge(graph, state)
    return whole


def _path(name: str) -> tuple[str, str]:
    return "mlp" if name in ("gate", "up", "down") else "attention", f"{name}_proj"


def _sum(kernel: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + product).astype(kernel.dtype)
