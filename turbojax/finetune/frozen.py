"""Frozen weights over a mesh, beside which adapters are trained.

Sequences of a step are split over `Axes.batch`. The layers of a `Decoder` are split over heads as
they are for inference (`turbojax.models.tensor_parallel`). Over `Axes.batch` matrices are slices,
too, which a layer gathers when it runs and again in the backward pass. Adapters are small, and
whole on every device, with the optimizer's state.
"""

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from turbojax.finetune.settings import Settings
from turbojax.finetune.split import Split, check_batch
from turbojax.models import StoredDecoder, TransformerConfig
from turbojax.models.decoder import Decoder
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.models.tensor_parallel.specs import specs_of_part
from turbojax.sharding import Axes

AnyDecoder = TypeVar("AnyDecoder", Decoder, QuantizedDecoder)
Tree = TypeVar("Tree")

Cuts = tuple[int | None, ...]
"""For each array of a tree along which axis it is a slice; None if it is whole."""

_ENDS = ("embedding", "norm", "lm_head")
"""What of a decoder lies outside of its layers."""


class AdapterSplit(Split):
    """How the sequences of a step lie over a mesh, beside adapters, which every device has."""

    def __init__(self, axes: Axes, dtype: str) -> None:
        """As a `Split` without `weights`."""
        super().__init__(axes, dtype, weights=False)

    def check(self, settings: Settings) -> None:
        """Raises ValueError unless the sequences of a step split evenly."""
        check_batch(settings, self.axes)


def check_frozen(axes: Axes | None, *, is_quantized: bool) -> None:
    """Raises NotImplementedError for INT4 weights whose heads are split."""
    over = hidden_axes(axes)
    if is_quantized and over:
        raise NotImplementedError(
            f"adapters beside INT4 weights are not trained over {over}, the axes of heads: there "
            "joined layers have their rows in another order, and each device rounds its own share "
            "of a token, so that the gradient would not be that of one device. Split sequences "
            "alone (data), or take floating-point weights"
        )


def sliced(decoder: Decoder | QuantizedDecoder | StoredDecoder) -> Decoder | QuantizedDecoder:
    """A decoder whose matrices are slices over its `axes.batch`, beside how they are split already.

    Args:
      decoder: over a mesh. A `StoredDecoder`'s layers are read one after the other, so that no
        device ever holds all of them.

    Returns:
      The decoder; a `Decoder` for a stored one. Programs take it as any other on this mesh, and
      gather what is sliced.

    Raises:
      ValueError: if it is not on a mesh.
    """
    axes, config = decoder.axes, decoder.config
    if axes is None:
        raise ValueError("decoder.axes=None must be those of a mesh: shard, or load onto one")
    mesh = axes.require_mesh()

    def placed(part: Any) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _layout(part, decoder)[0])
        return jax.device_put(part, shardings)

    # A layer is read, and cut, before the next one is.
    layers = tuple(placed(decoder.layers[i]) for i in range(config.num_layers))
    ends = placed({name: getattr(decoder, name) for name in _ENDS})
    if isinstance(decoder, StoredDecoder):
        return Decoder(layers=layers, config=config, dtype=decoder.dtype, axes=axes, **ends)
    return dataclasses.replace(decoder, layers=layers, **ends)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a decoder that `sliced` returned lies on its mesh, or another one that is not cut.

    Attributes:
      specs: the decoder with a `PartitionSpec` in place of each array.
      layers: the cuts of each layer.
      ends: those of what lies outside of layers.
      names: the axes over which slices lie.
    """

    specs: Any
    layers: tuple[Cuts, ...]
    ends: Cuts
    names: tuple[str, ...]

    @classmethod
    def of(cls, decoder: Decoder | QuantizedDecoder, *, is_sliced: bool) -> "Layout":
        """The layout of this decoder's arrays; `is_sliced` says whether `sliced` made it."""
        layers = [_layout(layer, decoder, is_sliced) for layer in decoder.layers]
        ends, cuts = _layout({x: getattr(decoder, x) for x in _ENDS}, decoder, is_sliced)
        specs = dataclasses.replace(decoder, layers=tuple(x for x, _ in layers), **ends)
        names = () if decoder.axes is None else decoder.axes.of_dimension("batch")
        return cls(specs, tuple(x for _, x in layers), cuts, names)

    def with_whole_ends(self, decoder: AnyDecoder) -> AnyDecoder:
        """A device's decoder, within `shard_map`, with whole embeddings."""
        ends = {x: getattr(decoder, x) for x in _ENDS}
        found: AnyDecoder = dataclasses.replace(decoder, **self.gathered(ends, self.ends))
        return found

    def gathered(self, part: Tree, cuts: Cuts) -> Tree:
        """The whole arrays of a part of the decoder, within `shard_map`."""
        leaves, tree = jax.tree.flatten(part)
        whole = [
            x if cut is None else jax.lax.all_gather(x, self.names, axis=cut, tiled=True)
            for x, cut in zip(leaves, cuts, strict=True)
        ]
        found: Tree = jax.tree.unflatten(tree, whole)
        return found


def _layout(part: Any, decoder: Any, is_sliced: bool = True) -> tuple[Any, Cuts]:
    """How a part of a decoder lies: its `PartitionSpec`s, and the cuts of its arrays.

    Matrices are cut along their first axis that heads do not split and that the devices divide.
    """
    config: TransformerConfig = decoder.config
    axes: Axes | None = decoder.axes
    leaves, tree = jax.tree.flatten(part)
    if axes is None:
        return jax.tree.unflatten(tree, [PartitionSpec()] * len(leaves)), (None,) * len(leaves)
    names, count = axes.of_dimension("batch"), axes.size("batch")
    specs: list[PartitionSpec] = []
    cuts: list[int | None] = []
    for x, spec in zip(leaves, jax.tree.leaves(specs_of_part(part, config, axes)), strict=True):
        found: list[Any] = [*spec, *[None] * (x.ndim - len(spec))]
        free = (i for i, n in enumerate(x.shape) if found[i] is None and n % count == 0)
        cut = next(free, None) if is_sliced and count > 1 and x.ndim > 1 else None
        if cut is not None:
            found[cut] = names
        specs.append(PartitionSpec(*found))
        cuts.append(cut)
    return jax.tree.unflatten(tree, specs), tuple(cuts)
