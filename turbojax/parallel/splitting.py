"""`split`: any op over a mesh, each device with its part of the arrays."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from turbojax.attention import pooled as pooled_attention
from turbojax.attention import turbo
from turbojax.caches import exact as exact_attention
from turbojax.caches import latent as latent_attention
from turbojax.caches import paged, verbs
from turbojax.caches.latent import cache as latents
from turbojax.caches.latent import pages as latent_pages
from turbojax.caches.paged import pool
from turbojax.matmul import fp8_tokens
from turbojax.matmul import grouped as grouped_matmul
from turbojax.matmul import int4 as int4_matmul
from turbojax.parallel.appending import append, append_to_pages
from turbojax.parallel.context import ring_attention, ring_pooled_attention
from turbojax.parallel.decode import decode, paged_attention
from turbojax.sharding.axes import DIMENSIONS, Axes
from turbojax.sharding.notation import OWN, Entry, leaves_of, meaning
from turbojax.sharding.per_device import localized
from turbojax.sharding.specs import Split, partition_specs

_ARRAYS: Mapping[str, Entry] = {
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKH",
    "cache": OWN,
    "levels": "BNTS",
    "lengths": "B",
    "new_lengths": "B",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "query_segment_ids": "BT",
    "key_value_segment_ids": "BS",
    "key_bounds": ("BT", "BT"),
    "query_offset": "B",
    "key_offset": "B",
    "bias": "BNTS",
    "alibi_slopes": "N",
    "sinks": "N",
    "block_tables": "BL",
    "query_latent": "BTNC",
    "query_rope": "BTNR",
    "latent": "BTC",
    "rope": "BTR",
}
"""Letters of the arguments of attention and caches, by name."""
_NEW = {"key": "BRKH", "value": "BRKH", "latent": "BRC", "rope": "BRR"}
"""Tokens that are new to a cache: every device of a sequence's axis has all of them."""
_NEWEST = {"query": "BRNH", "query_latent": "BRNC", "query_rope": "BRNR"}
_PRODUCT = {"x": "...I", "weight": OWN, "bias": "F", "residual": "...F"}
_PART = ("BTNH", "BTN")
_NEWEST_PART = ("BRNH", "BRN")
_LATENT_PART = ("BRNC", "BRN")


@dataclasses.dataclass(frozen=True)
class _Split:
    """How an op is split.

    `outputs` is the entry of what it returns, with the log-sum-exp; `arrays` has entries of
    arguments that mean something else than in `_ARRAYS`. Where tokens are split, `over_tokens`
    runs, which takes their axes of the mesh as `axis` and has other names for the `renamed`
    options.
    """

    outputs: Entry
    arrays: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    over_tokens: Callable[..., Any] | None = None
    axis: str = "axis"
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def entry(self, name: str) -> Entry | None:
        """That of an argument; None of options."""
        return self.arrays.get(name, _ARRAYS.get(name))


_OPS: Mapping[Callable[..., Any], _Split] = {
    turbo.turbo_attention: _Split(_PART, {}, ring_attention, "axis_name", {"config": "attention"}),
    pooled_attention.pooled_attention: _Split(_PART, {}, ring_pooled_attention, "axis_name"),
    exact_attention.attention: _Split(
        "BTNH",
        {},
        functools.partial(ring_attention, attention="exact"),
        "axis_name",
    ),
    verbs.prefill: _Split((_PART, OWN)),
    verbs.decode: _Split(_NEWEST_PART, _NEWEST, decode),
    verbs.append: _Split(OWN, _NEW, append),
    paged.paged_attention: _Split(_NEWEST_PART, _NEWEST, paged_attention),
    pool.append: _Split(OWN, _NEW, append_to_pages),
    latent_attention.latent_attention: _Split(_LATENT_PART, _NEWEST),
    latent_attention.paged_latent_attention: _Split(_LATENT_PART, _NEWEST),
    latents.append_latents: _Split(OWN, _NEW),
    latent_pages.append_latents: _Split(OWN, _NEW),
    int4_matmul.matmul: _Split("...F", _PRODUCT),
    # The first axis of both arrays.
    fp8_tokens.quantize_activation: _Split("B", {"x": "...I"}),
    fp8_tokens.rms_norm_quantize: _Split("B", {"x": "...I", "scale": "I"}),
    grouped_matmul.grouped_matmul: _Split(
        "MF", {"x": "MI", "weight": "E" + OWN, "bias": "EF", "group_sizes": "E"}
    ),
}


def split(op: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """An op that each device of a mesh runs on its part of the arrays, by `jax.shard_map`.

    Sequences are split over ``axes.batch``; query and key/value heads, and the outputs of INT4
    products, over ``axes.heads``. With ``axes.sequence`` tokens are split, too: prompts, where
    `ring_attention` and `ring_pooled_attention` run, or the slots of a cache, where `decode`,
    `paged_attention`, `append` and `append_to_pages` of `turbojax.parallel` do; queries and tokens
    that are new to a cache are whole then. Axes of size 1 are whole. A pool of pages is split as
    `partition_specs` says: each device has pages of its own, which its tables count from 0.

    Nothing is gathered, except as those functions say. It has the gradient that the op has. Call it
    under `jit`: outside of one it is compiled anew every time.

    Args:
      op: a public one of turbojax: `turbo_attention`, `prefill`, `decode`, `append`,
        `pooled_attention`, `paged_attention`, `latent_attention`, `append_latents`, or one of
        `turbojax.fireq`, `turbojax.k8v4` or `turbojax.paged` by these names, `fireq.matmul`,
        `fireq.grouped_matmul`, `fireq.quantize_activation`, `fireq.rms_norm_quantize`.
      axes: of the mesh.

    Returns:
      A function of the op's arguments that returns what the op does.

    Raises:
      ValueError: if the op is another one; when it is called, if an array cannot be split evenly.
      NotImplementedError: when it is called, if tokens are split and the op, or an argument, is not
        made for that.
    """
    if op not in _OPS:
        known = ", ".join(f"{o.__module__.removeprefix('turbojax.')}.{o.__name__}" for o in _OPS)
        raise ValueError(f"{op=} must be one of {known}")
    how, signature = _OPS[op], inspect.signature(op)

    @functools.wraps(op)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        arrays = {k: x for k, x in given.items() if how.entry(k) is not None and x is not None}
        arrays = {k: x if _holds_arrays(x) else jnp.asarray(x) for k, x in arrays.items()}
        static = {k: x for k, x in given.items() if k not in arrays}
        run = op
        if axes.sequence:
            run, static = _over_tokens(op, how, axes, given, static)
        mesh = axes.require_mesh()
        specs = {name: _spec(op, name, how, x, axes) for name, x in arrays.items()}
        arrays = _with_bias_by_device(arrays, _parts("F", axes))

        def local(arrays: dict[str, Any]) -> Any:
            own = localized(arrays, lambda letter: _parts(letter, axes))
            return run(**own, **static)

        kept = _kept(arrays, how)
        outputs = _outputs(how.outputs, bool(given.get("return_residual")), specs, axes, kept)
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=outputs, check_vma=False
        )
        return mapped(arrays)

    return call


def _with_bias_by_device(arrays: dict[str, Any], devices: int) -> dict[str, Any]:
    """Arguments with a gated weight's bias reordered to match the devices' parts of the weight.

    All of a gate's outputs come first in such a bias, and likewise in each device's part.
    """
    weight, bias = arrays.get("weight"), arrays.get("bias")
    if bias is None or not getattr(weight, "gated", False):
        return arrays
    *lead, size = bias.shape
    if size % (2 * devices):  # the op refuses it by name
        return arrays
    parts = bias.reshape(*lead, 2, devices, size // (2 * devices))
    return {**arrays, "bias": jnp.swapaxes(parts, -3, -2).reshape(bias.shape)}


def _holds_arrays(x: Any) -> bool:
    """Whether an argument is a tree of arrays rather than one."""
    return dataclasses.is_dataclass(x) or isinstance(x, tuple)


def _parts(letter: str, axes: Axes) -> int:
    """Into how many parts an axis is split."""
    return axes.size(DIMENSIONS[letter]) if letter in DIMENSIONS else 1


def _over_tokens(
    op: Callable[..., Any],
    how: _Split,
    axes: Axes,
    given: Mapping[str, Any],
    static: Mapping[str, Any],
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What runs where tokens are split, and its options."""
    name = op.__name__
    if how.over_tokens is None:
        raise NotImplementedError(f"{name} is not made for tokens that are split: {axes.sequence=}")
    known = inspect.signature(how.over_tokens).parameters
    lacking = [k for k, x in given.items() if how.renamed.get(k, k) not in known and x is not None]
    if lacking:
        raise NotImplementedError(
            f"{name} has no {', no '.join(lacking)} where tokens are split: {axes.sequence=}"
        )
    options = {how.renamed.get(k, k): x for k, x in static.items() if x is not None}
    causal = inspect.signature(op).parameters.get("is_causal")
    if causal is not None:  # what the op does by default
        options.setdefault("is_causal", causal.default)
    return how.over_tokens, {**options, how.axis: axes.sequence}


def _spec(op: Callable[..., Any], name: str, how: _Split, x: Any, axes: Axes) -> Any:
    """How an argument is split: a specification for each of its arrays."""
    if isinstance(x, Split):
        return partition_specs(x, axes)
    entry = how.entry(name)
    is_scalar = not _holds_arrays(x) and x.ndim == 0
    leaves = leaves_of(name, "" if is_scalar or entry is None else entry, x)
    specs = []
    for leaf, array in zip(leaves, jax.tree.leaves(x), strict=True):
        dims = _with_batch(leaf.dims)
        for letter, size in zip(dims, array.shape, strict=True):
            parts = _parts(letter, axes)
            if size % parts and (size != 1 or letter == "K"):
                raise ValueError(
                    f"{op.__name__} cannot be split so: {leaf.name}.shape={array.shape} has {size} "
                    f"{meaning(letter)}, must be a multiple of {parts}"
                )
        specs.append(axes.spec(dims, array.shape))
    return jax.tree.unflatten(jax.tree.structure(x), specs)


def _with_batch(dims: str) -> str:
    """The letters with the first of the leading axes, however many, as that of sequences."""
    return dims.replace("a", "B", 1)


def _kept(arrays: Mapping[str, Any], how: _Split) -> str:
    """Letters that some array has with a size above 1."""
    found = []
    for name, x in arrays.items():
        if not isinstance(x, Split) and (_holds_arrays(x) or x.ndim):
            leaves = leaves_of(name, how.entry(name) or "", x)
            for leaf, array in zip(leaves, jax.tree.leaves(x), strict=True):
                pairs = zip(_with_batch(leaf.dims), array.shape, strict=True)
                found += [letter for letter, size in pairs if size != 1]
    return "".join(found)


def _outputs(
    entry: Entry, has_residual: bool, specs: Mapping[str, Any], axes: Axes, kept: str
) -> Any:
    """How what an op returns is split."""
    if entry in (_PART, _NEWEST_PART, _LATENT_PART) and not has_residual:
        entry = entry[0]
    if isinstance(entry, tuple):
        return tuple(_outputs(x, has_residual, specs, axes, kept) for x in entry)
    if entry == OWN:
        return specs["cache"]
    dims = _with_batch(entry.replace("...", "a"))
    if entry.startswith("..."):  # axes between are whole
        lead = len(specs["x"]) if isinstance(specs["x"], PartitionSpec) else len(specs["x"].codes)
        dims = _with_batch("abcdefgh"[: lead - 1]) + entry[3:]
    return axes.spec("".join(x if x in kept else "C" for x in dims))
