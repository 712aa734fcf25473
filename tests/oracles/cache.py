"""The cache as plain Python lists: what the library's arrays must hold, bit for bit."""

import numpy as np

from tests.oracles.online import cut
from tests.oracles.quantizers import (
    dequantize_channels,
    f32,
    head_priority,
    quantize_channels,
    quantize_int8,
    quantize_with_scale,
    rank_heads,
    scale_of,
    sixteen_bits,
)


class CacheSide:
    """Keys or values of every sequence: plain lists of compressed blocks and buffered tokens."""

    def __init__(self, spec, bits, num_low, scale=None):
        self.spec, self.bits, self.num_low = spec, bits, num_low
        shape = (spec.batch, spec.heads)
        self.scale = [np.zeros(spec.heads, np.float32) for _ in range(spec.batch)]  # 0: open
        if scale is not None:
            self.scale = list(np.broadcast_to(sixteen_bits(scale), shape))
        self.blocks = [[] for _ in range(spec.batch)]
        self.buffer = [[] for _ in range(spec.batch)]
        self.slots = [None] * spec.batch

    def head_bits(self, b, h):
        is_low = self.slots[b][h] >= self.spec.heads - self.num_low
        return self.spec.low_bits if is_low else self.bits

    def fix_scale(self, b, maximum, factor=1.0):
        """Fixes the universal scales from maxima [K]; a head of zeros, or a fixed one, stays."""
        fixes = (self.scale[b] == 0) & (np.float32(maximum) != 0)
        new = scale_of(np.float32(factor) * np.float32(maximum))
        self.scale[b] = np.where(fixes, new, self.scale[b]).astype(np.float32)

    def rank(self, b, x):
        """Ranks the heads by x [S, K, H] unless they are ranked already."""
        if self.slots[b] is None:
            self.slots[b] = rank_heads(head_priority(x[None], self.spec.priority))[0]

    def compress(self, b, codes, scale):
        """Stores a block of stage-1 codes [block, K, H] with its scales [K]."""
        heads = []
        for h in range(self.spec.heads):
            bits = self.head_bits(b, h)
            q2, s, z = quantize_channels(codes[:, h], bits)
            heads.append(
                {
                    "bits": bits,
                    "q2": q2,
                    "channel_scale": s,
                    "channel_zero": z,
                    "codes": dequantize_channels(q2, s, z),
                    "scale": scale[h],
                }
            )
        self.blocks[b].append(heads)

    def prefill(self, b, x):
        """Compresses what of a prompt [N, K, H] a buffer does not keep, and buffers the rest."""
        spec = self.spec
        if not len(x):
            return
        self.fix_scale(b, np.abs(x).max((0, 2)), 2.0 if len(x) < spec.block else 1.0)
        blocks, rest = 0, len(x)
        while rest >= (spec.block if spec.flush == "all" else spec.buffer_size):
            blocks, rest = blocks + 1, rest - spec.block
        if blocks:
            self.rank(b, x)
        first, rest = x[: spec.first_tokens], x[spec.first_tokens :]
        for j in range(blocks):
            part = rest[j * spec.block : (j + 1) * spec.block]
            self.compress(b, *quantize_int8(part, (0, 2)))
        for token in [*first, *rest[blocks * spec.block :]]:
            self.push(b, token)

    def append(self, b, token):
        """Appends one token [K, H]."""
        self.fix_scale(b, np.abs(token).max(-1), 2.0)
        self.push(b, token)

    def push(self, b, token):
        """Buffers one token; of a full buffer the oldest block is compressed at once, or all."""
        bad = ~np.isfinite(token).all(-1)
        self.scale[b] = np.where(bad, np.float32(np.nan), self.scale[b]).astype(np.float32)
        divisor = np.where(self.scale[b] == 0, np.float32(1), self.scale[b])
        self.buffer[b].append(quantize_with_scale(token, divisor[:, None]))
        if len(self.buffer[b]) == self.spec.buffer_size:
            codes, first = np.stack(self.buffer[b]), self.spec.first_tokens
            self.rank(b, f32(codes) * self.scale[b][None, :, None])
            count = len(codes) if self.spec.flush == "all" else self.spec.block
            for start, stop in cut(count, self.spec.block):
                self.compress(b, codes[first + start : first + stop], divisor)
            self.buffer[b] = self.buffer[b][:first] + self.buffer[b][first + count :]

    def dequantize(self):
        """Values [B, max_length, K, H] in float32, zeros past each length."""
        spec = self.spec
        out = np.zeros((spec.batch, spec.max_length, spec.heads, spec.head_dim), np.float32)
        for b in range(spec.batch):
            position = min(spec.first_tokens, len(self.buffer[b]))
            for heads in self.blocks[b]:
                stop = position + spec.block
                for h, block in enumerate(heads):
                    out[b, position:stop, h] = f32(block["codes"]) * block["scale"]
                position = stop
            for slot, codes in enumerate(self.buffer[b]):
                at = slot if slot < spec.first_tokens else position
                out[b, at] = f32(codes) * self.scale[b][:, None]
                position += slot >= spec.first_tokens
        return out


class Cache:
    """A progressive cache as plain Python lists: what the library's arrays must hold."""

    def __init__(
        self,
        batch,
        max_length,
        heads,
        head_dim,
        *,
        block=64,
        buffer_size=64,
        flush="oldest",
        first_tokens=0,
        key_bits=4,
        value_bits=4,
        num_low_key=0,
        num_low_value=0,
        low_bits=2,
        priority="gap_std",
        key_scale=None,
        value_scale=None,
    ):
        self.batch, self.max_length, self.heads, self.head_dim = batch, max_length, heads, head_dim
        self.block, self.buffer_size, self.low_bits = block, buffer_size, low_bits
        self.priority, self.flush, self.first_tokens = priority, flush, first_tokens
        self.key = CacheSide(self, key_bits, num_low_key, key_scale)
        self.value = CacheSide(self, value_bits, num_low_value, value_scale)
        self.lengths = np.zeros(batch, np.int64)
        self.overflowed = np.zeros(batch, bool)

    @property
    def buffer_lengths(self):
        return np.array([len(x) for x in self.key.buffer])

    def prefill(self, key, value, lengths=None):
        """Stores a prompt [B, S, K, H] of which `lengths` tokens are real."""
        lengths = np.full(self.batch, key.shape[1]) if lengths is None else lengths
        for b, n in enumerate(lengths):
            if n and self.lengths[b]:
                self.overflowed[b] = True
                continue
            self.key.prefill(b, f32(key)[b, :n])
            self.value.prefill(b, f32(value)[b, :n])
            self.lengths[b] = n

    def append(self, key, value, lengths=None):
        """Appends [B, T, K, H] of which `lengths` tokens are real; what does not fit is dropped."""
        lengths = np.full(self.batch, key.shape[1]) if lengths is None else lengths
        for b, n in enumerate(lengths):
            for t in range(n):
                if self.lengths[b] == self.max_length:
                    self.overflowed[b] = True
                    break
                self.key.append(b, f32(key)[b, t])
                self.value.append(b, f32(value)[b, t])
                self.lengths[b] += 1

    def dequantize(self):
        return self.key.dequantize(), self.value.dequantize()
