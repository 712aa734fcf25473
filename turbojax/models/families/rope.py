"""Rotary embeddings in a Hugging Face `config.json`, in the spellings of transformers 4 and 5.

Version 4 has `rope_theta` beside `rope_scaling`; version 5 has both in `rope_parameters`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from turbojax._checks import is_finite_number
from turbojax._json import shown, shown_name
from turbojax.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"

KEYS = ("rope_scaling", "rope_parameters", THETA, PARTIAL, ORIGINAL)
"""Keys of `config.json` that describe rotary embeddings."""

# rope_type -> keys that must be there, keys that may.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
KINDS = tuple(_KINDS)
_NO_NUMBERS = {"short_factor", "long_factor", "truncate"}
# Keys of every kind; "finetuned" says how a model was made.
_COMMON = {"rope_type", "type", THETA, PARTIAL, ORIGINAL, "finetuned"}


class RopeKeys(NamedTuple):
    """What a `config.json` says about RoPE; `partial` is the share of each head that rotates."""

    theta: float
    scaling: RopeScaling | None
    partial: float


def parse(
    given: Mapping[str, Any],
    max_length: int,
    kinds: Sequence[str] = KINDS,
    *,
    theta: float = 10000.0,
    original: int | None = None,
) -> RopeKeys:
    """Reads the keys that `merged` returns; `theta` and `original` count where the file has none.

    `original` is the length of the first training, by default `max_length`.
    """
    kind = given.get("rope_type", "default")
    if kind not in tuple(kinds):
        raise NotImplementedError(
            f"rope_type={shown(kind)} is not supported: must be one of {', '.join(kinds)}"
        )
    required, optional = _KINDS[kind]
    missing = [key for key in required if given.get(key) is None]
    if missing:
        raise ValueError(f"config.json: RoPE of type {kind!r} lacks {', '.join(missing)}")
    for key in sorted(set(given) - {*required, *optional, *_COMMON}):
        if given[key]:
            raise NotImplementedError(
                f"RoPE's {shown_name(key)}={shown(given[key])} is not supported for type "
                f"{kind!r}: must be left out"
            )
    numbers: dict[str, Any] = {ORIGINAL: max_length if original is None else original}
    numbers |= {
        key: _number(key, given[key])
        for key in (*required, *optional, THETA, PARTIAL, ORIGINAL)
        if given.get(key) is not None and key not in _NO_NUMBERS
    }
    for key in (PARTIAL, ORIGINAL):
        if numbers.get(key, 1.0) <= 0:
            raise ValueError(f"config.json: RoPE's {key}={shown(numbers[key])} must be positive")
    scaling = _scaling(kind, given, numbers, max_length)
    return RopeKeys(numbers.get(THETA, theta), scaling, numbers.get(PARTIAL, 1.0))


def write(theta: float, scaling: RopeScaling | None, max_length: int) -> dict[str, Any]:
    """Keys of `config.json` that readers of both spellings, such as `merged`, understand."""
    scaled = _scaling_keys(scaling, max_length)
    keys: dict[str, Any] = {
        THETA: theta,
        "rope_parameters": {"rope_type": "default", **scaled, THETA: theta},
    }
    return {**keys, "rope_scaling": scaled} if scaled else keys


def merged(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys from all places in a `config.json`, with `rope_type` for either of its names."""
    new, old = _object(hf, "rope_parameters"), _object(hf, "rope_scaling")
    # A `rope_scaling` that was added to a file of transformers 5 is meant to count.
    if new.get("rope_type", "default") == "default" and "rope_type" in old:
        new.pop("rope_type", None)
    found = {key: hf[key] for key in (THETA, PARTIAL, ORIGINAL) if hf.get(key) is not None}
    for place in (new, old):
        for key, value in place.items():
            if value is None:
                continue
            if found.setdefault(key, value) != value:
                raise ValueError(
                    f"config.json gives RoPE's {shown_name(key)} twice, as {shown(found[key])} "
                    f"and {shown(value)}"
                )
    return found


def _object(hf: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = hf.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} must be an object")
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            raise NotImplementedError(
                f"{name} has an object of its own for {shown(key)}, which is not supported: all "
                "layers must have the same RoPE"
            )
    result = {key: inner for key, inner in value.items() if key != "type"}
    kind = value.get("type")
    if kind is not None and result.setdefault("rope_type", kind) != kind:
        raise ValueError(
            f"{name}: type={shown(kind)} must be rope_type={shown(result['rope_type'])}"
        )
    return result


def _number(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: RoPE's {key}={shown(value)} must be a number")
    if not is_finite_number(value):
        raise ValueError(f"config.json: RoPE's {key}={shown(value)} must be finite")
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"config.json: RoPE's {key}={shown(value)} must be true or false")
    return value


def _factors(key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"config.json: RoPE's {key}={shown(value)} must be a list of numbers")
    return tuple(_number(key, factor) for factor in value)


def _scaling(
    kind: str, given: Mapping[str, Any], numbers: Mapping[str, Any], max_length: int
) -> RopeScaling | None:
    original = numbers[ORIGINAL]
    if kind == "linear":
        return LinearScaling(numbers["factor"])
    if kind == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        return Llama3Scaling(numbers["factor"], low, high, original)
    if kind == "yarn":
        return YarnScaling(
            numbers["factor"],
            original,
            # transformers, too, takes a zero as "not given".
            beta_fast=numbers.get("beta_fast") or 32.0,
            beta_slow=numbers.get("beta_slow") or 1.0,
            attention_factor=_yarn_amplitude(numbers),
            truncate=_flag("truncate", given.get("truncate", True)),
        )
    if kind == "longrope":
        factor = numbers.get("factor", max_length / original)
        amplitude = numbers.get("attention_factor")
        return LongRopeScaling(
            _factors("short_factor", given["short_factor"]),
            _factors("long_factor", given["long_factor"]),
            original,
            _long_amplitude(factor, original) if amplitude is None else amplitude,
        )
    return None


def _yarn_amplitude(numbers: Mapping[str, Any]) -> float | None:
    """YaRN's factor of queries and keys if the file sets it; None for the usual one."""
    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])
    upper, lower = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if not upper or not lower:
        return None
    log = math.log(numbers["factor"]) if numbers["factor"] > 1 else 0.0
    divisor = 0.1 * lower * log + 1
    if divisor <= 0:
        raise ValueError(f"config.json: RoPE's mscale_all_dim={lower} must be positive")
    return (0.1 * upper * log + 1) / divisor


def _long_amplitude(factor: float, original: int) -> float:
    """LongRoPE's factor of queries and keys (Ding et al., 2024, section 3)."""
    if factor <= 1:
        return 1.0
    if original < 2:
        raise ValueError(f"config.json: RoPE's {ORIGINAL}={original} must be at least 2")
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _scaling_keys(scaling: RopeScaling | None, max_length: int) -> dict[str, Any]:
    match scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": float(factor)}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": float(scaling.factor),
                "low_freq_factor": float(scaling.low_freq_factor),
                "high_freq_factor": float(scaling.high_freq_factor),
                ORIGINAL: scaling.original_max_length,
            }
        case YarnScaling():
            keys = {
                "rope_type": "yarn",
                "factor": float(scaling.factor),
                ORIGINAL: scaling.original_max_length,
                "beta_fast": float(scaling.beta_fast),
                "beta_slow": float(scaling.beta_slow),
            }
            if scaling.attention_factor is not None:
                keys["attention_factor"] = float(scaling.attention_factor)
            return keys if scaling.truncate else {**keys, "truncate": False}
        case LongRopeScaling():
            original = scaling.original_max_length
            keys = {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                ORIGINAL: original,
            }
            if scaling.attention_factor != _long_amplitude(max_length / original, original):
                keys["attention_factor"] = float(scaling.attention_factor)
            return keys
    return {}
