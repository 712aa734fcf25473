"""Progressively compressed caches: ``"4bit"``, ``"k4v2"``, ``"2/4bit"`` .., any config."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from turbojax.caches.base import (
    Counts,
    Description,
    Grows,
    is_split,
    sides_of,
    validate_layers,
)
from turbojax.caches.new_tokens import Codes
from turbojax.caches.progressive import (
    ProgressiveCache,
    append,
    dequantize,
    init_cache,
)
from turbojax.caches.progressive.api import DECODE, prefill
from turbojax.caches.progressive.update import APPEND, STORE_PROMPT, store_prompt
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS
from turbojax.sharding import tables

_BLOCKS, _BUFFERED = "num_blocks", "buffer_lengths"


class Progressive(Codes[ProgressiveCache]):
    """`ProgressiveCache`; a `TurboConfig` asks for it, and names stand for configs."""

    cls = ProgressiveCache
    names = ("4bit", "k4v2", "2/4bit", "3bit", "2bit")
    takes = (TurboConfig,)
    stored_as = "progressive"
    counting = ("lengths", _BUFFERED)
    has_rolling_buffers = True
    reads = DECODE
    table = tables.DECODE
    grows: ClassVar[Mapping[str, Grows]] = {
        "codes": Grows(-3, _BLOCKS),
        "channel_scale": Grows(-2, _BLOCKS),
        "channel_zero": Grows(-2, _BLOCKS),
        "block_scale": Grows(-1, _BLOCKS),
        "buffer": Grows(-2, _BUFFERED),
    }

    def by_name(self, name: str, num_kv_heads: int, devices: int = 1) -> TurboConfig:
        """See `Kind.by_name`: ``"2/4bit"`` is half of the KV heads at 2 bits, the others at 4.

        Half of an odd number is rounded down for keys and up for values, whose errors cost less:
        keys and values together always have 3 bits on average. With one head the keys have 4 bits
        and the values 2. Over several devices half of each one's heads have 2 bits.
        """
        if name == "k4v2":
            return TurboConfig(value_bits=2)
        if name != "2/4bit":
            bits = int(name[0])
            return TurboConfig(key_bits=bits, value_bits=bits)
        if num_kv_heads % devices:
            raise ValueError(
                f"cache {name!r}: {num_kv_heads} KV heads must be a multiple of {devices} devices"
            )
        size = num_kv_heads // devices
        return TurboConfig(
            num_low_bit_key_heads=size // 2,
            num_low_bit_value_heads=size - size // 2,
            heads_per_group=size if devices > 1 else None,
        )

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: TurboConfig,
        dtype: np.dtype,
        local_window_size: int | None = None,
    ) -> ProgressiveCache:
        """See `Kind.init`."""
        return init_cache(
            batch_size,
            max_length,
            num_kv_heads,
            head_dim,
            config=kind,
            dtype=dtype,
            local_window_size=sides_of(local_window_size),
        )

    def slots(self, kind: TurboConfig, max_length: int) -> tuple[int, int]:
        """See `Kind.slots`: blocks; tokens that fill none stay in the buffer."""
        return kind.block_kv, max_length // kind.block_kv

    append = staticmethod(append)
    prefill = staticmethod(prefill)
    dequantize = staticmethod(dequantize)

    def writer(self, implementation: Any, tokens: int) -> Any:
        """See `Kind.writer`."""
        name = APPEND.beside(implementation)
        # It attends to several tokens, but appends one.
        return None if name == "mosaic_gpu" and tokens > 1 else name

    def store_prompt(
        self,
        cache: ProgressiveCache,
        key: jax.Array,
        value: jax.Array,
        lengths: jax.Array,
        *,
        implementation: Any = None,
    ) -> ProgressiveCache:
        """See `Kind.store_prompt`: tokens that the buffer does not keep are compressed at once."""
        name = STORE_PROMPT.beside(implementation)
        return store_prompt(cache, key, value, lengths, implementation=name)

    def whole_attention(self, kind: TurboConfig) -> TurboConfig:
        """See `Kind.whole_attention`: `turbo_attention` needs no cache."""
        return kind

    def describe(self, cache: ProgressiveCache) -> dict[str, Any]:
        """See `Stored.describe`."""
        return {**super().describe(cache), "config": dataclasses.asdict(cache.config)}

    def make(self, description: Description) -> ProgressiveCache:
        """See `Stored.make`."""
        # Files from before these fields do not have them.
        config = {"flush": "all", **description["config"]}
        if isinstance(config["softmax"], Mapping):
            config["softmax"] = SAS(**config["softmax"])
        return self.make_kind(description, TurboConfig(**config))

    def counts(self, lengths: Counts, cache: ProgressiveCache) -> Counts:
        """See `Stored.counts`: tokens that are not in the buffer are in blocks."""
        compressed = lengths["lengths"] - lengths[_BUFFERED]
        blocks = compressed // cache.config.block_kv
        return {**lengths, _BLOCKS: np.minimum(blocks, cache.blocks_of_room)}

    def check_counts(self, counts: Counts, cache: ProgressiveCache) -> None:
        """See `Stored.check_counts`."""
        size, buffered = cache.config.buffer_size, counts[_BUFFERED]
        if np.any(buffered >= size):
            raise ValueError(f"buffer_lengths={buffered.tolist()} must be below {size}")

    def to_rows(self, cache: ProgressiveCache) -> ProgressiveCache:
        """See `Stored.to_rows`; ValueError if devices have their own slots or copies.

        `save_session` joins such parts first.
        """
        if is_split(cache.key.head_slots):
            self.validate(cache)
        return cache

    def validate(self, cache: ProgressiveCache) -> None:
        """See `Stored.validate`."""
        validate_layers(cache)


PROGRESSIVE = Progressive()
