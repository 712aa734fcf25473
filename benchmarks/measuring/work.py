"""How much work a call is, at least: floating-point operations, and bytes that must move."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.shapes import Shape
from turbojax import TurboConfig
from turbojax.caches.comparison import Kivi
from turbojax.caches.progressive.append_reference import stored_blocks

_BFLOAT16 = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call must do whichever way it is done.

    Attributes:
      amount: bytes, or operations (a multiplication and an addition are two).
      shares: parts of the amount by the unit that does it, named as in the ceilings: ``"copy"``
        (bytes), or number formats (operations). They sum to 1.
    """

    amount: float
    shares: Mapping[str, float]

    @property
    def is_bytes(self) -> bool:
        return "copy" in self.shares

    def rate(self, microseconds: float) -> float:
        """GB/s of bytes, TFLOP/s of operations."""
        return self.amount / microseconds / (1e3 if self.is_bytes else 1e6)

    def percent_of_ceiling(
        self, microseconds: float, ceilings: Mapping[str, float | None]
    ) -> float | None:
        """The time that the ceilings allow, in percent of the time taken."""
        rates = {unit: ceilings.get(unit) for unit in self.shares}
        if any(rate is None for rate in rates.values()):
            return None
        ideal = sum(share / rates[unit] for unit, share in self.shares.items())
        return 100 * self.rate(microseconds) * ideal


# Which unit multiplies: Q K^T, then P V.
_UNITS = {
    "bf16": ("bf16", "bf16"),
    "float": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int8_fp8": ("int8", "fp8"),
    "fp8": ("fp8", "fp8"),
}


def attention_operations(shape: Shape) -> float:
    """``4 B N T S H``, of which causal attention needs half, and a window what it shows."""
    heads = shape.heads
    full = 4.0 * shape.batch * heads.query * shape.tokens**2 * heads.dim
    if shape.window is not None:
        seen = min(shape.window + 1, shape.tokens)
        # The first queries see less.
        return full * (seen * shape.tokens - seen * (seen - 1) / 2) / shape.tokens**2
    return full / 2 if shape.is_causal else full


def prefill_work(shape: Shape, mode: str) -> Work:
    """The two products of a prefill in a mode of `TurboConfig`, or in ``"bf16"``."""
    scores, values = _UNITS[mode]
    shares = {scores: 0.5}
    shares[values] = shares.get(values, 0) + 0.5
    return Work(attention_operations(shape), shares)


def training_work(shape: Shape, mode: str, gradient: str) -> Work:
    """The two products of the forward pass and five of the backward pass."""
    scores, values = _UNITS[mode]
    shares: dict[str, float] = {}
    for unit in (scores, values, scores, values if gradient == "8bit" else "bf16", *["bf16"] * 3):
        shares[unit] = shares.get(unit, 0) + 1 / 7
    return Work(3.5 * attention_operations(shape), shares)


def _query_and_output(shape: Shape) -> int:
    return 2 * shape.batch * shape.heads.query * shape.heads.dim * _BFLOAT16


def bfloat16_bytes(shape: Shape, length: int) -> int:
    return 2 * shape.batch * length * shape.heads.kv * shape.heads.dim * _BFLOAT16


def turbo_bytes(shape: Shape, length: int, config: TurboConfig) -> int:
    """Bytes of a `ProgressiveCache` that hold `length` tokens: used blocks and used buffer."""
    heads, block = shape.heads, config.block_kv
    blocks = int(stored_blocks(config, np.int64(length)))
    buffered, total = length - blocks * block, 0
    for bits, low in (
        (config.key_bits, config.num_low_bit_key_heads),
        (config.value_bits, config.num_low_bit_value_heads),
    ):
        codes = block * heads.dim * ((heads.kv - low) * bits + low * config.low_bits) // 8
        # int8 scale and zero of each channel, a float32 scale, per head and block.
        scales = heads.kv * (2 * heads.dim + 4)
        total += blocks * (codes + scales) + heads.kv * (buffered * heads.dim + 4)
    return shape.batch * total


def kivi_bytes(shape: Shape, length: int, config: Kivi) -> int:
    """Bytes of a `KiviCache` without factors that hold `length` tokens."""
    total, channels = 0, shape.heads.dim
    groups = (config.group_size, config.channels_per_group(channels))
    for compressed, group in zip(config.compressed(np.int64(length)), groups, strict=True):
        vectors = shape.batch * int(compressed) * shape.heads.kv
        total += vectors * channels * config.bits // 8
        total += vectors * channels // group * 2 * _BFLOAT16
        total += bfloat16_bytes(shape, length - int(compressed)) // 2
    return total


def decode_work(shape: Shape, cache_bytes: int, queries: int = 1) -> Work:
    """Reading a cache and some queries of each sequence, and writing as many outputs."""
    return Work(cache_bytes + queries * _query_and_output(shape), {"copy": 1.0})


def compress_work(shape: Shape, config: TurboConfig) -> Work:
    """Reading bfloat16 keys and values and writing what stands for them."""
    read = bfloat16_bytes(shape, shape.tokens)
    return Work(read + turbo_bytes(shape, shape.tokens, config), {"copy": 1.0})


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a call must do whichever way it is done.

    Attributes:
      nbytes: read and written.
      operations: of products; a multiplication and an addition are two.
      unit: the number format of the products, as in the ceilings.
    """

    nbytes: float
    operations: float
    unit: str

    def floor(self, ceilings: Mapping[str, float | None]) -> tuple[float, str] | None:
        """The microseconds that the ceilings allow, and which of them sets the time."""
        amounts = {"copy": self.nbytes / 1e3}
        if self.operations:
            amounts[self.unit] = self.operations / 1e6
        rates = {name: ceilings.get(name) for name in amounts}
        if any(rate is None for rate in rates.values()):
            return None
        return max((amount / rates[name], name) for name, amount in amounts.items())

    def facts(self, microseconds: float, ceilings: Mapping[str, float | None]) -> dict[str, Any]:
        floor = self.floor(ceilings)
        return {
            "bytes": self.nbytes,
            "operations": self.operations,
            "gigabytes_per_second": self.nbytes / microseconds / 1e3,
            "tflops_per_second": self.operations / microseconds / 1e6,
            "floor_us": None if floor is None else floor[0],
            "bound": None if floor is None else floor[1],
            "percent_of_ceiling": None if floor is None else 100 * floor[0] / microseconds,
        }
