"""`per_device`: runs an op on each device's part of its arrays, however a mesh splits them.

Three readers of an op's table (`turbojax.sharding.tables`):

- inside `jax.shard_map`, where all axes of the mesh are manual, arrays are a device's own already:
  the op is simply called, as it is where there is one device;
- with explicit axes the types say how arrays are split, and `shard_map` hands out the parts;
- with automatic axes nobody knows before the compiler does: `custom_partitioning` asks for the
  table then, inside `custom_vmap`, since it knows no mapped axes.

What cannot be split raises; nothing is gathered in silence.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from turbojax import _device
from turbojax._gradient import refuse_gradients
from turbojax.sharding.notation import Leaf, Table, leaves_of
from turbojax.sharding.plans import WHOLE, Names, Plan, Split, plan, sharding_rule

# Whether arrays are one device's parts already (or whole ones that stand for them).
_LOCAL: contextvars.ContextVar[bool] = contextvars.ContextVar("turbojax_local", default=False)
# Letters of axes that `vmap` adds, the innermost first.
_MAPPED = "0123456789"


@dataclasses.dataclass(frozen=True)
class _Call:
    """An op with its options, see `per_device`; equal ones share their compiled programs.

    `interpret` says whether kernels are interpreted, `capability` is the GPU's, and `is_plain` says
    whether this is plain JAX, which the compiler can split without help.
    """

    table: Table
    run: Callable[..., Any]
    static: tuple[tuple[str, Any], ...]
    interpret: bool
    capability: float | None
    adding: Callable[..., Any] | None = None
    is_plain: bool = False

    def __call__(
        self, arrays: Sequence[Any], found: Plan = WHOLE, *, has_automatic: bool = False
    ) -> Any:
        """Runs the op on arrays that are split so, and maybe further by what is automatic."""
        try:
            here = localized(tuple(arrays), found.parts)
        except ValueError as error:
            raise ValueError(f"{self.table.op} cannot be split so: {error}") from None
        over, static = found.over("I"), dict(self.static)
        if has_automatic and not self.is_plain:
            if over:
                raise NotImplementedError(
                    f"{self.table.op} cannot be split over its inputs by a mesh that also has "
                    "automatic axes"
                )
            return _automatic(*here, call=self)
        token = _LOCAL.set(True)
        try:
            if over and self.adding is not None:
                return self.adding(lambda x: jax.lax.psum(x, over), *here, **static)
            return self.run(*here, **static)
        finally:
            _LOCAL.reset(token)

    def leaves(self, arrays: Sequence[Any]) -> list[Leaf]:
        """The table's, of these arguments."""
        named = zip(self.table.inputs, arrays, strict=True)
        return [leaf for (name, entry), x in named for leaf in leaves_of(name, entry, x)]


def per_device(
    table: Table,
    run: Callable[..., Any],
    *,
    adding: Callable[..., Any] | None = None,
    **static: Any,
) -> Callable[..., Any]:
    """`run` with its options bound, on arrays that a mesh may split.

    `run` is a module's function of the table's arrays and hashable options, called with whole
    arrays or with those that one device has. `adding` runs instead where inputs of a product are
    split; its first argument adds up an array over the devices. Returns a function of the table's
    arguments, all by position. It cannot be differentiated where axes are automatic: call it inside
    a `custom_vjp` rule.
    """

    def call(*arrays: Any) -> Any:
        kinds = set() if _LOCAL.get() else _axis_types(jax.tree.leaves(arrays))
        if AxisType.Explicit in kinds:
            return _explicit(_call(table, run, static, adding), arrays)
        is_manual = AxisType.Manual in kinds and AxisType.Auto not in kinds
        if is_manual or _LOCAL.get() or jax.device_count() == 1:
            return run(*arrays, **static)
        automatic = functools.partial(_automatic, call=_call(table, run, static, adding))
        why = "where axes of a mesh are automatic it has none"
        return refuse_gradients(automatic, table.op, because=why)(*arrays)

    return call


def per_device_explicit(table: Table, run: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`per_device` for plain JAX with its own derivatives, which compilers split without help.

    With explicit axes it is `shard_map`, which has derivatives; otherwise `run` is called.
    """

    def call(*arrays: Any) -> Any:
        if not _LOCAL.get() and AxisType.Explicit in _axis_types(jax.tree.leaves(arrays)):
            plain = dataclasses.replace(_call(table, run, static), is_plain=True)
            return _explicit(plain, arrays)
        return run(*arrays, **static)

    return call


def like(values: Any, wanted: Any) -> Any:
    """Values split like others with explicit axes; cotangents must be."""

    def one(value: Any, want: Any) -> Any:
        sharding = jax.typeof(want).sharding
        if not _has_explicit(sharding.mesh) or jax.typeof(value).sharding == sharding:
            return value
        return jax.sharding.reshard(value, sharding.spec)

    return jax.tree.map(
        lambda value, want: None if value is None else one(value, want),
        values,
        wanted,
        is_leaf=lambda x: x is None,
    )


def _call(
    table: Table,
    run: Callable[..., Any],
    static: Mapping[str, Any],
    adding: Callable[..., Any] | None = None,
) -> _Call:
    return _Call(
        table,
        run,
        tuple(sorted(static.items())),
        _device.interpreting(),
        _device.gpu_compute_capability(),
        adding,
    )


def localized(value: Any, parts: Callable[[str], int]) -> Any:
    """A value whose arrays are one device's, with the sizes in its classes made to match.

    Classes that keep sizes have ``local(parts)`` for this.
    """

    def is_leaf(x: Any) -> bool:
        return hasattr(x, "local") and hasattr(x, "AXES")

    def one(x: Any) -> Any:
        return x.local(parts) if is_leaf(x) else x

    return jax.tree.map(one, value, is_leaf=is_leaf)


# What kind of mesh --------------------------------------------------------------------------------


def _axis_types(leaves: Sequence[Any]) -> set[AxisType]:
    """The kinds of axes that the meshes of these arrays and of the context have."""
    meshes = [jax.typeof(x).sharding.mesh for x in leaves]
    meshes.append(jax.sharding.get_abstract_mesh())
    return {kind for mesh in meshes if not mesh.empty for kind in mesh.axis_types}


def _has_explicit(mesh: AbstractMesh) -> bool:
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def _split_of(spec: PartitionSpec, ndim: int) -> Split:
    """A specification as names of axes for each axis."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return tuple(_names(entry) for entry in entries)


def _names(entry: Any) -> Names:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


# Explicit axes ------------------------------------------------------------------------------------


def _explicit(call: _Call, arrays: Sequence[Any]) -> Any:
    leaves = call.leaves(arrays)
    values, tree = jax.tree.flatten(arrays)
    mesh = _explicit_mesh(values)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    splits = [_split_of(jax.typeof(x).sharding.spec, x.ndim) for x in values]
    found = plan(call.table, leaves, [x.shape for x in values], splits, dict(mesh.shape))
    specs = tuple(found.spec(leaf, x.shape) for leaf, x in zip(leaves, values, strict=True))
    outputs, out_tree = jax.tree.flatten(_result(call, arrays))
    out_leaves = _output_leaves(call, jax.tree.unflatten(out_tree, outputs))
    out_specs = [found.spec(leaf, x.shape) for leaf, x in zip(out_leaves, outputs, strict=True)]
    values = [
        x if split == given else jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec, given, split in zip(
            values,
            specs,
            splits,
            (_split_of(spec, x.ndim) for spec, x in zip(specs, values, strict=True)),
            strict=True,
        )
    ]

    def local(*parts: Any) -> tuple[Any, ...]:
        given = jax.tree.unflatten(tree, parts)
        results = jax.tree.leaves(call(given, found, has_automatic=AxisType.Auto in kinds.values()))
        return _added(found, out_leaves, [x.shape for x in outputs], results)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=tuple(out_specs),
        axis_names=explicit,
        check_vma=False,
    )
    return jax.tree.unflatten(out_tree, run(*values))


def _explicit_mesh(values: Sequence[Any]) -> Mesh | AbstractMesh:
    """The mesh of arrays with explicit axes; one of devices, if an array has it."""
    context = jax.sharding.get_abstract_mesh()
    found = [jax.typeof(x).sharding.mesh for x in values]
    abstract = next((mesh for mesh in found if _has_explicit(mesh)), context)
    if not context.empty:
        return abstract
    for x in values:
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == abstract.axis_names:
            return sharding.mesh
    return abstract


def _result(call: _Call, arrays: Sequence[Any]) -> Any:
    """Shapes and dtypes of what the call gives for whole arrays."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(arrays))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.eval_shape(call, plain)


def _output_leaves(call: _Call, result: Any) -> list[Leaf]:
    return leaves_of("the result", call.table.outputs, result)


def _added(
    found: Plan, leaves: Sequence[Leaf], shapes: Sequence[Sequence[int]], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Results, with the devices' parts added up where they are sums."""
    out = []
    for leaf, shape, x in zip(leaves, shapes, results, strict=True):
        over = found.added(leaf, shape)
        out.append(jax.lax.psum(x, over) if over else x)
    return tuple(out)


# Automatic axes -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="call")
def _automatic(*arrays: Any, call: _Call) -> Any:
    values, tree = jax.tree.flatten(arrays)
    trees: list[Any] = []

    def run(found: Plan, *values: Any) -> tuple[Any, ...]:
        result = call(jax.tree.unflatten(tree, values), found)
        if not trees:  # the first time it is the whole call
            trees.append((jax.tree.structure(result), _output_leaves(call, result)))
        return tuple(jax.tree.leaves(result))

    flat = _Flat(call, tuple(call.leaves(arrays)), lambda: tuple(trees[0][1]), run)
    results = _partitioned(flat)(*values)
    return jax.tree.unflatten(trees[0][0], results)


@dataclasses.dataclass(frozen=True)
class _Flat:
    """A call of arrays, without containers.

    `run` takes how arrays are split, and one device's parts of them; `results`, the arrays that it
    gives, are known only after that. `mapped` counts the axes that `vmap` has added.
    """

    call: _Call
    leaves: tuple[Leaf, ...]
    results: Callable[[], tuple[Leaf, ...]]
    run: Callable[..., tuple[Any, ...]]
    mapped: int = 0

    def under_vmap(self, is_mapped: Sequence[bool]) -> "_Flat":
        """The same with a new first axis of some arrays and all results."""
        letter = _MAPPED[self.mapped]
        axes = tuple(0 if x else None for x in is_mapped)
        leaves = tuple(
            dataclasses.replace(leaf, dims=letter + leaf.dims) if x else leaf
            for leaf, x in zip(self.leaves, is_mapped, strict=True)
        )

        def results() -> tuple[Leaf, ...]:
            return tuple(
                dataclasses.replace(leaf, dims=letter + leaf.dims) for leaf in self.results()
            )

        def run(found: Plan, *values: Any) -> tuple[Any, ...]:
            one = functools.partial(self.run, found)
            out: tuple[Any, ...] = jax.vmap(one, in_axes=axes)(*values)
            return out

        return _Flat(self.call, leaves, results, run, self.mapped + 1)


def _partitioned(flat: _Flat) -> Callable[..., tuple[Any, ...]]:
    """The call in a form that the compiler can split and `vmap` can map."""

    def run(*values: Any) -> tuple[Any, ...]:
        # Constants of the op become operands: `custom_partitioning` allows no closed-over arrays.
        whole = jax.make_jaxpr(functools.partial(flat.run, WHOLE))(*values)
        own = tuple(Leaf("a constant", "R" * x.ndim) for x in whole.consts)
        operands = (*flat.leaves, *own)

        def call(*values_and_own: Any) -> tuple[Any, ...]:
            constants = list(values_and_own[len(values) :])
            traced = ClosedJaxpr(whole.jaxpr, constants)
            return tuple(jaxpr_as_fun(traced)(*values_and_own[: len(values)]))

        def rule(*_: Any) -> SdyShardingRule:
            ins, outs = ([x.shape for x in avals] for avals in (whole.in_avals, whole.out_avals))
            ins += [x.shape for x in whole.consts]
            pairs = (
                list(zip(operands, ins, strict=True)),
                list(zip(flat.results(), outs, strict=True)),
            )
            return sharding_rule(*pairs, flat.call.table)

        divided = custom_partitioning(call)
        partition = functools.partial(_partition, flat, operands)
        divided.def_partition(partition=partition, sharding_rule=rule)
        results: tuple[Any, ...] = divided(*values, *whole.consts)
        return results

    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def _(size: int, is_mapped: list[bool], *values: Any) -> tuple[Any, Any]:
        del size
        results = _partitioned(flat.under_vmap(is_mapped))(*values)
        return results, tuple(True for _ in results)

    out: Callable[..., tuple[Any, ...]] = mapped
    return out


def _partition(
    flat: _Flat, operands: Sequence[Leaf], mesh: Mesh, arguments: Any, results: Any
) -> Any:
    """What one device does, once the compiler knows how the arrays are split."""
    ins, outs = [x.shape for x in arguments], [x.shape for x in results]
    found = plan(
        flat.call.table,
        operands,
        ins,
        [_known_split(flat, x) for x in arguments],
        dict(mesh.shape),
        wanted=[
            (leaf, _known_split(flat, x)) for leaf, x in zip(flat.results(), results, strict=True)
        ],
    )

    def local(*values: Any) -> tuple[Any, ...]:
        # The compiler may call this from another thread, which lacks the context.
        context: Any = contextlib.nullcontext()
        if flat.call.interpret and not _device.interpreting():
            context = _device.interpret_kernels()
        with context:
            return _added(found, flat.results(), outs, flat.run(found, *values[: len(flat.leaves)]))

    def shardings(leaves: Sequence[Leaf], shapes: Sequence[Any]) -> tuple[NamedSharding, ...]:
        pairs = zip(leaves, shapes, strict=True)
        return tuple(NamedSharding(mesh, found.spec(leaf, shape)) for leaf, shape in pairs)

    return mesh, local, shardings(flat.results(), outs), shardings(operands, ins)


def _known_split(flat: _Flat, x: Any) -> Split:
    if isinstance(x.sharding, NamedSharding):
        return _split_of(x.sharding.spec, len(x.shape))
    if x.sharding is None or x.sharding.is_fully_replicated:
        return ((),) * len(x.shape)
    raise NotImplementedError(
        f"{flat.call.table.op} cannot be split by a {type(x.sharding).__name__}: arrays must be "
        "placed with jax.sharding.NamedSharding, and not be split over automatic axes of a mesh "
        "whose other axes are manual (jax.shard_map with axis_names) or explicit"
    )
