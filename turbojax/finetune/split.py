"""Weights that are split over devices, and are whole only where they are used (FSDP).

A device holds its slice of each matrix, and of the optimizer's two moments of it, in float32. A
layer gathers the slices of its matrices, cast to the dtype that it computes in, when it runs, and
again in the backward pass; the sum of what the devices add to a gradient arrives as slices, too
(ZeRO, Rajbhandari et al., 2020, stage 3). So a layer's weights are whole on a device for as long as
that layer runs, and no longer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turbojax.finetune.settings import Settings
from turbojax.models.config import STACKS
from turbojax.sharding.axes import Axes

Tree = TypeVar("Tree")

_LAYERS = tuple(f"['{name}']" for name in STACKS)
"""Parts of the paths of arrays with a leading axis of layers, which is scanned and never split."""


@dataclasses.dataclass(frozen=True)
class Split:
    """How the arrays of a run are laid over a mesh: its weights, optimizer state and sequences.

    Sequences of a step are split over `axes.batch`, their tokens over `axes.sequence`, and weights
    over both, unless `weights` is False: then they are whole on every device (data parallelism
    alone). Layers compute in `dtype`: their matrices are cast to it before they are gathered.
    Raises ValueError if `axes` split heads, or split nothing, or have no mesh of devices.
    """

    axes: Axes
    dtype: str
    weights: bool = True

    def __post_init__(self) -> None:
        if self.axes.heads:
            raise ValueError(
                f"{self.axes.heads=} must not split heads: training splits sequences over batch, "
                "tokens over sequence, and weights over both"
            )
        if not self.axes.names:
            raise ValueError(f"axes={self.axes} must split batch or sequence")
        if not isinstance(self.axes.require_mesh(), Mesh):
            raise ValueError(f"the mesh of axes={self.axes} must be one of devices")

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices."""
        mesh = self.axes.require_mesh()
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def names(self) -> tuple[str, ...]:
        """The axes of the mesh over which weights are split."""
        return self.axes.names

    @property
    def count(self) -> int:
        """Into how many slices."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    def check(self, settings: Settings) -> None:
        """Raises ValueError unless a step splits evenly over the devices.

        Each gets as many sequences, and of each sequence two chunks of tokens of the same size.
        """
        batch, context, axes = settings.batch_size, settings.context, self.axes
        parts = axes.size("batch")
        if batch % parts:
            raise ValueError(
                f"batch_size={batch} must be a multiple of {parts}, into which "
                f"axes={axes.batch} split it"
            )
        parts = axes.size("sequence")
        if parts > 1 and context % (2 * parts):
            raise ValueError(
                f"{context=} must be a multiple of {2 * parts}: two chunks for each of the {parts} "
                f"devices of axes={axes.sequence}"
            )

    def axis(self, path: str, shape: tuple[int, ...]) -> int | None:
        """Along which axis an array is split: the first that the devices divide, or None.

        So slices lie one after the other. Vectors (of a layer) are small and are not split. `path`
        is `jax.tree_util.keystr` of a weight or of one of its moments, `shape` that of the whole
        array.
        """
        first = 1 if any(name in path for name in _LAYERS) else 0
        if not self.weights or len(shape) < first + 2:
            return None
        return next((i for i in range(first, len(shape)) if shape[i] % self.count == 0), None)

    def specs(self, tree: Any) -> Any:
        """A tree of `PartitionSpec` for a tree of arrays or of their shapes."""

        def spec(path: Any, x: Any) -> PartitionSpec:
            axis = self.axis(jax.tree_util.keystr(path), x.shape)
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.names)

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
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        named = {jax.tree_util.keystr(path): x.shape for path, x in leaves}
        axes = {path: self.axis(path, shape) for path, shape in named.items()}
        found = tuple((path, axis) for path, axis in axes.items() if axis is not None)
        return Slices(self.names, found, self.dtype)


@dataclasses.dataclass(frozen=True)
class Slices:
    """The arrays of a model that are slices on each device; for use inside a `shard_map` only.

    `names` are the axes of the mesh over which they are split, the outermost first; `axes` has the
    path of each such array, and the axis along which it is split.
    """

    names: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]
    dtype: str

    def of_layer(self) -> "Slices":
        """Those of the layers, without their leading axis of layers; paths begin with the stack."""
        inner = tuple((path, axis - 1) for path, axis in self.axes if path.startswith(_LAYERS))
        return dataclasses.replace(self, axes=inner)

    def outside(self) -> "Slices":
        """Those that no layer holds."""
        outer = tuple(x for x in self.axes if not x[0].startswith(_LAYERS))
        return dataclasses.replace(self, axes=outer)

    def __call__(self, tree: Tree) -> Tree:
        """The whole arrays, those of layers and embeddings in `dtype`; others as they are."""

        def whole(path: str, axis: int, x: jax.Array) -> jax.Array:
            dtype = self.dtype if _is_cast(path) else str(x.dtype)
            return _gathered(x, axis, self.names, dtype)

        return self._map(tree, whole, lambda x: x)

    def own(self, tree: Tree) -> Tree:
        """The arrays, where those that are not split become each device's own.

        A gradient with respect to these is what this device adds to it, for `summed`.
        """
        return self._map(
            tree,
            lambda path, axis, x: x,
            lambda x: jax.lax.pcast(x, self.names, to="varying"),
        )

    def summed(self, grads: Tree) -> Tree:
        """Gradients over all devices: those of slices are summed as they arrive."""
        return self._map(grads, lambda path, axis, x: x, lambda x: jax.lax.psum(x, self.names))

    def _map(
        self,
        tree: Tree,
        split: Callable[[str, int, jax.Array], jax.Array],
        whole: Callable[[jax.Array], jax.Array],
    ) -> Tree:
        axes = dict(self.axes)

        def one(path: Any, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            return split(name, axes[name], x) if name in axes else whole(x)

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
