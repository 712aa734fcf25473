"""KV caches and sessions on disk: a prompt is read once, and generation continues from there."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._json import line, shown, shown_name
from turbojax.caches import LayerCache, kind_of
from turbojax.caches import files as layers
from turbojax.caches import stored_file as files
from turbojax.caches.paged.pool import PagedCache
from turbojax.models.decoder import Decoder, for_length, unstack
from turbojax.models.generation.caching import ModelCaches
from turbojax.models.generation.session import Session
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.specs import check_batch, whole_slots
from turbojax.models.tensor_parallel.storing import joined, split
from turbojax.models.transformer import Transformer
from turbojax.rotary import LongRopeScaling
from turbojax.sharding import Axes

StorableCache = LayerCache | PagedCache | ModelCaches
"""A layer's cache of any kind, a pool of pages, or the caches of a model."""

_MODEL, _SESSION = "model", "session"
_SAMPLED = 64
"""Numbers of every array of a model that go into its fingerprint as they are."""


def save_cache(
    path: str | os.PathLike[str],
    cache: StorableCache,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Stores a KV cache, such as a prompt's, in one safetensors file.

    Of each sequence only the tokens it holds are written, bit for bit; of a bare pool of pages,
    which does not know who holds what, all pages. A reader sees either the old file or the complete
    new one.

    Args:
      path: of the file, which is replaced if it exists. Its folder must exist.
      cache: of one layer (of any kind, or of several layers stacked along leading axes), a
        `PagedCache`, or a model's `ModelCaches`. It is not donated.
      metadata: strings to keep with it, such as the model's name or the prompt.

    Raises:
      FileNotFoundError: if there is no such folder.
      TypeError: if `cache` or `metadata` is something else.
      ValueError: under `jit`, or for pages or blocks that are split over devices, which
        `save_session` stores.
    """
    description, arrays = _pack(cache)
    files.write(path, description, arrays, metadata)


def load_cache(
    path: str | os.PathLike[str],
    *,
    max_length: int | None = None,
    like: StorableCache | None = None,
) -> tuple[Any, dict[str, str]]:
    """Reads what `save_cache` wrote, onto the default device, array by array.

    Everything is checked: version, kind, the arrays' names, shapes, dtypes and fingerprints, and
    the invariants of the cache.

    Args:
      path: of the file.
      max_length: tokens each sequence shall be able to hold, at least those it holds; what it was
        if not given. Not for a pool of pages.
      like: a cache that the stored one must equal in kind, sizes, dtype and configuration, and that
        says `max_length`: one of the model that will use it, from `init_caches` or abstract
        (`jax.eval_shape`).

    Returns:
      The cache, of the class that was stored, and its metadata.

    Raises:
      FileNotFoundError: if there is no such file.
      TypeError: if `like` is not a cache or `max_length` not an integer.
      ValueError: naming the file and the cause, if it is not a stored cache, cut off, damaged, of
        another version, does not fit `like`, or does not fit into `max_length`; or if both
        arguments are given.
    """
    if max_length is not None:
        _checks.check_sizes(max_length=max_length)
        if like is not None:
            raise ValueError(f"{max_length=} must be None where `like` is given, which has its own")
    with files.open_file(path) as file:
        kind = file.description.get("kind")
        if kind == _SESSION:
            raise ValueError(f"{file.path} holds a session: tj.models.load_session reads it")
        if like is not None:
            max_length = _fit(file.path, file.description, like)
        if kind == "paged_pool" and max_length is not None and like is None:
            raise ValueError(f"{max_length=} must be None: {file.path} holds a pool of pages")
        cache = _unpack(file, file.description, max_length)
        file.require_all_read()
        return cache, file.metadata


def save_session(
    path: str | os.PathLike[str], session: Session, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Stores a session: its caches, lengths and the logits of the next token, not the model.

    Generation continues from the file exactly as it would from the session. That of a decoder that
    is split over a mesh is stored as one device would have it.

    Args:
      path: of the file, which is replaced if it exists. Its folder must exist.
      session: as `start`, `load_session` or `Session.step` returned it; it can still be used.
      metadata: strings to keep with it, such as the prompt.

    Raises:
      FileNotFoundError: if there is no such folder.
      TypeError: if `session` or `metadata` is something else.
      NotImplementedError: if the decoder is split over devices of several processes.
    """
    if not isinstance(session, Session):
        raise TypeError(f"session is a {type(session).__name__}, must be a Session")
    caches, arrays = _pack(session.caches, session.decoder.axes)
    description = {"kind": _SESSION, "model": _fingerprint(session.decoder), "caches": caches}
    arrays = {
        **arrays,
        "logits": np.asarray(session.logits),
        "lengths": np.asarray(session.lengths),
    }
    files.write(path, description, arrays, metadata)


def load_session(
    path: str | os.PathLike[str],
    model: Transformer | Decoder | QuantizedDecoder,
    *,
    max_length: int | None = None,
    implementation: str | None = None,
) -> tuple[Session, dict[str, str]]:
    """Reads what `save_session` wrote, for the model that it was made with.

    Args:
      path: of the file.
      model: the same weights in the same dtype; see `start`. Its `max_length` may be another one,
        and it may be split over a mesh where the other was not, or otherwise: unless weights are
        INT4, or have sizes that devices do not divide, which must be split as they were.
      max_length: tokens each sequence will hold at most; what it was if not given. LongRoPE must
        have the same factors for it.
      implementation: what runs attention and cache, see `start`.

    Returns:
      The session and its metadata.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the cause, if it is not a stored session, cut off, damaged, of
        another version or model, or does not fit into `max_length`; or if that is more than the
        model's.
      TypeError: if `max_length` is not an integer.
    """
    if max_length is not None:
        _checks.check_sizes(max_length=max_length)
        if max_length > model.config.max_length:
            raise ValueError(f"{max_length=} must be at most the model's {model.config.max_length}")
    decoder = unstack(model) if isinstance(model, Transformer) else model
    with files.open_file(path) as file:
        if file.description.get("kind") != _SESSION:
            raise ValueError(
                f"{file.path} holds no session but a cache: tj.models.load_cache reads it"
            )
        held, described = file.description["model"], file.description["caches"]
        if max_length is None:
            _check_length(file.path, described, model.config.max_length)
        if decoder.axes is not None:
            max_length = _length_to_split(file.path, described, max_length, decoder.axes)
        caches = _unpack(file, described, max_length)
        decoder = for_length(decoder, caches.max_length)
        _check_model(file.path, held, _fingerprint(decoder))
        batch = caches.layers[0].lengths.shape[0]
        check_batch(batch, decoder.axes)
        file.require("logits", (batch, model.config.vocab_size), np.dtype(np.float32))
        file.require("lengths", (batch,), np.dtype(np.int32))
        logits, lengths = file.read("logits"), file.read("lengths")
        file.require_all_read()
        for layer in caches.layers:
            if not np.array_equal(lengths, layer.lengths):
                held = np.asarray(layer.lengths).tolist()
                raise ValueError(
                    f"{file.path}: lengths={lengths.tolist()} must be {held}, as cached"
                )
        if decoder.axes is not None:
            caches = ModelCaches(tuple(split(layer, decoder.axes) for layer in caches.layers))
        session = Session(
            decoder,
            caches,
            _of_sequences(logits, decoder.axes),
            _of_sequences(lengths, decoder.axes),
            int(lengths.max()),
            implementation,
        )
        return session, file.metadata


# Caches ------------------------------------------------------------------------------------------


def _describe(cache: Any) -> dict[str, Any]:
    if isinstance(cache, ModelCaches):
        return {"kind": _MODEL, "layers": [layers.describe(layer) for layer in cache.layers]}
    return layers.describe(cache)


def _prefix(layer: int) -> str:
    return f"layers.{layer}."


def _pack(
    cache: StorableCache, axes: Axes | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What to store of a cache; `axes` are those over which a model's caches are split."""
    if not isinstance(cache, ModelCaches):
        return _describe(cache), layers.pack(cache)
    arrays = {}
    for i, layer in enumerate(cache.layers):
        whole = layer if axes is None else joined(layer, axes)
        arrays.update({_prefix(i) + name: x for name, x in layers.pack(whole).items()})
    return _describe(cache), arrays


def _length_to_split(path: Path, description: Any, max_length: int | None, axes: Axes) -> int:
    """The length of caches that can be split: at least `max_length`, or what is described."""
    found = [layers.described(path, layer) for layer in _layers(path, description)]
    length = max_length or found[0].max_length
    slots = (kind_of(x).slots(getattr(x, "config", None), length)[0] for x in found)
    return whole_slots(length, slots, axes)


def _of_sequences(x: np.ndarray, axes: Axes | None) -> jax.Array:
    return jnp.asarray(x) if axes is None else jax.device_put(x, axes.sharding("B"))


def _unpack(file: files.StoredFile, description: Any, max_length: int | None) -> Any:
    if not isinstance(description, Mapping) or description.get("kind") != _MODEL:
        layers.check_room(file.path, [description], max_length)
        return layers.unpack(file, "", description, max_length)
    described = _layers(file.path, description)
    layers.check_room(file.path, described, max_length)
    return ModelCaches(
        tuple(
            layers.unpack(file, _prefix(i), layer, max_length) for i, layer in enumerate(described)
        )
    )


def _layers(path: Path, description: Any) -> list[Mapping[str, Any]]:
    """The descriptions of the layers of a model's caches; raises ValueError if there are none."""
    found = description["layers"] if isinstance(description, Mapping) else None
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        raise ValueError(f"{path} is damaged: its caches must be a list of layers")
    return found


def _check_length(path: Path, description: Any, most: int) -> None:
    """Raises ValueError, before there are arrays, if caches have room for more than `most`."""
    for layer in _layers(path, description):
        length = layer.get("max_length")
        if isinstance(length, int) and length > most:
            raise ValueError(
                f"{path} has caches for {shown(length)} tokens, more than the model's {most}: "
                "give max_length"
            )


def _fit(path: Path, description: Mapping[str, Any], like: Any) -> int | None:
    """The length of `like`; raises ValueError if the description is that of another cache."""
    wanted = _describe(like)
    held = _layers(path, description) if "layers" in description else [description]
    needed = wanted.get("layers", [wanted])
    if description.get("kind") != wanted["kind"] or len(held) != len(needed):
        kind = shown(description.get("kind"))
        raise ValueError(
            f"{path} holds a cache of kind {kind} with {len(held)} layers, `like` is"
            f" one of kind {wanted['kind']!r} with {len(needed)}"
        )
    for i, (one, other) in enumerate(zip(held, needed, strict=True)):
        differing = [
            f"{shown_name(name)}={shown(one.get(name))}, not {shown(other.get(name))}"
            for name in sorted({*one, *other} - {"max_length"})
            if one.get(name) != other.get(name)
        ]
        if differing:
            raise ValueError(f"{path} does not fit `like`: layer {i} has {'; '.join(differing)}")
    return getattr(like, "max_length", None)


# Models ------------------------------------------------------------------------------------------


def _fingerprint(decoder: Decoder | QuantizedDecoder) -> dict[str, Any]:
    """What tells models apart: shape, dtype, and a hash of every weight's `_sample`."""
    digest = hashlib.sha256()
    for x in jax.device_get(jax.tree.leaves([_sample(x) for x in jax.tree.leaves(decoder)])):
        digest.update(x.tobytes())
    config = {name: repr(x) for name, x in decoder.config.described().items()}
    del config["max_length"]  # it says what is allowed, and changes no number
    scaling = decoder.config.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        long = decoder.config.max_length > scaling.original_max_length
        config["longrope"] = "long" if long else "short"
    return {
        "class": type(decoder).__name__,
        "dtype": decoder.dtype.name,
        "config": config,
        "weights": digest.hexdigest(),
    }


@jax.jit
def _sample(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers from all over an array, and the sum of all its bits modulo ``2**32``.

    Integers add up to the same in any order, on any device.
    """
    flat = x.reshape(-1)
    # Odd, so that rows of a power of two give more than one of their columns.
    step = (flat.size // _SAMPLED) | 1
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(flat, unsigned)
    return flat[::step][:_SAMPLED], jnp.sum(bits, dtype=jnp.uint32)


def _check_model(path: Path, held: Any, given: Mapping[str, Any]) -> None:
    if not isinstance(held, Mapping) or not isinstance(held.get("config"), Mapping):
        raise ValueError(f"{path} is damaged: its model must be described by an object")
    flat = [{**x["config"], "class": x["class"], "dtype": x["dtype"]} for x in (held, given)]
    differing = [
        f"{shown_name(name)}={line(str(flat[0].get(name)))}, not {flat[1].get(name)}"
        for name in sorted({*flat[0], *flat[1]})
        if flat[0].get(name) != flat[1].get(name)
    ]
    if differing:
        raise ValueError(f"{path} is of another model: {'; '.join(differing)}")
    if held["weights"] != given["weights"]:
        raise ValueError(f"{path} is of a model of this shape with other weights")
