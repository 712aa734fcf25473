"""What each device has of a model: sizes, numbers of rows, and its part of the logits.

Heads and hidden sizes are split over the axes of heads and, where there are more devices than KV
heads, those of the sequence too (Megatron-LM, Shoeybi et al., 2019): projections of queries and
feed-forward layers over all of them, those of keys and values over the axes of heads alone. Of
every expert each device has a share of the inner size, instead of having some experts whole: so all
devices have the same work whatever the router chooses, and no token travels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from turbojax.matmul.int4.parts import NOTHING
from turbojax.models.config import TransformerConfig
from turbojax.sharding import Axes

SMALL_GROUP = 32
"""Inputs of the smallest group that INT4 weights may have."""


def hidden_axes(axes: Axes | None) -> tuple[str, ...]:
    """The axes of a mesh over which hidden sizes are split, those of heads first."""
    return () if axes is None else (*axes.of_dimension("heads"), *axes.of_dimension("sequence"))


def parts(axes: Axes | None) -> int:
    """Into how many parts hidden sizes are split; 1 without axes."""
    return 1 if axes is None else axes.size("heads") * axes.size("sequence")


def check_axes(config: TransformerConfig, axes: Axes) -> None:
    """Checks that a model's heads can be split."""
    count, over_heads = parts(axes), axes.size("heads")
    if config.num_heads % count:
        raise ValueError(
            f"num_heads={config.num_heads} must be a multiple of {count}, the devices of the axes "
            f"{hidden_axes(axes)}"
        )
    if config.latent is not None:
        return
    kv_heads = config.num_kv_heads
    if kv_heads % over_heads:
        raise ValueError(
            f"num_kv_heads={kv_heads} must be a multiple of {over_heads}, the devices of the axes "
            f"{axes.of_dimension('heads')}: more devices go to the axis of the sequence, see "
            "axes_of_model"
        )
    if axes.size("sequence") > 1 and kv_heads != over_heads:
        raise NotImplementedError(
            f"{axes.of_dimension('sequence')} of size {axes.size('sequence')} beside "
            f"{axes.of_dimension('heads')} of size {over_heads} is not supported of "
            f"num_kv_heads={kv_heads}: a device must have one KV head"
        )


def axes_of_model(config: TransformerConfig, axes: Axes) -> Axes:
    """The axes that a model runs with, on the devices of a mesh, whose axes become `automatic`.

    Where the axis of heads has more devices than there are KV heads, the rest of them goes to the
    axis of the sequence: ``model=8`` becomes ``model=2, sequence=4`` with 2 KV heads. That needs
    one axis of heads and at most one of the sequence.
    """
    mesh = axes.require_mesh()
    if not isinstance(mesh, Mesh):
        raise ValueError(f"{mesh} must be a mesh of devices")
    axes = dataclasses.replace(axes, mesh=automatic(mesh))
    over_heads, kv_heads = axes.size("heads"), config.num_kv_heads
    if config.latent is None and over_heads > kv_heads and over_heads % kv_heads == 0:
        axes = _with_sequence(axes, kv_heads)
    check_axes(config, axes)
    return axes


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes: outside `shard_map`, XLA decides what is split over them."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _with_sequence(axes: Axes, kv_heads: int) -> Axes:
    """Leaves so many devices for heads, and gives the others to the sequence."""
    mesh = axes.require_mesh()
    assert isinstance(mesh, Mesh)
    heads, sequence = axes.of_dimension("heads"), axes.of_dimension("sequence")
    if len(heads) != 1 or len(sequence) > 1:
        raise ValueError(
            f"{axes.size('heads')} devices of {heads}, more than num_kv_heads={kv_heads}, must be "
            "those of one axis, and there must be one axis of the sequence at most"
        )
    names = list(mesh.axis_names)
    at, rest = names.index(heads[0]), axes.size("heads") // kv_heads
    shape = list(mesh.devices.shape)
    name = sequence[0] if sequence else "sequence"
    if not sequence and name in names:
        raise ValueError(f"the mesh's axis {name!r} must be the axes' sequence, which is ()")
    # The axis of heads becomes two, the outer one of heads; what the axis of the sequence had
    # before goes beside its new part.
    devices = mesh.devices.reshape(*shape[:at], kv_heads, rest, *shape[at + 1 :])
    names.insert(at + 1, "")
    if sequence:
        old = names.index(name)
        devices = np.moveaxis(devices, old, at + 1 - (old < at))
        names.remove(name)
        at = names.index(heads[0])
        merged = (*devices.shape[: at + 1], -1, *devices.shape[at + 3 :])
        devices = devices.reshape(merged)
    names[names.index("")] = name
    types = (AxisType.Auto,) * len(names)
    return dataclasses.replace(
        axes, sequence=name, mesh=Mesh(devices, tuple(names), axis_types=types)
    )


def share(size: int, count: int, group_size: int | None = None) -> int:
    """How much of a hidden size each of `count` devices has; what the last ones lack is zeros.

    As inputs of INT4 weights with `group_size` a long share is whole groups and whole blocks of
    128; a short one is a multiple of 32, the smallest group there is, see `split_group_size`.
    """
    each = -(-size // count)
    if group_size is None or count == 1:
        return each
    whole = math.lcm(128, group_size)
    unit = whole if each >= 4 * whole or each % whole == 0 else SMALL_GROUP
    return -(-each // unit) * unit


def stored_config(config: TransformerConfig, axes: Axes | None) -> TransformerConfig:
    """The config with the sizes of all devices' shares together, of floating-point weights."""
    return _resized(config, axes, None, parts(axes))


def local_config(
    config: TransformerConfig, axes: Axes | None, group_size: int | None = None
) -> TransformerConfig:
    """What the layers of one device run with, see `stored_config`; the vocabulary is whole."""
    count = parts(axes)
    if axes is None or count == 1:
        return config
    over_heads = count if config.latent is not None else axes.size("heads")
    return dataclasses.replace(
        _resized(config, axes, group_size, 1),
        vocab_size=config.vocab_size,
        num_heads=config.num_heads // count,
        num_kv_heads=config.num_kv_heads // over_heads,
    )


def _resized(
    config: TransformerConfig, axes: Axes | None, group_size: int | None, times: int
) -> TransformerConfig:
    """The config with so many shares of each size that is split."""
    count = parts(axes)
    if count == 1:
        return config

    def of(size: int) -> int:
        return times * share(size, count, group_size)

    experts = config.experts
    if experts is not None:
        shared = experts.shared_size
        experts = dataclasses.replace(
            experts,
            intermediate_size=of(experts.intermediate_size),
            shared_size=None if shared is None else of(shared),
        )
    return dataclasses.replace(
        config,
        vocab_size=times * share(config.vocab_size, count),
        intermediate_size=of(config.intermediate_size),
        experts=experts,
    )


def qkv_outputs(config: TransformerConfig, axes: Axes, index: int) -> np.ndarray:
    """The outputs of joined query, key and value projections of device `index` of `hidden_axes`."""
    width = config.head_dim
    queries = config.num_heads * width // parts(axes)
    keys = config.num_kv_heads // axes.size("heads") * width
    key = config.num_heads * width + index // axes.size("sequence") * keys + np.arange(keys)
    query = index * queries + np.arange(queries)
    return np.concatenate([query, key, key + config.num_kv_heads * width])


def channels(size: int, each: int, index: int) -> np.ndarray:
    """The numbers of device `index`'s `each` channels out of `size`; `NOTHING` past the end."""
    found = index * each + np.arange(each)
    return np.where(found < size, found, NOTHING)


def picked(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """Rows of an array, zeros for `NOTHING`."""
    found = x[np.maximum(rows, 0)]
    there = jnp.asarray(rows >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(there, found, jnp.zeros_like(found))


def gather_logits(logits: jax.Array, vocab_size: int, axes: Axes | None) -> jax.Array:
    """All logits ``[..., V]`` from each device's ``[..., V / n]``, V rounded up, in `shard_map`."""
    over = hidden_axes(axes)
    if not over:
        return logits
    whole = jax.lax.all_gather(logits, over, axis=logits.ndim - 1, tiled=True)
    return whole[..., :vocab_size]


def mask_padding(logits: jax.Array, config: TransformerConfig, axes: Axes | None) -> jax.Array:
    """A device's logits ``[..., V / n]`` with -inf where it has no token; see `gather_logits`."""
    over = hidden_axes(axes)
    if not over:
        return logits
    there = first_token(logits, over) + jnp.arange(logits.shape[-1]) < config.vocab_size
    return jnp.where(there.reshape((1,) * (logits.ndim - 1) + there.shape), logits, -jnp.inf)


def first_token(logits: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """The number of the device's first token, int32."""
    return jax.lax.axis_index(over) * logits.shape[-1]


def likeliest(logits: jax.Array, axes: Axes | None) -> tuple[jax.Array, jax.Array]:
    """The largest logit float32 ``[...]`` and its token int32, the same on all devices.

    As `jnp.argmax` of all logits: of equal logits the first counts, and where one is NaN the first
    NaN. Takes a device's logits ``[..., V / n]`` and one collective of two numbers a row, in
    `shard_map`.
    """
    over = hidden_axes(axes)
    mine = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, mine[..., None], axis=-1)[..., 0]
    if not over:
        return best, mine
    mine = mine + first_token(logits, over)
    # In one array, of integers: as floats tokens would be denormal numbers.
    both = jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), mine])
    both = jax.lax.all_gather(both, over)
    every = jax.lax.bitcast_convert_type(both[:, 0], jnp.float32)
    device = jnp.argmax(every, axis=0)[None]
    best, token = (jnp.take_along_axis(x, device, axis=0)[0] for x in (every, both[:, 1]))
    return best, token
