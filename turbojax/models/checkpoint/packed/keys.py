"""Keys of a `quantization_config`: those that are read are checked; unknown ones are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from turbojax._json import shown, shown_name

Block = Mapping[str, Any]

_WHERE = "config.json: quantization_config"


def require(block: Block, key: str, allowed: Collection[Any], default: Any = None) -> Any:
    """The value of a key; NotImplementedError unless allowed. 1 and 4.0 are not true and 4."""
    value = block.get(key, default)
    if not any(type(value) is type(x) and value == x for x in allowed):
        wanted = " or ".join(repr(x) for x in allowed)
        raise NotImplementedError(
            f"{_WHERE}: {key}={shown(value)} is not supported: must be {wanted}"
        )
    return value


def group_size(value: Any) -> int | None:
    """A group size, None for -1, a whole row; NotImplementedError if `Int4Weight` lacks it."""
    if type(value) is int and (value in (-1, 32, 64) or (value > 0 and value % 128 == 0)):
        return None if value == -1 else value
    raise NotImplementedError(
        f"{_WHERE}: group_size={shown(value)} is not supported: must be 32, 64, a multiple of 128, "
        "or -1 for one scale a row"
    )


def require_off(block: Block, known: Collection[str]) -> None:
    """Raises NotImplementedError for a key that is set and neither read nor harmless (`known`)."""
    for key in sorted(set(block) - set(known)):
        if block[key]:
            raise NotImplementedError(
                f"{_WHERE}: {shown_name(key)}={shown(block[key])} is not supported: must be left "
                "out, which is right if it changes no weight and no activation"
            )


def an_object(block: Block, key: str) -> Block:
    """The object that a key holds; ValueError if it holds something else."""
    value = block.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"{_WHERE}: {key}={shown(value)} must be an object")
    return value


def groups(inputs: int, size: int | None) -> tuple[int, int]:
    """Inputs of a group, and groups of a row; a size of None stands for all inputs."""
    size = inputs if size is None else size
    return size, -(-inputs // size)
