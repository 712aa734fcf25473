"""What an evaluation compares: a cache of a whole model and what its prompts attend with, by name.

A name is ``CACHE[:OPTION=VALUE[,OPTION=VALUE...]]``, for instance ``4bit:softmax=sas,block=32`` or
``kv4:uncompressed_layers=1``, or a file's that has a cache for every layer, such as ``cache.json``.
`method` documents the options.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from turbojax.caches import (
    CACHE_NAMES,
    LATENT_CACHE_NAMES,
    POLICY_NAMES,
    CacheKind,
    PooledAttention,
    cache_by_name,
    pooled_by_name,
)
from turbojax.evaluation import layer_files
from turbojax.levels import TopK
from turbojax.models.config import TransformerConfig
from turbojax.models.generation.caching import (
    ModelCacheKind,
    UncompressedEdges,
    kinds_of_layers,
    widths_of,
    with_uncompressed,
)
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

NAMES = (*CACHE_NAMES, "bfloat16", *LATENT_CACHE_NAMES)
"""The caches that a method can begin with."""

_COMMON = ("uncompressed_layers", "pooled", "policy", "window", "pool_block")
_SOFTMAX = {"sas": "e", "sas2": "2"}
_SAS_FIELDS = tuple(field.name for field in dataclasses.fields(SAS) if field.name != "base")


@dataclasses.dataclass(frozen=True)
class Method:
    """A cache of a whole model, and what its prompts attend with; static under `jit`.

    Attributes:
      name: as given to `method`.
      cache: what `turbojax.models.start` takes as `cache`.
      pooled: what it takes as `pooled_prefill`; None where prompts attend as the cache has it.
    """

    name: str
    cache: ModelCacheKind
    pooled: PooledAttention | None = None


def method(name: str, config: TransformerConfig) -> Method:
    """The method that a name stands for, with the model's sizes.

    Options of every cache:

    - ``uncompressed_layers=N``: the first and the last N layers are not compressed.
    - ``pooled=DENSITY``: prompts attend by pooled attention, the most important blocks finely, with
      about this share of dense attention's work, see `top_k_of_density`.
    - ``policy=NAME``: the same with the settings of `turbojax.caches.pooled_by_name`; ``window=N`` for
      ``policy=window``.
    - ``pool_block=N``: tokens of a block of either, 128 if not given.

    Caches that a configuration stands for have all of its fields as options: ``4bit``, ``3bit``,
    ``2bit`` and ``2/4bit`` those of `turbojax.TurboConfig`, and

    - ``heads_per_group=N`` (see `turbojax.TurboConfig`), with which ``2/4bit`` is half of each
      group's heads at 2 bits,
    - ``block=N`` for both `block_q` and `block_kv`; either of these, if given, goes before it,
    - ``low_heads=N`` for `num_low_bit_key_heads` and `num_low_bit_value_heads`,
    - ``softmax=exact``, ``sas`` or ``sas2`` (in powers of two), with the fields of `turbojax.SAS`,
      such as ``threshold=-6``, for the latter two.

    Args:
      name: ``CACHE[:OPTION=VALUE[,OPTION=VALUE...]]``, where `CACHE` is one of `NAMES`, or a file
        that `kinds_from_file` reads, which takes the options of every cache.
      config: of the model.

    Raises:
      OSError: if there is no such file.
      ValueError: if there is no such cache or option, a value does not parse or is out of range, an
        option is given twice or has no effect, or the model cannot have such a cache.
    """
    base, _, text = name.partition(":")
    cache: Any
    if layer_files.is_name(base):
        cache = kinds_from_file(Path(base), config)
    elif base not in NAMES:
        names = ", ".join(NAMES)
        raise ValueError(f"method {name!r} must begin with one of {names}, or be a .json file")
    else:
        cache = base if base == "bfloat16" else cache_by_name(base, config.num_kv_heads)
    given = _parsed(name, text, _options_of(cache))
    own = {key: value for key, value in given.items() if key not in _COMMON}
    try:
        if isinstance(cache, TurboConfig):
            cache = _turbo(_grouped(base, cache, config.num_kv_heads, own), own)
        elif own:
            cache = dataclasses.replace(cache, **_values(type(cache), own))
        layers = _number("uncompressed_layers", given.get("uncompressed_layers", "0"), int)
        made = Method(name, with_uncompressed(cache, layers), _pooled(given))
        for kind in kinds_of_layers(made.cache, config.num_layers):
            widths_of(config, kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method {name!r}: {error}") from error
    return made


def kinds_from_file(path: Path, config: TransformerConfig) -> tuple[CacheKind, ...]:
    """The cache of every layer that a file names: what ``cache=`` of a whole model takes.

    Args:
      path: JSON, ``{"version": 1, "layers": ["4bit", "paged_int8", ...]}``, with a name of `method`
        for every layer; see `turbojax.evaluation.write_layers`.
      config: of the model.

    Raises:
      OSError: if there is no such file.
      ValueError: naming it, if it holds something else, has not one name for every layer, or one is
        no cache that a layer of the model can have.
    """
    names = layer_files.read_layers(path)
    if len(names) != config.num_layers:
        raise ValueError(
            f"{path} names {len(names)} caches, must have one for each of the model's "
            f"{config.num_layers} layers"
        )
    try:
        kinds = {name: of_one_layer(name, config) for name in dict.fromkeys(names)}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return tuple(kinds[name] for name in names)


def of_one_layer(name: str, config: TransformerConfig) -> CacheKind:
    """The cache that a method's name stands for, where every layer may have its own.

    Raises ValueError as `method`, or if the name says more than the cache of one layer.
    """
    if layer_files.is_name(name.partition(":")[0]):
        raise ValueError(f"cache {name!r} must be one of a layer, not a file")
    made = method(name, config)
    if made.pooled is not None or isinstance(made.cache, UncompressedEdges | tuple):
        options = ", ".join(_COMMON)
        raise ValueError(f"cache {name!r} of one layer must have none of the options {options}")
    return made.cache


def top_k_of_density(density: float) -> TopK:
    """The policy `TopK` that leaves about this share of dense attention's work.

    A block at level r costs 1/r. Up to 0.3125 the fractions are the default's, multiplied; above,
    no block is skipped, and more and more of them are fine. Raises ValueError unless the density is
    above 0 and at most 1.
    """
    if not 0 < density <= 1:
        raise ValueError(f"pooled={density} must be above 0 and at most 1")
    # Twice the default: no block is skipped.
    full, most = (0.1, 0.3, 0.5, 1.0), 0.3125
    if density <= most:
        level1, level2, level4, level8 = (x * density / most for x in full)
    else:
        share = (density - most) / (1 - most)
        level1, level2, level4, level8 = (min(1.0, x + (1 - x) * share) for x in full)
    return TopK(level1, level2, level4, level8)


def _options_of(cache: Any) -> tuple[str, ...]:
    """Names of the options that a cache has."""
    if isinstance(cache, str | tuple):
        return _COMMON
    fields = tuple(field.name for field in dataclasses.fields(cache))
    more = ("block", "low_heads", *_SAS_FIELDS) if isinstance(cache, TurboConfig) else ()
    return (*fields, *more, *_COMMON)


def _parsed(name: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    """The options of a method's name, as text."""
    given: dict[str, str] = {}
    parts = text.split(",") if ":" in name else []
    for part in parts:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ValueError(f"method {name!r}: {part!r} must be OPTION=VALUE")
        if key not in known:
            raise ValueError(f"method {name!r}: option {key!r} must be one of {', '.join(known)}")
        if key in given:
            raise ValueError(f"method {name!r}: option {key!r} must be given once")
        given[key] = value
    return given


def _grouped(
    base: str, config: TurboConfig, num_kv_heads: int, given: Mapping[str, str]
) -> TurboConfig:
    """What the name says of each group of heads, where there are groups: half of them at 2 bits."""
    size = _value("heads_per_group", given.get("heads_per_group", "none"), int | None)
    if base != "2/4bit" or size is None:
        return config
    groups = TurboConfig(heads_per_group=size).groups_of(num_kv_heads)
    grouped = cache_by_name(base, num_kv_heads, groups)
    assert isinstance(grouped, TurboConfig)
    return grouped


def _turbo(config: TurboConfig, given: Mapping[str, str]) -> TurboConfig:
    values: dict[str, Any] = {}
    fields = dict(given)
    if "block" in fields:
        size = _number("block", fields.pop("block"), int)
        values |= {"block_q": size, "block_kv": size}
    if "low_heads" in fields:
        both = ("num_low_bit_key_heads", "num_low_bit_value_heads")
        if clash := [x for x in both if x in fields]:
            raise ValueError(f"low_heads and {clash[0]} must not both be given")
        values |= dict.fromkeys(both, _number("low_heads", fields.pop("low_heads"), int))
    sas = {key: fields.pop(key) for key in _SAS_FIELDS if key in fields}
    softmax = fields.pop("softmax", None)
    if sas and softmax not in _SOFTMAX:
        raise ValueError(f"{next(iter(sas))} must go with softmax=sas or softmax=sas2")
    if softmax == "exact":
        values["softmax"] = "exact"
    elif softmax is not None:
        if softmax not in _SOFTMAX:
            raise ValueError(f"softmax={softmax} must be one of exact, {', '.join(_SOFTMAX)}")
        values["softmax"] = SAS(**{"base": _SOFTMAX[softmax], **_values(SAS, sas)})
    # `block_q` or `block_kv` goes before `block`.
    values |= _values(TurboConfig, fields)
    if "block_kv" in values:
        values.setdefault("buffer_size", None)  # as many blocks as by default
    return dataclasses.replace(config, **values)


def _pooled(given: Mapping[str, str]) -> PooledAttention | None:
    """What the prompts attend with."""
    density, policy = given.get("pooled"), given.get("policy")
    if density is None and policy is None:
        if clash := [key for key in ("window", "pool_block") if key in given]:
            raise ValueError(f"{clash[0]} must go with pooled or policy")
        return None
    size = _number("pool_block", given.get("pool_block", "128"), int)
    if density is not None:
        if policy is not None or "window" in given:
            raise ValueError("pooled must not go with policy or window")
        return PooledAttention(top_k_of_density(_number("pooled", density, float)), size, size)
    assert policy is not None
    if policy not in POLICY_NAMES:
        raise ValueError(f"policy={policy} must be one of {', '.join(POLICY_NAMES)}")
    window = _number("window", given["window"], int) if "window" in given else None
    return pooled_by_name(policy, window=window, block_size=size)


def _values(cls: type, given: Mapping[str, str]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {key: _value(key, text, hints[key]) for key, text in given.items()}


def _value(name: str, text: str, hint: Any) -> Any:
    """A field's value: a number, one of some words, true or false, or none."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [x for x in typing.get_args(hint) if x is not types.NoneType]
        if len(kinds) < len(typing.get_args(hint)) and text == "none":
            return None
        hint = kinds[0]
        origin = typing.get_origin(hint)
    if origin is Literal:
        words = {str(x): x for x in typing.get_args(hint)}
        if text not in words:
            raise ValueError(f"{name}={text} must be one of {', '.join(words)}")
        return words[text]
    if hint is bool:
        return _value(name, text, Literal["true", "false"]) == "true"
    return text if hint is str else _number(name, text, hint)


def _number(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError:
        kind = "an integer" if parse is int else "a number"
        raise ValueError(f"{name}={text} must be {kind}") from None
