"""Weights that are split over devices, and are whole only where they are used (FSDP).

A device holds its slice of each matrix, and of the optimizer's two moments of it, in float32. A
layer gathers the slices of its matrices, cast to the dtype that it computes in, when it runs, and
again in the backward pass; the sum of what the devices add to a gradient arrives as slices, too
(ZeRO, Rajbhandari et al., 2020, stage 3). So a layer's weights are whole on a device for as long as
that layer runs, and no longer.

Over an axis of heads layers are split as a decoder's are (tensor parallelism, Shoeybi et al.,
2019): a device has some heads and some of the inner size, and gathers no more than these. Each
device of that axis differentiates its own copy of what they all have, such as the residual stream,
so that what they add to a gradient is summed wherever the forward pass sums, and for weights at the
end.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turbojax._pytrees import leaves_by_path
from turbojax.finetune.settings import Settings
from turbojax.models import TransformerConfig
from turbojax.models.config import STACKS
from turbojax.models.tensor_parallel.layout import check_axes
from turbojax.models.tensor_parallel.specs import spec_of
from turbojax.sharding.axes import Axes

Tree = TypeVar("Tree")

_LAYERS = tuple(f"['{name}']" for name in STACKS)
"""Parts of the paths of arrays with a leading axis of layers, which is scanned and never split."""


@dataclasses.dataclass(frozen=True)
class Split:
    """How the arrays of a run are laid over a mesh: its weights, optimizer state and sequences.

    Sequences of a step are split over `axes.batch`, their tokens over `axes.sequence`, and weights
    over both, unless `weights` is False: then they are whole on every device (data parallelism
    alone). Layers of the model of `config` are also split over `axes.heads`, in any case. Layers
    compute in `dtype`: their matrices are cast to it before they are gathered. Raises ValueError if
    `axes` split nothing, or have no mesh of devices, or heads and inner sizes cannot be split.
    """

    axes: Axes
    dtype: str
    weights: bool = True
    config: TransformerConfig | None = None

    def __post_init__(self) -> None:
        if not self.axes.names:
            raise ValueError(f"axes={self.axes} must split batch, heads or sequence")
        if not isinstance(self.axes.require_mesh(), Mesh):
            raise ValueError(f"the mesh of axes={self.axes} must be one of devices")
        if self.axes.heads and self.config is not None:
            _check_sizes(self.config, self.of_heads)

    @property
    def of_heads(self) -> Axes:
        """The axes of heads alone, over which layers are split."""
        return Axes(heads=self.axes.heads, mesh=self.axes.mesh)

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices."""
        mesh = self.axes.require_mesh()
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def names(self) -> tuple[str, ...]:
        """The axes of the mesh over which something is split: all devices that take part."""
        return self.axes.names

    @property
    def count(self) -> int:
        """How many devices take part."""
        return self._count(self.names)

    def _count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    def check(self, settings: Settings) -> None:
        """Raises ValueError unless a step splits evenly over the devices.

        Each gets as many sequences, of each sequence two chunks of tokens of the same size, and of
        those as many to compute logits of.
        """
        check_batch(settings, self.axes)
        context, axes = settings.context, self.axes
        parts = axes.size("sequence")
        if parts > 1 and context % (2 * parts):
            raise ValueError(
                f"{context=} must be a multiple of {2 * parts}: two chunks for each of the {parts} "
                f"devices of axes={axes.sequence}"
            )
        if (context // parts) % axes.size("heads"):
            raise ValueError(
                f"{context=} must be a multiple of {parts * axes.size('heads')}, the devices of "
                f"axes={(*axes.of_dimension('sequence'), *axes.of_dimension('heads'))}"
            )

    def place(self, path: str, shape: tuple[int, ...]) -> "_Place":
        """Along which axes an array is split, and over what.

        Over heads as a decoder's, see `spec_of`, and over all other devices along the first axis
        that is left and that they divide; what heads do not split over all devices. So slices lie
        one after the other. Vectors (of a layer) are small and are not split but over heads. `path`
        is `jax.tree_util.keystr` of a weight or of one of its moments, `shape` that of the whole
        array.
        """
        first = 1 if any(name in path for name in _LAYERS) else 0
        heads, over = self._axis_of_heads(path, shape), self.axes.of_dimension("heads")
        names = self.names
        if heads is not None:
            names = tuple(name for name in names if name not in over)
        found = None
        if self.weights and names and len(shape) >= first + 2:
            count = self._count(names)
            free = (i for i in range(first, len(shape)) if i != heads and shape[i] % count == 0)
            found = next(free, None)
        return _Place(heads, found, names)

    def _axis_of_heads(self, path: str, shape: tuple[int, ...]) -> int | None:
        names = re.findall(r"\['(\w+)'\]", path)
        stack = next((i for i, name in enumerate(names) if name in STACKS), None)
        # Embeddings are split over all devices. Of optimizers some arrays are not like the weight.
        if not self.axes.heads or stack is None or len(shape) < 2:
            return None
        assert self.config is not None
        spec = spec_of(tuple(names[stack + 1 :]), len(shape) - 1, self.config, self.of_heads)
        axis = next((1 + i for i, name in enumerate(spec) if name is not None), None)
        is_even = axis is not None and shape[axis] % self.axes.size("heads") == 0
        return axis if is_even else None

    def specs(self, tree: Any) -> Any:
        """A tree of `PartitionSpec` for a tree of arrays or of their shapes."""

        def spec(path: Any, x: Any) -> PartitionSpec:
            place = self.place(jax.tree_util.keystr(path), x.shape)
            found: list[Any] = [None] * len(x.shape)
            if place.heads is not None:
                found[place.heads] = self.axes.heads
            if place.slices is not None:
                found[place.slices] = place.names
            while found and found[-1] is None:
                found.pop()
            return PartitionSpec(*found)

        return jax.tree.map_with_path(spec, tree)

    def shardings(self, tree: Any) -> Any:
        """The `NamedSharding` of each, see `specs`."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(tree))

    def placed(self, tree: Tree) -> Tree:
        """A copy of these arrays in float32 on the mesh, where each device gets only its slices.

        The arrays are this process's, the same in each, or lie on several processes already.
        """

        def place(x: Any, sharding: NamedSharding) -> jax.Array:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                copy = jax.jit(lambda x: x.astype(jnp.float32), out_shardings=sharding)
                return copy(x)
            host = np.asarray(x)
            return jax.make_array_from_callback(
                host.shape, sharding, lambda index: np.array(host[index], np.float32)
            )

        return jax.tree.map(place, tree, self.shardings(tree))

    def run(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`jax.shard_map` over the mesh.

        That results are equal on all devices is not checked: gradients are summed by `Slices`.
        """
        more: Any = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        return jax.shard_map(local, mesh=self.mesh, **more)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that every device has the whole of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def everywhere(self, x: np.ndarray) -> jax.Array:
        """An array of this process, the same in each process, whole on every device."""
        return self._made(x, PartitionSpec())

    def over_batch(self, x: np.ndarray) -> jax.Array:
        """An array of this process, the same in each, split along its first axis (sequences)."""
        return self._made(x, self.axes.spec("B" + "." * (x.ndim - 1)))

    def _made(self, x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def on_host(self, tree: Tree) -> Tree:
        """The whole arrays, numpy's; all processes must ask for them."""
        # One after the other, so that no device holds two whole arrays.
        whole = jax.jit(lambda x: x, out_shardings=self.whole)
        return jax.tree.map(lambda x: np.asarray(whole(x)), tree)

    def slices(self, tree: Any) -> "Slices":
        """Puts the slices of these whole arrays together again."""
        named = leaves_by_path(tree)
        places = tuple((path, self.place(path, x.shape)) for path, x in named.items())
        return Slices(places, self.dtype)


def check_batch(settings: Settings, axes: Axes) -> None:
    """Raises ValueError unless each device gets as many sequences in each part of a step."""
    batch, parts, accumulate = settings.batch_size, axes.size("batch"), settings.accumulate
    if batch % (parts * accumulate):
        beside = "" if accumulate == 1 else f", in {accumulate=} parts each"
        raise ValueError(
            f"batch_size={batch} must be a multiple of {parts * accumulate}, into which "
            f"axes={axes.batch} split it{beside}"
        )


def _check_sizes(config: TransformerConfig, axes: Axes) -> None:
    """Raises ValueError unless heads and inner sizes are the same on all devices of the heads."""
    count, experts = axes.size("heads"), config.experts
    check_axes(config, axes)
    sizes = {"intermediate_size": config.intermediate_size}
    if experts is not None:
        sizes = {
            "experts.intermediate_size": experts.intermediate_size,
            "experts.shared_size": experts.shared_size or 0,
        }
    for name, size in sizes.items():
        if size % count:
            raise ValueError(
                f"{name}={size} must be a multiple of {count}, the devices of the axes {axes.heads}"
            )


@dataclasses.dataclass(frozen=True)
class _Place:
    """How an array is split: see `Split.place`.

    `heads` is its axis that is split over heads, `slices` the one that is split over `names` and
    gathered where it is used; None if there is none. `names` are all axes of the mesh but those of
    heads where these split it: over them a gradient is summed.
    """

    heads: int | None
    slices: int | None
    names: tuple[str, ...]

    def of_layer(self) -> "_Place":
        """Without the axis of layers."""
        heads, slices = (None if x is None else x - 1 for x in (self.heads, self.slices))
        return dataclasses.replace(self, heads=heads, slices=slices)


@dataclasses.dataclass(frozen=True)
class Slices:
    """The arrays of a model that are slices on each device; for use inside a `shard_map` only.

    `places` has the path of each array and how it is split; of `of_layer` without the axis of
    layers.
    """

    places: tuple[tuple[str, _Place], ...]
    dtype: str

    def of_layer(self) -> "Slices":
        """Those of the layers, without their leading axis of layers; paths begin with the stack."""
        inner = tuple((x, place.of_layer()) for x, place in self.places if x.startswith(_LAYERS))
        return dataclasses.replace(self, places=inner)

    def outside(self) -> "Slices":
        """Those that no layer holds."""
        outer = tuple(x for x in self.places if not x[0].startswith(_LAYERS))
        return dataclasses.replace(self, places=outer)

    def __call__(self, tree: Tree) -> Tree:
        """The whole arrays, those of layers and embeddings in `dtype`; others as they are."""

        def whole(path: str, place: _Place, x: jax.Array) -> jax.Array:
            if place.slices is None:
                return x
            dtype = self.dtype if _is_cast(path) else str(x.dtype)
            return _gathered(x, place.slices, place.names, dtype)

        return self._map(tree, whole)

    def own(self, tree: Tree) -> Tree:
        """The arrays, where those that are not split become each device's own.

        A gradient with respect to these is what this device adds to it, for `summed`.
        """
        return self._map_shared(tree, lambda x, names: jax.lax.pcast(x, names, to="varying"))

    def summed(self, grads: Tree) -> Tree:
        """Gradients over all devices: those of slices are summed as they arrive."""
        return self._map_shared(grads, jax.lax.psum)

    def _map_shared(self, tree: Tree, change: Callable[..., jax.Array]) -> Tree:
        """The arrays, with those changed that several devices have."""

        def one(path: str, place: _Place, x: jax.Array) -> jax.Array:
            return change(x, place.names) if place.slices is None and place.names else x

        return self._map(tree, one)

    def _map(self, tree: Tree, change: Callable[[str, _Place, jax.Array], jax.Array]) -> Tree:
        places = dict(self.places)

        def one(path: Any, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            return change(name, places[name], x) if name in places else x

        return jax.tree.map_with_path(one, tree)


def _is_cast(path: str) -> bool:
    """Whether a layer casts this array to its dtype anyway; the router computes in float32."""
    cast = ("['kernel']", "['embedding']", "['lm_head']")
    return "['router']" not in path and any(name in path for name in cast)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(x: jax.Array, axis: int, names: tuple[str, ...], dtype: str) -> jax.Array:
    """All slices of `x`, cast and joined along `axis`. Its gradient is summed in float32."""
    return jax.lax.all_gather(x.astype(dtype), names, axis=axis, tiled=True)


def _gathered_forward(
    x: jax.Array, axis: int, names: tuple[str, ...], dtype: str
) -> tuple[jax.Array, None]:
    return _gathered(x, axis, names, dtype), None


def _gathered_backward(
    axis: int, names: tuple[str, ...], dtype: str, _: None, g: jax.Array
) -> tuple[jax.Array]:
    wide = g.astype(jnp.float32)
    return (jax.lax.psum_scatter(wide, names, scatter_dimension=axis, tiled=True),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
