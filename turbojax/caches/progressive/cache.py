"""`ProgressiveCache`: the KV cache of FlashQ as a pytree (TurboAttention, sections 3.1-3.3).

A sequence's tokens are kept in blocks of packed stage-2 codes, the newest ones in an int8
buffer whose scale never changes, so that a stored token is not quantized again until the buffer
is full and its oldest block is compressed. The first token stays in the buffer for good: a model
attends to it most, as to a sink, so it is kept in 8 bits.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import leaves_by_path, nbytes, pytree
from turbojax.caches import rolling_buffer
from turbojax.caches.arrays import CacheArrays
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.int8 import INT8_RANGE, round_scale
from turbojax.numerics.packing import packed_size
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born
from turbojax.sharding.specs import Split, spec_of
from turbojax.sharding.varying import varying_like

if TYPE_CHECKING:
    from pallas_kernels.layouts import Side


@pytree
@dataclasses.dataclass(frozen=True)
class CacheSide(Split):
    """The keys, or the values, of a `ProgressiveCache`.

    Shapes: `B` sequences, `K` KV heads, `n` blocks of `block` tokens, head dim `H`. A sequence's
    block number `i` is in place ``i % n``: there are no more than `n`, unless the cache is a
    rolling buffer.

    Attributes:
      codes: one uint8 array per bit width in use, widest first. Heads are in slot order: the
        first array holds the first slots. Keys ``[B, K_i, n, block, H * bits / 8]``, values
        ``[B, K_i, n, H, block * bits / 8]`` (see `turbojax.numerics.packing`).
      channel_scale: int8 ``[B, K, n, H]``, stage-2 scales, at least 1 in a used block.
      channel_zero: int8 ``[B, K, n, H]``, stage-2 zeros.
      block_scale: float32 ``[B, K, n]``, stage-1 scales; NaN where a token was not finite.
      head_slots: int32 ``[B, K]``, the slot of each head in its group: within each group a
        permutation of ``0..n-1``, of `n` heads. `places` counts them among all heads.
      buffer: int8 ``[B, K, buffer_size, H]``, stage-1 codes, 0 past the buffer's length.
      buffer_scale: float32 ``[B, K]``, the universal scales; 0 as long as all tokens of the head
        are zero, NaN once a token was not finite.
      bits: the widths of `codes`.
      tokens_last: whether codes are packed along tokens (values) or channels (keys).
      heads_per_group: see `TurboConfig`; None for all heads in one group.
    """

    codes: tuple[jax.Array, ...]
    channel_scale: jax.Array
    channel_zero: jax.Array
    block_scale: jax.Array
    head_slots: jax.Array
    buffer: jax.Array
    buffer_scale: jax.Array
    bits: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    tokens_last: bool = dataclasses.field(metadata={"static": True})
    heads_per_group: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def places(self) -> jax.Array:
        """int32 ``[B, K]``: of each head the place in `codes`, counted through all its arrays."""
        heads, first = self.buffer.shape[-3], self.codes[0].shape[-4]
        size = self.heads_per_group or heads
        if len(self.codes) == 1:
            # With one width, slots do not move heads, and may count the heads of all devices.
            slots = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32), self.head_slots.shape)
            return varying_like(slots, self.head_slots)
        if size == heads:
            return self.head_slots
        wide = first * size // heads  # of a group, those in the first array
        group = jnp.arange(heads, dtype=jnp.int32)[None] // size
        low = first - wide + group * (size - wide)
        return self.head_slots + jnp.where(self.head_slots < wide, group * wide, low)

    @property
    def places_for_kernels(self) -> jax.Array:
        """`places`, or, for heads of one width, an array that kernels do not read.

        To compute places that do not depend on data would take a kernel of its own in every call.
        """
        return self.head_slots if len(self.codes) == 1 else self.places

    def for_kernels(self) -> "Side":
        """The side as kernels take it."""
        from pallas_kernels.layouts import Side

        fields = {name: getattr(self, name) for name in Side._fields}
        return Side(**(fields | {"head_slots": self.places_for_kernels}))

    AXES: ClassVar[dict[str, str]] = {
        "codes": "BKLRC",
        "channel_scale": "BKLH",
        "channel_zero": "BKLH",
        "block_scale": "BKL",
        "head_slots": "BK",
        "buffer": "BKRH",
        "buffer_scale": "BK",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`.

    They hold for every array of `codes`.
    """

    COPIES: ClassVar[dict[str, int]] = {"head_slots": 1, "buffer": 2, "buffer_scale": 1}
    """Where blocks are split over devices, all have the newest tokens, and what they tell."""


@pytree
@dataclasses.dataclass(frozen=True)
class ProgressiveCache(CacheArrays):
    """Keys and values of `B` sequences, compressed progressively.

    The caches of several layers may be stacked along a new first axis of every array, and mapped
    or scanned over.

    Made by `init_cache`; `prefill`, `append` and `decode` take it and never change it in place
    (donate it to `jit` to reuse its memory).

    Where `f` first tokens stay in the buffer (`TurboConfig.num_first_tokens`), they are in its
    first `f` slots, block `i` holds the tokens from ``f + i * block_kv`` on, and the buffer's slot
    ``j >= f`` holds token ``lengths - buffer_lengths + j``.

    Invariants (`validate` checks them):
      - ``0 <= buffer_lengths <= lengths <= max_length`` and ``buffer_lengths < buffer_size``;
      - ``lengths - buffer_lengths`` is a multiple of ``config.block_kv``; where it is not 0,
        ``buffer_lengths`` is at least what a flush leaves, ``buffer_size - flush_size``;
      - buffer codes are within +-119, ``head_slots`` rows are permutations, scales of blocks
        and of buffers that are not all zero are positive or NaN.

    Attributes:
      key: the keys.
      value: the values.
      lengths: int32 ``[B]``, tokens seen; all are held, unless this is a rolling buffer.
      buffer_lengths: int32 ``[B]``, those of them in the buffer.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out: past
        `max_length`, or a prefill into a sequence that was not empty.
      config: the `TurboConfig` it was made for; with a window it has no first tokens.
      max_length: tokens each sequence may grow to.
      dtype: dtype of the keys and values it takes.
      window: tokens that a query may see, its own included, see `turbojax.caches.rolling_buffer`;
        None for all.
    """

    key: CacheSide
    value: CacheSide
    lengths: jax.Array
    buffer_lengths: jax.Array
    overflowed: jax.Array
    config: TurboConfig = dataclasses.field(metadata={"static": True})
    max_length: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "lengths": "B",
        "buffer_lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`. Sides
    have their own.
    """

    def check_split(self, axes: Axes) -> None:
        """Raises ValueError where heads are ranked among those of several devices."""
        devices, size = axes.size("heads"), self.config.heads_per_group or self.num_kv_heads
        if len(self.key.codes) == len(self.value.codes) == 1 or devices == 1:
            return
        if self.num_kv_heads // devices % size:
            raise ValueError(
                f"heads_per_group={self.config.heads_per_group} must divide the "
                f"{self.num_kv_heads // devices} KV heads of each of {devices} devices: heads of "
                "fewer bits are ranked within groups, and a device has whole ones"
            )

    def local(self, parts: Callable[[str], int]) -> "ProgressiveCache":
        """The cache of one device, which has its part of the arrays.

        Args:
          parts: into how many parts heads, ``"K"``, are split.

        Raises:
          ValueError: if heads are ranked among those of several devices.
        """
        is_mixed = len(self.key.codes) + len(self.value.codes) > 2
        size = self.config.heads_per_group
        if is_mixed and parts("K") > 1 and self.num_kv_heads % (size or self.num_kv_heads + 1):
            raise ValueError(
                f"heads_per_group={size} must divide the {self.num_kv_heads} KV heads of each of "
                f"{parts('K')} devices: heads of fewer bits are ranked within groups, and a device "
                "has whole ones"
            )
        return self

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.key.buffer.shape[-4]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.key.buffer.shape[-3]

    @property
    def head_dim(self) -> int:
        """Channels of a head, `H`."""
        return self.key.buffer.shape[-1]

    @property
    def num_blocks(self) -> jax.Array:
        """int32 ``[B]``: blocks compressed so far; a rolling buffer holds the newest ones."""
        return (self.lengths - self.buffer_lengths) // self.config.block_kv

    @property
    def blocks_of_room(self) -> int:
        """Blocks that a sequence has room for."""
        return self.key.block_scale.shape[-1]

    @property
    def blocks_of_length(self) -> int:
        """Blocks that `max_length` tokens make, or 1."""
        return max(1, self.max_length // self.config.block_kv)

    @property
    def room(self) -> int:
        """Tokens in blocks that a sequence keeps at any time; those in the buffer come on top."""
        return self.blocks_of_room * self.config.block_kv

    def why_not_in_order(self, tokens: int, window: tuple[int, int] | None) -> str | None:
        """Why what queries see does not follow from the places of tokens; None if it does.

        The first slots of the buffer then count as tokens after those of the blocks. They are seen
        by all queries that are in the buffer themselves, as they should be where no window ends.

        Args:
          tokens: newest ones, whose queries attend.
          window: of the call.
        """
        config = self.config
        first = config.num_first_tokens
        if not first:
            return None
        most = max(1, config.buffer_size - config.block_kv - first)
        if tokens > most:
            why = f"{tokens} query tokens must be at most {most}"
        elif window is not None:
            why = f"{window=} must be None, or be that of the cache,"
        else:
            return None
        return f"{why} with {config.num_first_tokens=}; TurboConfig(first_tokens=0) takes any"

    @property
    def is_rolling(self) -> bool:
        """Whether new blocks take the place of those that no window reaches any more."""
        return self.blocks_of_room < self.blocks_of_length

    @property
    def compression_ratio_without_buffer(self) -> float:
        """The same, not counting the two int8 buffers, whose size does not grow with length."""
        buffers = nbytes((self.key.buffer, self.value.buffer))
        return self._bfloat16_bytes / (self.nbytes - buffers)

    def validate(self) -> None:
        """Checks the invariants; under `jit` only shapes and dtypes can be seen.

        Raises:
          ValueError: naming the field and what it breaks.
        """
        expected = jax.eval_shape(
            lambda: _empty(
                self.batch_size,
                self.max_length,
                self.num_kv_heads,
                self.head_dim,
                self.config,
                self.dtype,
                self.window,
            )
        )
        leaves, wanted = leaves_by_path(self), leaves_by_path(expected)
        if leaves.keys() != wanted.keys():
            raise ValueError(f"cache holds {sorted(leaves)}, must hold {sorted(wanted)}")
        for name, leaf in leaves.items():
            want = wanted[name]
            if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
                raise ValueError(
                    f"cache{name} is {leaf.dtype}{list(leaf.shape)}, "
                    f"must be {want.dtype}{list(want.shape)}"
                )
        if _checks.is_concrete(*leaves.values()):
            _validate_values(self)


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    config: TurboConfig = TurboConfig(),
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    axes: Axes | None = None,
) -> ProgressiveCache:
    """An empty cache.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each may grow to.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`, a multiple of 8.
      config: bits, blocks and numerics.
      dtype: of the keys and values to come: bfloat16, float16 or float32.
      key_scale: optional universal scales of the keys' buffer (section 3.3), positive float32,
        broadcastable to ``[B, K]``; rounded up to 16 significant bits. Otherwise the first
        tokens fix them.
      value_scale: the same for the values.
      local_window_size: the largest window that `decode` will be called with, if any: blocks that
        it does not reach are not kept, see `turbojax.caches.rolling_buffer`.
      axes: of a mesh, over which sequences, heads and blocks are split, see `partition_specs`: each
        device makes its part, and none the whole. Every device has as many whole blocks, and all
        those of an axis of the sequence have the buffers. Heads of fewer bits are ranked within
        groups then, see `TurboConfig.heads_per_group`.

    Raises:
      TypeError: if `dtype` is none of these.
      ValueError: if a size is not positive or cannot be split, `head_dim` is not a multiple of 8,
        there are more low-bit heads than heads, a scale has another shape or is not positive, or
        the window is none.
    """
    _checks.check_sizes(
        batch_size=batch_size, max_length=max_length, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    if not isinstance(config, TurboConfig):
        raise TypeError(f"config={config!r} must be a TurboConfig")
    if head_dim % 8:
        raise ValueError(f"{head_dim=} must be a multiple of 8")
    groups = config.groups_of(num_kv_heads)
    for name in ("num_low_bit_key_heads", "num_low_bit_value_heads"):
        if groups * getattr(config, name) > num_kv_heads:
            raise ValueError(f"{name}={getattr(config, name)} must be at most {num_kv_heads=}")
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    window = rolling_buffer.window_of(local_window_size)
    if window is not None:  # which does not reach the first tokens
        config = dataclasses.replace(config, first_tokens=0)
    static: dict[str, Any] = {"config": config, "dtype": dtype, "window": window}
    if axes is None:
        cache = _empty(batch_size, max_length, num_kv_heads, head_dim, **static)
    else:
        block = config.block_kv
        sizes = Sizes(batch_size, max_length, num_kv_heads, block, max_length // block)
        cache = born(_empty, axes, sizes, head_dim=head_dim, **static)
    given: Any = {"shape": (batch_size, num_kv_heads), "axes": axes}
    return dataclasses.replace(
        cache,
        key=_with_scale(cache.key, "key_scale", key_scale, **given),
        value=_with_scale(cache.value, "value_scale", value_scale, **given),
    )


def _empty(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    config: TurboConfig,
    dtype: np.dtype,
    window: int | None,
) -> ProgressiveCache:
    block, heads = config.block_kv, (batch_size, num_kv_heads)
    # A rolling buffer must have room for all blocks of a full buffer.
    needed = max(rolling_buffer.units(window, max_length, block), config.buffer_size // block)
    blocks = max(1, min(needed, max_length // block))

    def side(bits: int, num_low: int, tokens_last: bool) -> CacheSide:
        num_low *= config.groups_of(num_kv_heads)
        groups = [(num_kv_heads - num_low, bits), (num_low, config.low_bits)]
        groups = [(count, width) for count, width in groups if count]

        def codes(count: int, width: int) -> jax.Array:
            rows, packed = (head_dim, block) if tokens_last else (block, head_dim)
            shape = (batch_size, count, blocks, rows, packed_size(packed, width))
            return jnp.zeros(shape, jnp.uint8)

        slots = jnp.arange(num_kv_heads, dtype=jnp.int32)[None]
        slots = jnp.broadcast_to(slots % (config.heads_per_group or num_kv_heads), heads)
        return CacheSide(
            codes=tuple(codes(count, width) for count, width in groups),
            channel_scale=jnp.zeros((*heads, blocks, head_dim), jnp.int8),
            channel_zero=jnp.zeros((*heads, blocks, head_dim), jnp.int8),
            block_scale=jnp.zeros((*heads, blocks), jnp.float32),
            head_slots=slots,
            buffer=jnp.zeros((*heads, config.buffer_size, head_dim), jnp.int8),
            buffer_scale=jnp.zeros(heads, jnp.float32),
            bits=tuple(width for _, width in groups),
            tokens_last=tokens_last,
            heads_per_group=config.heads_per_group,
        )

    return ProgressiveCache(
        key=side(config.key_bits, config.num_low_bit_key_heads, tokens_last=False),
        value=side(config.value_bits, config.num_low_bit_value_heads, tokens_last=True),
        lengths=jnp.zeros(batch_size, jnp.int32),
        buffer_lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        config=config,
        max_length=max_length,
        dtype=dtype,
        window=window,
    )


def _with_scale(
    side: CacheSide, name: str, scale: jax.Array | None, shape: tuple[int, int], axes: Axes | None
) -> CacheSide:
    if scale is None:
        return side
    scale = jnp.asarray(scale, jnp.float32)
    try:
        full = jnp.broadcast_to(scale, shape)
    except ValueError:
        raise ValueError(f"{name}.shape={scale.shape} must broadcast to {shape}") from None
    full = round_scale(full)
    tiny = np.finfo(np.float32).tiny
    if _checks.is_concrete(full) and not np.all((np.asarray(full) >= tiny) & np.isfinite(full)):
        raise ValueError(f"{name}={np.asarray(scale).tolist()} must be positive and finite")
    scales = full if axes is None else _on_devices(full, axes)
    return dataclasses.replace(side, buffer_scale=scales)


def _on_devices(x: jax.Array, axes: Axes) -> jax.Array:
    """Scales ``[B, K]`` as every device has them: its heads', see `Split.COPIES`."""
    heads = x.shape[1] // (axes.size("heads") if x.shape[1] > 1 else 1)
    x = jnp.repeat(x.reshape(len(x), -1, 1, heads), axes.size("sequence"), axis=2)
    x = x.reshape(len(x), -1)
    dims = CacheSide.AXES["buffer_scale"]
    spec = spec_of(dims, x.shape, axes, CacheSide.COPIES["buffer_scale"])
    return jax.device_put(x, jax.sharding.NamedSharding(axes.require_mesh(), spec))


def _validate_values(cache: ProgressiveCache) -> None:
    lengths, buffered = np.asarray(cache.lengths), np.asarray(cache.buffer_lengths)
    config = cache.config
    if np.any((lengths < 0) | (lengths > cache.max_length)):
        raise ValueError(f"lengths={lengths.tolist()} must be within 0..{cache.max_length}")
    left = config.buffer_size - config.flush_size
    least = np.where(lengths > buffered, left, 0)
    if np.any((buffered < least) | (buffered > lengths) | (buffered >= config.buffer_size)):
        raise ValueError(
            f"buffer_lengths={buffered.tolist()} must be within 0..{config.buffer_size - 1}, at "
            f"most lengths={lengths.tolist()}, and at least {left} where there are blocks"
        )
    if np.any((lengths - buffered) % config.block_kv):
        raise ValueError(
            f"lengths - buffer_lengths={(lengths - buffered).tolist()} must be multiples of "
            f"{config.block_kv=}"
        )
    for name, side in (("key", cache.key), ("value", cache.value)):
        _validate_side(name, side, lengths, np.asarray(cache.num_blocks))


def _validate_side(name: str, side: CacheSide, lengths: np.ndarray, blocks: np.ndarray) -> None:
    if np.any(np.abs(np.asarray(side.buffer, np.int32)) > INT8_RANGE):
        raise ValueError(f"{name}.buffer must be within +-{INT8_RANGE}")
    slots = np.asarray(side.head_slots)
    groups = slots.reshape(len(slots), -1, side.heads_per_group or slots.shape[-1])
    if np.any(np.sort(groups, axis=-1) != np.arange(groups.shape[-1])):
        raise ValueError(f"{name}.head_slots={slots.tolist()} must be permutations")
    scale = np.asarray(side.buffer_scale)
    holds = np.any(np.asarray(side.buffer) != 0, axis=(-1, -2))
    if np.any((scale < 0) | (holds & (scale == 0))):
        raise ValueError(
            f"{name}.buffer_scale={scale.tolist()} must be positive where the buffer is not zero"
        )
    count = side.block_scale.shape[2]
    used = (np.arange(count)[None, :] < blocks[:, None])[:, None, :]
    if np.any(used & (np.asarray(side.block_scale) <= 0)):
        raise ValueError(f"{name}.block_scale must be positive or NaN in used blocks")
    if np.any(used[..., None] & (np.asarray(side.channel_scale) < 1)):
        raise ValueError(f"{name}.channel_scale must be at least 1 in used blocks")
