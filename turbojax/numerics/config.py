"""The static description of a quantized attention: bits, blocks, softmax and number formats."""

import dataclasses
from typing import Any, Literal, Self, get_args

from turbojax import _device
from turbojax._checks import check_integer
from turbojax._pytrees import static
from turbojax.numerics.sas import SAS

Mode = Literal["int8", "int8_fp8", "fp8", "float"]
Gradient = Literal["float", "8bit"]
Flush = Literal["oldest", "all"]
PriorityMethod = Literal["gap_std", "entropy", "min_max", "variation"]

SUPPORTED_BITS = (2, 3, 4)
# Packing splits a block of tokens into eighths (the 1-bit plane of 3-bit codes).
_BLOCK_MULTIPLE = 8


@static
@dataclasses.dataclass(frozen=True)
class TurboConfig:
    """Numerics of `turbo_attention` and layout of a `ProgressiveCache` (TurboAttention).

    Frozen and hashable: static under `jit`, stored in the cache it describes.

    The defaults are the numerics with the least loss on text of those that are fast on Hopper, the
    same on every device; `docs/numerics.md` has the table that they were chosen by. `paper` gives
    the paper's, `for_device` what is fast on a GPU without e4m3 units.

    Attributes:
      key_bits: stage-2 bits of the keys' codes, 2, 3 or 4.
      value_bits: the same for the values.
      num_low_bit_key_heads: how many KV heads, those of lowest priority, store their keys with
        `low_bits` (Eq. 12). The count is static; which heads these are is decided from the data.
      num_low_bit_value_heads: the same for the values, ranked separately.
      heads_per_group: rank heads within groups of so many neighbours, each of which then has these
        numbers of low-bit heads; None for all heads in one group. Devices that share out heads have
        whole groups, so that a head's bits do not depend on how many devices there are.
      low_bits: bits of those heads.
      block_q: query tokens that share one stage-1 scale (B_r), a positive multiple of 8.
      block_kv: key/value tokens of one block (B_c), a positive multiple of 8.
      buffer_size: tokens of the int8 decode buffer (n_b), a multiple of `block_kv`; two blocks if
        not given. `dataclasses.replace` keeps the number of tokens; with ``buffer_size=None`` it is
        two blocks of the new size.
      flush: what a full buffer compresses: its ``"oldest"`` block, so that the newest tokens stay
        in 8 bits, or ``"all"`` of it, which leaves it empty (the paper's). For a buffer of one
        block it is the same.
      first_tokens: how many of a sequence's first tokens stay in the buffer for good, in 8 bits:
        models attend to the first one so much that its key, unlike all others, would widen the
        scales of its block (attention sinks). At most a block less than `buffer_size`, and 0 with
        ``flush="all"``. If not given it is 1 where that is allowed. A cache with a window holds
        none.
      softmax: a `SAS`, or ``"exact"``.
      mode: the operands of the two matrix products within whole sequences and prompts:
        ``"int8"`` (Q, K, P, V int8), ``"int8_fp8"`` (Q, K int8; P, V e4m3), ``"fp8"`` (all e4m3),
        ``"float"`` (not rounded). A cache holds the same codes in every mode, which are integers:
        `decode` multiplies int8 in every 8-bit mode, and unrounded numbers in ``"float"``.
      head_priority: how heads are ranked, see `head_priority`.
      gradient: whether the backward pass rounds the outputs' gradients where they multiply the
        values: ``"float"`` (no) or ``"8bit"`` (to the format that the mode gives the values: int8
        in ``"int8"``, else e4m3); not ``"8bit"`` in mode ``"float"``.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a value is outside the range stated here.
    """

    key_bits: int = 4
    value_bits: int = 4
    num_low_bit_key_heads: int = 0
    num_low_bit_value_heads: int = 0
    low_bits: int = 2
    block_q: int = 64
    block_kv: int = 64
    buffer_size: int = None  # type: ignore[assignment]  # two blocks, see `__post_init__`
    softmax: SAS | Literal["exact"] = "exact"
    mode: Mode = "int8_fp8"
    head_priority: PriorityMethod = "gap_std"
    gradient: Gradient = "float"
    heads_per_group: int | None = None
    flush: Flush = "oldest"
    first_tokens: int | None = None

    @classmethod
    def paper(cls, **overrides: Any) -> Self:
        """The configuration of the paper: int8 products, SAS, blocks and a buffer of 64 tokens.

        A full buffer is compressed as a whole, and no token stays in it. On a real model that alone
        costs twice the bits per token of the default (``docs/benchmarks/real_model.md``).

        Args:
          **overrides: fields with other values.

        Raises:
          TypeError: as the constructor, also for an unknown field.
          ValueError: as the constructor.
        """
        blocks = {"block_q": 64, "block_kv": 64, "buffer_size": 64}
        return cls(**{"mode": "int8", "softmax": SAS(), "flush": "all", **blocks, **overrides})

    @classmethod
    def for_device(cls, **overrides: Any) -> Self:
        """The default where the GPU has e4m3 units, int8 products where it has none.

        That is: ``mode="int8"`` on NVIDIA GPUs before compute capability 8.9 (Ampere and older),
        for which modes with e4m3 have no kernel. On all others, and where jax's default device is
        no NVIDIA GPU, it is the default.

        Args:
          **overrides: fields with other values.

        Raises:
          TypeError: as the constructor, also for an unknown field.
          ValueError: as the constructor.
        """
        fast: dict[str, Any] = {"mode": "int8"} if _device.lacks_e4m3() else {}
        return cls(**(fast | overrides))

    def __post_init__(self) -> None:
        if self.buffer_size is None:
            check_integer("block_kv", self.block_kv)
            object.__setattr__(self, "buffer_size", 2 * self.block_kv)
        for field in dataclasses.fields(self):
            if field.type is int:
                check_integer(field.name, getattr(self, field.name))
        for name in ("key_bits", "value_bits", "low_bits"):
            if getattr(self, name) not in SUPPORTED_BITS:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {SUPPORTED_BITS}")
        for name in ("num_low_bit_key_heads", "num_low_bit_value_heads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        self._check_groups()
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 1 or getattr(self, name) % _BLOCK_MULTIPLE:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a positive multiple of {_BLOCK_MULTIPLE}"
                )
        if self.buffer_size < 1 or self.buffer_size % self.block_kv:
            raise ValueError(f"{self.buffer_size=} must be a positive multiple of {self.block_kv=}")
        self._check_first_tokens()
        if not (isinstance(self.softmax, SAS) or self.softmax == "exact"):
            raise ValueError(f"{self.softmax=} must be a SAS or 'exact'")
        if self.mode not in get_args(Mode):
            raise ValueError(f"{self.mode=} must be one of {get_args(Mode)}")
        if self.gradient not in get_args(Gradient):
            raise ValueError(f"{self.gradient=} must be one of {get_args(Gradient)}")
        if self.gradient != "float" and self.mode == "float":
            raise ValueError(f"{self.gradient=} must be 'float' where mode='float'")
        if self.head_priority not in get_args(PriorityMethod):
            raise ValueError(f"{self.head_priority=} must be one of {get_args(PriorityMethod)}")

    def _check_first_tokens(self) -> None:
        if self.flush not in get_args(Flush):
            raise ValueError(f"{self.flush=} must be one of {get_args(Flush)}")
        if self.first_tokens is None:
            return
        check_integer("first_tokens", self.first_tokens)
        if not 0 <= self.first_tokens <= self._room_for_first_tokens:
            raise ValueError(
                f"{self.first_tokens=} must be from 0 to {self._room_for_first_tokens}, with "
                f"{self.buffer_size=}, {self.block_kv=} and {self.flush=}"
            )

    @property
    def _room_for_first_tokens(self) -> int:
        return self.buffer_size - self.block_kv if self.flush == "oldest" else 0

    @property
    def num_first_tokens(self) -> int:
        """Tokens that stay in the buffer for good: `first_tokens`, or what stands for None."""
        given = self.first_tokens
        return min(1, self._room_for_first_tokens) if given is None else given

    @property
    def flush_size(self) -> int:
        """Tokens that a full buffer compresses."""
        return self.block_kv if self.flush == "oldest" else self.buffer_size

    def _check_groups(self) -> None:
        size = self.heads_per_group
        if size is None:
            return
        check_integer("heads_per_group", size)
        for name in ("num_low_bit_key_heads", "num_low_bit_value_heads"):
            if getattr(self, name) > size or size < 1:
                raise ValueError(
                    f"heads_per_group={size} must be at least 1 and {name}={getattr(self, name)}"
                )

    def groups_of(self, num_kv_heads: int) -> int:
        """Groups of heads that are ranked by themselves, of so many KV heads.

        Raises:
          ValueError: if they are not a whole number.
        """
        size = self.heads_per_group or num_kv_heads
        if num_kv_heads % size:
            raise ValueError(f"{num_kv_heads=} must be a multiple of heads_per_group={size}")
        return num_kv_heads // size

    def grouped(self, num_kv_heads: int, groups: int) -> Self:
        """The same share of low-bit heads in each of so many groups, for as many devices.

        Args:
          num_kv_heads: of the model.
          groups: of its heads.

        Raises:
          ValueError: if heads, or those of few bits, cannot be shared out evenly.
        """
        now = self.groups_of(num_kv_heads)
        low = [now * self.num_low_bit_key_heads, now * self.num_low_bit_value_heads]
        for name, count in zip(("key", "value"), low, strict=True):
            if num_kv_heads % groups or count % groups:
                raise ValueError(
                    f"{num_kv_heads=} and {count} low-bit {name} heads must be multiples of "
                    f"{groups=}"
                )
        return dataclasses.replace(
            self,
            heads_per_group=num_kv_heads // groups,
            num_low_bit_key_heads=low[0] // groups,
            num_low_bit_value_heads=low[1] // groups,
        )
