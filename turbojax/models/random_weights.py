"""Decoders with random weights, for measuring speed: on one device, or split over a mesh.

They are made one layer, or one matrix, after the other, so that little but the weights themselves
has to fit. On a mesh, each device makes its own part.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from turbojax.matmul.int4.weight import (
    BLOCK,
    Int4Weight,
    ScaleDtype,
    concatenate,
    gate_and_up,
    quantize_weight,
)
from turbojax.models.config import ExpertsConfig, TransformerConfig
from turbojax.models.decoder import Decoder
from turbojax.models.feed_forward import output_gain
from turbojax.models.quantized import QuantizedDecoder, check_quantizable, norm_shapes
from turbojax.models.quantized_layer import (
    QuantizedExperts,
    QuantizedLayer,
    QuantizedLinear,
    join_layer,
)
from turbojax.models.tensor_parallel.layout import (
    axes_of_model,
    hidden_axes,
    local_config,
    parts,
    stored_config,
)
from turbojax.models.tensor_parallel.specs import partition_specs, spec_of
from turbojax.models.transformer import Block
from turbojax.sharding.axes import Axes

_Part = Literal["embedding", "lm_head", "norm", "dense", "experts"]


def random_decoder(
    config: TransformerConfig,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    seed: int = 0,
    axes: Axes | None = None,
) -> Decoder:
    """A decoder with random weights, for measuring speed.

    Made on the default device one layer after the other, so that nothing but the weights
    themselves has to fit.

    Args:
      config: the shape.
      dtype: of weights and computation.
      seed: of the weights.
      axes: of a mesh that the weights are split over; they are the same as without, and each device
        makes its own part. With more devices than KV heads, some share the tokens of a sequence,
        see `axes_of_model`.

    Raises:
      NotImplementedError, ValueError: if so many devices cannot split the model.
    """
    dtype = jnp.dtype(dtype)
    if axes is not None:
        axes = axes_of_model(config, axes)
    keys = jax.random.split(jax.random.key(seed), config.num_layers + 2)

    def make(key: jax.Array, part: _Part) -> Any:
        return _program(part, config, dtype, axes)(key)

    return Decoder(
        embedding=make(keys[0], "embedding"),
        layers=tuple(
            make(key, "experts" if config.has_experts(i) else "dense")
            for i, key in enumerate(keys[2:])
        ),
        norm=make(keys[0], "norm"),
        lm_head=None if config.tie_embeddings else make(keys[1], "lm_head"),
        config=config,
        dtype=dtype,
        axes=axes,
    )


@functools.lru_cache(maxsize=64)
def _program(
    part: _Part, config: TransformerConfig, dtype: np.dtype, axes: Axes | None
) -> Callable[[jax.Array], Any]:
    """A function that makes a part of a `Decoder` from a key; rounded-up sizes get zeros."""
    make = functools.partial(_make_part, part=part, config=config, dtype=dtype)
    if axes is None:
        return jax.jit(make)
    mesh, key = axes.require_mesh(), jax.random.key(0)
    stored = stored_config(config, axes)
    shapes = jax.eval_shape(
        functools.partial(_make_part, part=part, config=stored, dtype=dtype), key
    )

    def sharding(path: Any, x: jax.ShapeDtypeStruct) -> NamedSharding:
        names = tuple(entry.key for entry in path) or (part,)
        return NamedSharding(mesh, spec_of(names, len(x.shape), config, axes))

    def padded(key: jax.Array) -> Any:
        return jax.tree.map(_pad, make(key), shapes)

    return jax.jit(padded, out_shardings=jax.tree_util.tree_map_with_path(sharding, shapes))


def _make_part(key: jax.Array, part: _Part, config: TransformerConfig, dtype: np.dtype) -> Any:
    if part == "norm":
        return jnp.full(config.hidden_size, 1 - config.norm_offset, dtype)
    if part in ("embedding", "lm_head"):
        return _table(key, config.vocab_size, config.hidden_size, dtype)
    dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype}
    block = Block(config, has_experts=part == "experts", rngs=nnx.Rngs(key), **dtypes)
    return nnx.to_pure_dict(nnx.state(block))


def _table(key: jax.Array, rows: int, size: int, dtype: np.dtype) -> jax.Array:
    return jax.random.normal(key, (rows, size), dtype) * jnp.asarray(size**-0.5, dtype)


def _pad(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """`x` with zeros at the end of the axes that are larger in `like`."""
    widths = [(0, wanted - size) for size, wanted in zip(x.shape, like.shape, strict=True)]
    return jnp.pad(x, widths) if any(width for _, width in widths) else x


def random_quantized_decoder(
    config: TransformerConfig,
    *,
    scale_dtype: ScaleDtype = "e4m3",
    quantize_head: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    seed: int = 0,
    axes: Axes | None = None,
) -> QuantizedDecoder:
    """A quantized decoder with random weights, for measuring speed.

    Made on the default device one matrix after the other, so that little but the codes themselves
    has to fit.

    Args:
      config: the shape.
      scale_dtype: of the groups of weights.
      quantize_head: whether the projection to logits has INT4 weights too.
      dtype: of activations, embedding and head.
      seed: of the weights.
      axes: of a mesh that the weights are split over, see `random_decoder`; the weights differ from
        those without a mesh, as each device rounds its own.

    Raises:
      NotImplementedError: see `check_quantizable`.
      NotImplementedError, ValueError: if so many devices cannot split the model.
    """
    check_quantizable(config)
    if axes is not None:
        axes = axes_of_model(config, axes)
    dtype = jnp.dtype(dtype)
    # Seven for each layer.
    keys = jax.random.split(jax.random.key(seed), 7 * config.num_layers + 2)
    has_head = quantize_head or not config.tie_embeddings
    first = 1 + has_head
    layers = []
    for i in range(config.num_layers):
        own = keys[first + 7 * i : first + 7 * (i + 1)]
        if axes is None:
            layers.append(_Matrices(config, scale_dtype).layer(own, config.has_experts(i)))
        else:
            layers.append(_split_layer(config, config.has_experts(i), scale_dtype, axes)(own))
    head: jax.Array | Int4Weight | None = None
    if quantize_head and axes is None:
        shape = (config.vocab_size, config.hidden_size)
        head = random_weight(keys[0], shape, 1.0, scale_dtype)
    elif quantize_head and axes is not None:
        head = _split_head(config, scale_dtype, axes)(keys[0])
    elif has_head:
        head = _program("lm_head", config, dtype, axes)(keys[0])
    return QuantizedDecoder(
        embedding=_program("embedding", config, dtype, axes)(keys[first - 1]),
        layers=tuple(layers),
        norm=_whole(jnp.ones(config.hidden_size, jnp.float32), axes),
        lm_head=head,
        config=config,
        dtype=dtype,
        axes=axes,
    )


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """Makes quantized layers: whole, or within a `shard_map` over `axes` one device's part."""

    config: TransformerConfig
    scale_dtype: ScaleDtype
    axes: Axes | None = None

    @property
    def local(self) -> TransformerConfig:
        """The sizes of what is made."""
        return self.config if self.axes is None else local_config(self.config, self.axes, BLOCK)

    def layer(self, keys: jax.Array, has_experts: bool) -> QuantizedLayer:
        """A layer made from seven keys."""
        config = self.local
        size, inner = config.hidden_size, config.intermediate_size
        kv_size = config.num_kv_heads * config.head_dim
        query_size = config.num_heads * config.head_dim
        of_kv = self._axes(of_kv=True)
        linears = {
            "q": self.linear(keys[0], query_size, size, config.qkv_bias),
            "k": self.linear(keys[1], kv_size, size, config.qkv_bias, names=of_kv),
            "v": self.linear(keys[2], kv_size, size, config.qkv_bias, names=of_kv),
            "o": self.linear(keys[3], size, query_size, config.output_bias, gain=self._gain()),
        }
        norms = {name: jnp.ones(shape, jnp.float32) for name, shape in norm_shapes(config).items()}
        sinks = jnp.zeros(config.num_heads, jnp.float32) if config.attention_sinks else None
        if config.experts is not None and has_experts:
            experts = self.experts(keys[4:], config.experts)
            return join_layer(linears, norms, experts=experts, sinks=sinks)
        whole = self.config.intermediate_size
        gate, up = (
            self.linear(key, inner, size, config.mlp_bias, whole=whole) for key in keys[4:6]
        )
        down = self.linear(keys[6], size, inner, config.mlp_bias, gain=self._gain())
        return join_layer({**linears, "gate": gate, "up": up, "down": down}, norms, sinks=sinks)

    def linear(
        self,
        key: jax.Array,
        out_size: int,
        in_size: int,
        has_bias: bool,
        *,
        gain: float = 1.0,
        names: tuple[str, ...] | None = None,
        whole: int | None = None,
    ) -> QuantizedLinear:
        """A linear layer; for the arguments see `weight`."""
        bias = jnp.zeros(out_size, jnp.float32) if has_bias else None
        weight = self.weight(key, out_size, in_size, gain=gain, names=names, whole=whole)
        return QuantizedLinear(weight, bias)

    def weight(
        self,
        key: jax.Array,
        out_size: int,
        in_size: int,
        *,
        gain: float = 1.0,
        names: tuple[str, ...] | None = None,
        whole: int | None = None,
    ) -> Int4Weight:
        """A weight with `out_size` outputs, made from a key that is the same on all devices.

        Parts differ along the axes `names` of the mesh, None for all. `whole` is the number of
        outputs of the whole; if parts are rounded up, the outputs beyond are zeros.
        """
        names = self._axes() if names is None else names
        index = jax.lax.axis_index(names) if names else 0
        weight = random_weight(
            jax.random.fold_in(key, index) if names else key,
            (out_size, in_size),
            gain,
            self.scale_dtype,
        )
        if not names or whole is None or whole == out_size * parts(self.axes):
            return weight
        known = jnp.arange(weight.output_scale.size) + index * out_size < whole
        return dataclasses.replace(weight, output_scale=jnp.where(known, weight.output_scale, 0))

    def experts(self, keys: jax.Array, shape: ExpertsConfig) -> QuantizedExperts:
        """A layer of experts, made from three keys."""
        size, width, whole = self.config.hidden_size, shape.intermediate_size, self.config.experts
        assert whole is not None

        def gate_up(key: jax.Array) -> Int4Weight:
            both = [
                self.weight(k, width, size, whole=whole.intermediate_size)
                for k in jax.random.split(key)
            ]
            return gate_and_up(*both) if shape.swiglu_limit is None else concatenate(both)

        def down(key: jax.Array) -> Int4Weight:
            return self.weight(key, size, width, gain=self._gain())

        router = jax.random.normal(keys[0], (size, shape.count), jnp.float32) * size**-0.5
        stacks = [
            jax.lax.map(make, jax.random.split(key, shape.count))
            for make, key in zip((gate_up, down), keys[1:], strict=True)
        ]
        sizes = (shape.count,), (shape.count, 2 * width), (shape.count, size)
        biases = [jnp.zeros(x, jnp.float32) if shape.has_biases else None for x in sizes]
        return QuantizedExperts(router, *stacks, *biases)

    def _gain(self) -> float:
        """The gain of what is added to the residual stream, as a sum over all devices."""
        return float(output_gain(self.config) * parts(self.axes) ** -0.5)

    def _axes(self, *, of_kv: bool = False) -> tuple[str, ...]:
        if self.axes is None:
            return ()
        return self.axes.of_dimension("heads") if of_kv else hidden_axes(self.axes)


@functools.lru_cache(maxsize=64)
def _split_layer(
    config: TransformerConfig, has_experts: bool, scale_dtype: ScaleDtype, axes: Axes
) -> Callable[[jax.Array], QuantizedLayer]:
    """A function that makes a layer from seven keys, each device its own part."""

    def make(keys: jax.Array) -> QuantizedLayer:
        return _Matrices(config, scale_dtype, axes).layer(keys, has_experts)

    return _each_device(make, jax.random.split(jax.random.key(0), 7), ("layers", 0), config, axes)


@functools.lru_cache(maxsize=8)
def _split_head(
    config: TransformerConfig, scale_dtype: ScaleDtype, axes: Axes
) -> Callable[[jax.Array], Int4Weight]:
    """A function that makes the projection to logits from a key, each device its own part."""
    rows = stored_config(config, axes).vocab_size // parts(axes)

    def make(key: jax.Array) -> Int4Weight:
        return _Matrices(config, scale_dtype, axes).weight(
            key, rows, config.hidden_size, whole=config.vocab_size
        )

    return _each_device(make, jax.random.key(0), ("lm_head",), config, axes)


def _each_device(
    make: Callable[[jax.Array], Any],
    key: jax.Array,
    place: tuple[Any, ...],
    config: TransformerConfig,
    axes: Axes,
) -> Callable[[jax.Array], Any]:
    """`make` on every device at once; its results together are the part of a decoder at `place`."""
    mesh = axes.require_mesh()

    def split(specs: Any) -> Any:
        # Within `make` an array is a device's own part, without mesh axes that could be checked.
        return jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)

    # Sizes do not depend on the device, so that any specs serve to find them.
    local = jax.eval_shape(split(P(mesh.axis_names)), key)
    nothing: Any = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), jnp.float32)
    norm = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
    fields: dict[str, Any] = {"layers": (), "lm_head": None, "norm": norm}
    fields[place[0]] = (local,) if place[1:] else local
    abstract = QuantizedDecoder(
        embedding=nothing,
        config=config,
        dtype=jnp.dtype(jnp.float32),
        axes=axes,
        **fields,
    )
    specs = getattr(partition_specs(abstract, axes), place[0])
    return jax.jit(split(specs[0] if place[1:] else specs))


def _whole(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Copies the array to every device."""
    return x if axes is None else jax.device_put(x, NamedSharding(axes.require_mesh(), P()))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weight(
    key: jax.Array, shape: tuple[int, int], gain: float, scale_dtype: ScaleDtype
) -> Int4Weight:
    """Normal random weights ``[out, in]`` of standard deviation ``gain / sqrt(in)``."""
    scale = jnp.full(shape[0], gain * shape[1] ** -0.5, jnp.float32)
    values = jax.random.normal(key, shape, jnp.float32)
    return quantize_weight(values, scale_dtype=scale_dtype, output_scale=scale)
