"""`Kivi` and `KiviCache`: what is stored of tokens that KIVI and GEAR compress."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree, static
from turbojax.caches.comparison.base import BaselineCache
from turbojax.caches.comparison.codes import stored_dtype
from turbojax.numerics.packing import packed_size

SUPPORTED_BITS = (2, 3, 4)
_LARGEST_GROUP = 1024


@static
@dataclasses.dataclass(frozen=True)
class Kivi:
    """How KIVI (`rank` 0) or GEAR compress a cache. Static under `jit`.

    Attributes:
      bits: of a code, 2, 3 or 4.
      group_size: tokens (of keys) that share a minimum and a scale, at most 1024; of values so many
        channels, or the largest divisor of the head dim below.
      residual_length: tokens that are kept as they are, a multiple of `group_size`.
      rank: of the approximation of the codes' error; 0 for none.

    Raises:
      TypeError: if a value is not an integer.
      ValueError: if one is out of range, or `residual_length` not such a multiple.
    """

    bits: int = 4
    group_size: int = 64
    residual_length: int = 128
    rank: int = 0

    def __post_init__(self) -> None:
        _checks.check_sizes(group_size=self.group_size, residual_length=self.residual_length)
        for name in ("bits", "rank"):
            _checks.check_integer(name, getattr(self, name))
        if self.bits not in SUPPORTED_BITS:
            raise ValueError(f"{self.bits=} must be one of {SUPPORTED_BITS}")
        if self.group_size > _LARGEST_GROUP:
            raise ValueError(f"{self.group_size=} must be at most {_LARGEST_GROUP}")
        if self.rank < 0:
            raise ValueError(f"{self.rank=} must not be negative")
        if self.residual_length % self.group_size:
            raise ValueError(f"{self.residual_length=} must be a multiple of {self.group_size=}")

    def channels_per_group(self, head_dim: int) -> int:
        """Channels of a value that share a minimum and a scale."""
        return next(n for n in range(min(self.group_size, head_dim), 0, -1) if head_dim % n == 0)

    def compressed(self, lengths: Any) -> tuple[Any, Any]:
        """How many keys, and how many values, of sequences of such `lengths` are codes."""
        keys = lengths // self.residual_length * self.residual_length
        return keys, keys if self.rank else (lengths - self.residual_length).clip(0)


@pytree
@dataclasses.dataclass(frozen=True)
class KiviCache(BaselineCache):
    """Keys and values of `B` sequences in asymmetric codes, and the newest tokens as they are.

    Shapes: `K` KV heads, head dim `H`, residual of `R` tokens. `S` keys and `V` values have codes:
    as many as a sequence of `max_length` tokens has, but at least `R` and 1. Groups are of `g`
    tokens and `c` channels; ``x = minimum + code * scale`` within a group, and with a rank `r`
    ``left @ right`` is added. What is shared is stored in 16 bits, see `stored_dtype`.

    Invariants: ``0 <= lengths <= max_length``. What is stored past what is held is arbitrary.

    Attributes:
      key_codes: uint8 ``[B, S, K, H * bits / 8]``, packed along channels.
      key_minimum: ``[B, S / g, K, H]``, of each channel over a group of tokens.
      key_scale: the same; NaN where a key is not finite.
      value_codes: uint8 ``[B, V, K, H * bits / 8]``.
      value_minimum: ``[B, V, K, H / c]``, of each token over a group of channels.
      value_scale: the same; NaN where a value is not finite.
      key_residual: ``[B, R, K, H]``, the newest tokens; token `p` is in row ``p % R``.
      value_residual: the same.
      key_left: ``[B, S, K, r]``, or None without a rank.
      key_right: ``[B, S / R, K, r, H]``: of the prompt's tokens the first, of each `R` tokens after
        it one more. There is room for a text without a prompt, so that behind a long prompt most of
        it stays empty and counts among the bytes.
      value_left: as `key_left`; `V` is `S` there.
      value_right: as `key_right`.
      prompt_blocks: int32 ``[B]``, how many times `R` tokens of a prompt have one pair of factors;
        0 without a rank.
      lengths: int32 ``[B]``, tokens held.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      config: how it compresses.
      max_length: tokens each sequence can hold.
    """

    key_codes: jax.Array
    key_minimum: jax.Array
    key_scale: jax.Array
    value_codes: jax.Array
    value_minimum: jax.Array
    value_scale: jax.Array
    key_residual: jax.Array
    value_residual: jax.Array
    key_left: jax.Array | None
    key_right: jax.Array | None
    value_left: jax.Array | None
    value_right: jax.Array | None
    prompt_blocks: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    config: Kivi = dataclasses.field(metadata={"static": True})
    max_length: int = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        **{f"{side}_{name}": "BRKC" for side in ("key", "value") for name in ("codes", "left")},
        **{f"{side}_right": "BRKCH" for side in ("key", "value")},
        "key_minimum": "BRKH",
        "key_scale": "BRKH",
        "value_minimum": "BRKC",
        "value_scale": "BRKC",
        "key_residual": "BRKH",
        "value_residual": "BRKH",
        "prompt_blocks": "B",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`: tokens stay whole."""

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.key_residual.shape[-4]

    @property
    def residual_length(self) -> int:
        """Tokens of the residual, `R`."""
        return self.key_residual.shape[-3]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.key_residual.shape[-2]

    @property
    def head_dim(self) -> int:
        """Channels of a head, `H`."""
        return self.key_residual.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Of the keys and values it takes."""
        return self.key_residual.dtype


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    config: Kivi = Kivi(),
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> KiviCache:
    """An empty cache of these sizes.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each can hold.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`, a multiple of 2, 4 or 8 for 4, 2 or 3 bits.
      config: how it compresses.
      dtype: of keys and values.

    Raises:
      TypeError: if `dtype` is none of bfloat16, float16, float32, or a size is not an integer.
      ValueError: if a size is not positive, `head_dim` not such a multiple, or below the rank.
    """
    _checks.check_sizes(
        batch_size=batch_size, max_length=max_length, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={dtype} must be bfloat16, float16 or float32")
    try:
        bytes_of_codes = packed_size(head_dim, config.bits)
    except ValueError as error:
        raise ValueError(f"{head_dim=} cannot be packed: {error}") from None
    if config.rank > head_dim:
        raise ValueError(f"{config.rank=} must be at most {head_dim=}")
    residual, shared = config.residual_length, stored_dtype(dtype)
    keys, values = (int(n) for n in config.compressed(np.int64(max_length)))
    keys, values = max(keys, residual), max(values, residual if config.rank else 1)
    groups = head_dim // config.channels_per_group(head_dim)

    def zeros(tokens: int, *last: int, dtype: Any = shared) -> jax.Array:
        return jnp.zeros((batch_size, tokens, num_kv_heads, *last), dtype)

    def low_rank(tokens: int, *last: int) -> jax.Array | None:
        return zeros(tokens, *last) if config.rank else None

    return KiviCache(
        key_codes=zeros(keys, bytes_of_codes, dtype=jnp.uint8),
        key_minimum=zeros(keys // config.group_size, head_dim),
        key_scale=zeros(keys // config.group_size, head_dim),
        value_codes=zeros(values, bytes_of_codes, dtype=jnp.uint8),
        value_minimum=zeros(values, groups),
        value_scale=zeros(values, groups),
        key_residual=zeros(residual, head_dim, dtype=dtype),
        value_residual=zeros(residual, head_dim, dtype=dtype),
        key_left=low_rank(keys, config.rank),
        key_right=low_rank(keys // residual, config.rank, head_dim),
        value_left=low_rank(values, config.rank),
        value_right=low_rank(values // residual, config.rank, head_dim),
        prompt_blocks=jnp.zeros(batch_size, jnp.int32),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        config=config,
        max_length=max_length,
    )
