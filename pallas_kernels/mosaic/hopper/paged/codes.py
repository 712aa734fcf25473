"""Pages whose sides are stored each in its own way: codes of 4, 3 or 2 bits, int8, or e4m3 keys.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, H200; the
frame is `kernel`'s: of 3-bit keys and 2-bit values 84 bytes a token, 82 us; of 2 and 2 bits 66 us,
of 4 and 2 98, of e4m3 keys and 4-bit values 189. Permutes, shifts and logic, 59 to 81 us at full
rate, are issued every second clock. Target: 125, 115, 135 and 205 us. Seen: 123, 112, 129 and 204,
so 67, 59, 76 and 93 % of a copy: with fewer bits, what does not depend on them takes more of the
time.

Products of codes are of int8, see `integers` and `unpack`; those with e4m3 keys are those of `fp8`.
Of int8 see `int8`.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import dataclasses
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged import integers
from pallas_kernels.mosaic.hopper.paged.floats import Fp8
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Program, Query, Settings, Stored
from pallas_kernels.mosaic.hopper.paged.int8 import Int8
from pallas_kernels.mosaic.hopper.paged.unpack import Codes
from pallas_kernels.mosaic.lane import Float, Int, Pointer


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """The products of a block in shared memory; `key` and `value` say how each side is read."""

    head_dim: int
    s: Settings
    key: Codes | Int8 | Fp8
    value: Codes | Int8

    @classmethod
    def of(cls, head_dim: int, s: Settings) -> "Mixed":
        assert s.stored is not None
        key, value = s.stored
        keys: Codes | Int8 | Fp8
        if key.is_float:
            keys = Fp8(head_dim, dataclasses.replace(s, kind="fp8_e4m3", stored=None))
        else:
            keys = _integers(key, head_dim, s)
        return cls(head_dim, s, keys, _integers(value, head_dim, s))

    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        """See `integers.query_operands`."""
        if isinstance(self.key, Fp8):
            return self.key.query_operands(x, here)
        x = [x[i] for i in self.key.key_order]
        return integers.query_operands(x, self._middle(0), here)

    def _middle(self, side: int) -> float:
        assert self.s.stored is not None
        return self.s.stored[side].middle

    def unseen(self, slot: Pointer, begin: Int, at: Program, here: Place) -> list[Int]:
        """Empty: values are integers, and norms of tokens that are not seen are not used."""
        del slot, begin, at, here
        return []

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        if isinstance(self.key, Fp8):
            return self.key.scores(slot, query, here)
        norms = self.norms(0, slot, here)
        return integers.scores(self.key.key_rows(slot, self.s.held, here), norms, query)

    def norms(self, side: int, slot: Pointer, here: Place) -> list[Float]:
        """Norms of the lane's tokens: of keys if `side` is 0, of values if 1."""
        held, block = self.s.held, self.s.block
        first = block * (self.s.key_bytes(self.head_dim) + self.s.row_bytes(self.head_dim))
        first += 2 * block if side and not isinstance(self.key, Fp8) else 0
        selector = (here.odd * 0x2222) ^ 0x3210
        return integers.norms(slot.at(here.g * (2 * held), first).words(held // 2), selector)

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        nonfinite: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        del nonfinite
        norms = self.norms(1, slot, here)
        operands = []
        for p, seen in zip(weights, visible, strict=True):
            w = [v.where(x * n, 0.0) for v, x, n in zip(seen, p, norms, strict=True)]
            operands.append(integers.weight_operands(w, self._middle(1), here))
        values = slot.at(self.s.block * self.s.key_bytes(self.head_dim))
        return integers.weighted(self.value.value_rows(values, self.s.held, here), operands)


def _integers(side: Stored, head_dim: int, s: Settings) -> Codes | Int8:
    return Int8(head_dim) if side.is_int8 else Codes.of(side, head_dim, s.channels or head_dim)


def channel(number: int, here: Place, head_dim: int, bits: int) -> Int:
    """The channel of a lane's output `number`, for values of `bits` bits."""
    if bits == 8:
        return Int8(head_dim).channel(number, here)
    return Codes(bits, head_dim, head_dim, []).channel(number, here)
