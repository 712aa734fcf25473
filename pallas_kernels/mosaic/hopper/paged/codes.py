"""Pages whose sides are stored each in its own way: codes of 4, 3 or 2 bits, int8, or e4m3 keys.

Roofline, for 16 sequences, 8 KV heads with 4 queries each, 32,768 tokens, head dim 128, so 4.19 M
tokens of a KV head; the frame is `kernel`'s:
  - bytes that must move: of 3-bit keys and 2-bit values 84 a token, 352 MB; of 2 and 2 bits 68,
    285 MB; of 4 and 2 100, 419 MB; of e4m3 keys and 4-bit values 194, 814 MB. At the 4.3 TB/s that
    a copy reaches on an H200 82, 66, 98 and 189 us.
  - instructions for 32 codes, counted, of keys and of values: 18 and 24 of 2 bits, 28 and 34 of 3,
    36 and 48 of 4; so beside the 500 of turbo4 that are no look-ups, for a block of 64 tokens and
    warp, some 920, 840, 980 and 1,150. That is 64, 59, 69 and 81 us of all schedulers of an H200.
Memory is the floor; permutes, shifts and logic, which are issued every second clock, come near it.
Target: 125, 115, 135 and 205 us; no slower than turbo4 at 1 x 4k and 1 x 8k.

Versions, H200, jax 0.11.2, whole calls, us, one query token and four queries a KV head; in brackets
what there was before, in Triton; cuDNN on dense bfloat16 in the same run, turbo4's v3 in
`benchmarks/results/paged_formats_2026-11-25.json`, where these took 203, 106, 12.4 and 10.0 (e4m3
keys), 123, 67, 9.7 and 7.9 (3 and 2 bits):
                                     16 x 32k     64 x 4k       1 x 8k       1 x 4k
  cuDNN                              474          244           15.4         11.2
  turbo4                             149           81           10.7          8.6
  e4m3 keys and 4-bit values         204 (292)    108 (161)     12.7 (33.2)  10.0 (32.6)
    parts of 4,096                   203
    blocks of 64; and 1 in flight    199; 201
    3 in flight                      206
  3-bit keys, 2-bit values           123 (316)     68 (179)      9.9 (37.9)   7.8 (37.8)
    parts of 4,096                   119
    1 block in flight; 3             135; 127
    high halves of selectors by a
      dot product and not a shift    121, with 130 registers
    rows `g` begin with four and not
      two different tokens, of which
      fewer are in the same banks    125
  4-bit keys, 2-bit values           129                        10.1
  2 and 2 bits                       112                         9.4
So all reach the target with many sequences: e4m3 keys at 93 % of the speed of a copy, 3 and 2 bits
at 67, 4 and 2 at 76, 2 and 2 at 59: with fewer bits, what does not depend on them takes more of the
time. With one sequence codes are faster than turbo4, by 6 to 9 % in that record, and e4m3 keys are
not, though faster than cuDNN. The inner loop has 955 instructions of 3 and 2 bits, 1,230 of e4m3
keys (64 tokens), none spilled. Left: blocks of 64 for e4m3 keys, not timed where calls are short.
Outputs are off from plain JAX by 3e-6 of their length (e4m3 keys) to 4e-5.

Products of codes are of int8, see `integers` and `unpack`; those with e4m3 keys are those of `fp8`.
Of int8 see `int8`.
"""

import dataclasses
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged import integers
from pallas_kernels.mosaic.hopper.paged.fp8 import Fp8
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
        out: list[list[Float]] = [[] for _ in query.operands]
        for pair in self.key.key_rows(slot, self.s.held, here):
            for tile, operands in enumerate(query.operands):
                low, high = query.start[tile]
                c = [low, high, low, high]
                for k in range(0, len(operands), 2):
                    a = [pair[0][k], pair[1][k], pair[0][k + 1], pair[1][k + 1]]
                    c = lane.matmul(a, operands[k : k + 2], c)
                for j in (0, 1):
                    x = integers.joined(c[2 * j], c[2 * j + 1], query.offset[tile])
                    out[tile].append(x * (norms[len(out[tile])] * query.factor[tile]))
        return out

    def norms(self, side: int, slot: Pointer, here: Place) -> list[Float]:
        """Norms of the lane's tokens: of keys if `side` is 0, of values if 1."""
        held, block = self.s.held, self.s.block
        first = block * (self.s.key_bytes(self.head_dim) + self.s.row_bytes(self.head_dim))
        first += 2 * block if side and not isinstance(self.key, Fp8) else 0
        selector = (here.odd * 0x2222) ^ 0x3210
        out = []
        for word in slot.at(here.g * (2 * held), first).words(held // 2):
            word = lane.permute_bytes(word, 0, selector)
            out += [lane.half_to_float(word), lane.half_to_float(word >> 16)]
        return out

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        lost: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        del lost
        norms = self.norms(1, slot, here)
        operands = []
        for p, seen in zip(weights, visible, strict=True):
            w = [v.where(x * n, 0.0) for v, x, n in zip(seen, p, norms, strict=True)]
            operands.append(integers.weight_operands(w, self._middle(1), here))
        out: list[list[Float]] = [[] for _ in weights]
        values = slot.at(self.s.block * self.s.key_bytes(self.head_dim))
        for rows in self.value.value_rows(values, self.s.held, here):
            for tile, (words, start, offset, unit) in enumerate(operands):
                c = [*start, *start]
                for k in range(0, len(words), 2):
                    c = lane.matmul(rows[2 * k : 2 * k + 4], words[k : k + 2], c)
                for j in (0, 1):
                    out[tile].append(integers.joined(c[2 * j], c[2 * j + 1], offset) * unit)
        return out


def _integers(side: Stored, head_dim: int, s: Settings) -> Codes | Int8:
    return Int8(head_dim) if side.is_int8 else Codes.of(side, head_dim, s.channels or head_dim)


def channel(number: int, here: Place, head_dim: int, bits: int) -> Int:
    """The channel of a lane's output `number`, for values of `bits` bits."""
    if bits == 8:
        return Int8(head_dim).channel(number, here)
    return Codes(bits, head_dim, head_dim, []).channel(number, here)
