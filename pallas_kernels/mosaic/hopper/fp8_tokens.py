"""Tokens to e4m3 with a scale each, as they are or normalized first (FireQ), for Hopper.

Roofline, for 16,384 tokens of 4,096 channels, bfloat16: 201 MB, 47 us at the 4.3 TB/s of a copy on
an H200, and 7 to 18 us of instructions; for 16 tokens a launch and two trips to memory. Target: 52
us, normalized 58; 1.6 and 2.0 us for 16 tokens. Seen: 8,192 tokens 24.6 and 28.1 us (floor 24), 16
tokens 1.6. Memory bounds it.

A program takes one token. Its lanes hold all of it, in runs of up to eight channels, as words of
its dtype: it is read once. Whether there is NaN or infinity among them shows in the maximum: bits
of absolute values are in the order of the values, beyond all of which these are.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import eight_bits, lane, lanes
from pallas_kernels.mosaic.lane import Float, Int, Pointer

NAME = "turbojax_fp8_tokens_hopper"
LARGEST = 2**15  # the most channels that a program holds

_LANES = 32
_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Settings:
    channels: int  # of a token, `K`, at most `LARGEST`
    dtype: str  # of the tokens, ``"bfloat16"``, ``"float16"`` or ``"float32"``
    norm_dtype: str | None  # of the channels' factors, one of these; None if there are no factors
    eps: float | None  # added to the mean square; None for factors alone, without a norm
    warpgroups: int  # of a program, 1 to 4

    @property
    def run(self) -> int:
        """Channels that a lane reads at once; it divides `K`, so that runs are aligned."""
        return next(n for n in (8, 4, 2, 1) if self.channels % n == 0)

    @property
    def warps(self) -> int:
        return lanes.WARPS * self.warpgroups

    @property
    def runs(self) -> int:
        return self.channels // self.run

    @property
    def steps(self) -> int:
        return -(-self.runs // (_LANES * self.warps))


def quantize(
    x: jax.Array, norm_scale: jax.Array | None, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """Quantizes tokens ``[M, K]`` to the numbers of `turbojax.quantizers.quantize_tokens`.

    Given `norm_scale` ``[K]``, it quantizes ``x / sqrt(mean(x^2) + eps) * norm_scale``, computed in
    float32 and rounded to `x`'s dtype, or ``x * norm_scale`` if `eps` is None. Returns codes
    float8_e4m3fn ``[M, K]``, NaN where a token's scale is, and scales bfloat16 ``[M]``.
    """
    inputs = [x] if norm_scale is None else [x, norm_scale]
    out = [
        jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(x.shape[:1], jnp.bfloat16),
    ]

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        tokens, *norm, codes, scales, shared = arrays
        _program(tokens, norm[0] if norm else None, codes, scales, shared, ids[0], s)

    codes, scales = lanes.launch(
        body,
        NAME,
        inputs,
        out,
        grid={"token": len(x)},
        warpgroups=s.warpgroups,
        shared=2 * 4 * s.warps,
    )
    return codes, scales


def _program(
    x: Pointer,
    norm: Pointer | None,
    codes: Pointer,
    scales: Pointer,
    shared: Pointer,
    token: Int,
    s: Settings,
) -> None:
    thread = lane.thread()
    places = [thread + i * (_LANES * s.warps) for i in range(s.steps)]
    source = x.times(token, s.channels * _WIDTH[s.dtype])
    runs = [_read(source, place, s.dtype, s) for place in places]
    if norm is not None:
        assert s.norm_dtype is not None
        factors = [_read(norm, place, s.norm_dtype, s) for place in places]
        runs = _normalized(runs, factors, shared, thread, s)
    # The memory in which sums were exchanged may still be read.
    exchange = shared.at(4 * s.warps)
    found = [eight_bits.largest_bits(run, s.dtype) for run in runs]
    bits = lane.largest_of_warp(lane.tree(found, _larger))
    words = _exchanged(bits, exchange, thread, s)
    scale = eight_bits.token_scale(lane.tree(words, _larger), s.dtype)
    with lane.when(thread.equals(0)):
        scales.times(token, 2).store_low(lane.half.pack(scale, scale, "bfloat16"), 16)
    # The instruction that XLA uses, for the same bits.
    inverse = lane.divide(lane.number(1.0), scale)
    target = codes.times(token, s.channels)
    for place, run in zip(places, runs, strict=True):
        with lane.when(place < s.runs):
            _store([v * inverse for v in _numbers(run, s.dtype, s)], target.at(place * s.run))


# Runs of channels --------------------------------------------------------------------------------


def _read(source: Pointer, place: Int, dtype: str, s: Settings) -> list[Int]:
    """A run as stored, zeros past the last; a single 16-bit channel is a word's low half."""
    is_full = s.runs % (_LANES * s.warps) == 0
    inside = place if is_full else place.minimum(s.runs - 1)
    size = s.run * _WIDTH[dtype]
    at = source.at(inside * size)
    words = at.words(size // 4) if size >= 4 else [at.half()]
    return words if is_full else [(place < s.runs).where(w, 0) for w in words]


def _numbers(words: list[Int], dtype: str, s: Settings) -> list[Float]:
    if dtype == "float32":
        return [w.as_float() for w in words]
    return [x for w in words for x in lane.half.unpack(w, dtype)][: s.run]


def _store(x: list[Float], to: Pointer) -> None:
    padded = x + [lane.number(0.0)] * (-len(x) % 4)
    words = [lane.pack_e4m3(padded[i : i + 4]) for i in range(0, len(padded), 4)]
    if len(x) == 8:
        to.store_words(words)
    elif len(x) == 4:
        to.store(words[0])
    else:
        to.store_low(words[0], 8 * len(x))


def _normalized(
    runs: list[list[Int]], factors: list[list[Int]], shared: Pointer, thread: Int, s: Settings
) -> list[list[Int]]:
    """RMSNorm, or factors alone, rounded to the tokens' dtype."""
    assert s.norm_dtype is not None
    inverse = None if s.eps is None else _inverse_root(runs, shared, thread, s)
    normalized = []
    for run, factor in zip(runs, factors, strict=True):
        pairs = zip(_numbers(run, s.dtype, s), _numbers(factor, s.norm_dtype, s), strict=True)
        normalized.append(
            _packed([(v if inverse is None else v * inverse) * f for v, f in pairs], s)
        )
    return normalized


def _inverse_root(runs: list[list[Int]], shared: Pointer, thread: Int, s: Settings) -> Float:
    assert s.eps is not None
    squares = [lane.total([v * v for v in _numbers(run, s.dtype, s)]) for run in runs]
    own = lane.reduce_lanes(lane.total(squares), lambda a, b: a + b, (16, 8, 4, 2, 1))
    of_warps = _exchanged(own.as_int(), shared, thread, s)
    mean = lane.total([w.as_float() for w in of_warps]) * (1 / s.channels)
    return lane.reciprocal_root(mean + s.eps)


def _packed(x: list[Float], s: Settings) -> list[Int]:
    """The reverse of `_numbers`, rounded."""
    if s.dtype == "float32":
        return [v.as_int() for v in x]
    x = x + [lane.number(0.0)] * (len(x) % 2)
    return [lane.half.pack(x[i], x[i + 1], s.dtype) for i in range(0, len(x), 2)]


# What all lanes know together --------------------------------------------------------------------


def _exchanged(own: Int, shared: Pointer, thread: Int, s: Settings) -> list[Int]:
    """The words of all warps; the lanes of a warp have the same word `own`."""
    with lane.when((thread & (_LANES - 1)).equals(0)):
        shared.at(thread >> 5 << 2).store(own)
    lane.block_barrier()
    return shared.words(s.warps)


def _larger(a: Int, b: Int) -> Int:
    return a.maximum(b)
