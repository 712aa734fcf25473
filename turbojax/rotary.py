"""Rotary position embedding (RoPE, Su et al., 2021), and its scalings for longer contexts.

Channel i of the rotated ones is paired with channel i + R/2, as Llama checkpoints of the Hugging
Face layout have it, and the pair is rotated by ``position * frequency[i]``.

Frequencies and angles are rounded to float32 step by step, in the order in which transformers does
it. At 100,000 tokens a rounding unit of an angle is 0.008 radians: only the same rounding gives
what a model's own code computes there, and checkpoints were trained with that.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax import _checks
from turbojax._pytrees import static


@static
@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor (Chen et al., 2023, "position interpolation").

    Attributes:
      factor: at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_at_least("factor", self.factor, 1)


@static
@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, a ramp between (Llama 3.1).

    Attributes:
      factor: of low frequencies, at least 1.
      low_freq_factor: frequencies with fewer rotations than this within `original_max_length` are
        low.
      high_freq_factor: those with more rotations than this are high; larger than `low_freq_factor`.
      original_max_length: tokens the model was trained with before.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int

    def __post_init__(self) -> None:
        _check_at_least("factor", self.factor, 1)
        _check_at_least("original_max_length", self.original_max_length, 1)
        for name in ("low_freq_factor", "high_freq_factor"):
            _check_number(name, getattr(self, name))
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be positive and less than "
                f"high_freq_factor={self.high_freq_factor}"
            )


@static
@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): a ramp over channels, and larger rotated vectors.

    Attributes:
      factor: of low frequencies, at least 1.
      original_max_length: tokens the model was trained with before.
      beta_fast: rotations within `original_max_length` from which on a frequency is kept.
      beta_slow: rotations up to which a frequency is divided by `factor`.
      attention_factor: of rotated queries and keys, positive; ``0.1 ln(factor) + 1`` if not given.
      truncate: whether the ramp begins and ends at whole channels.
    """

    factor: float
    original_max_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_at_least("factor", self.factor, 1)
        _check_at_least("original_max_length", self.original_max_length, 1)
        for name in ("beta_fast", "beta_slow"):
            _check_number(name, getattr(self, name))
        if self.attention_factor is not None:
            _check_positive("attention_factor", self.attention_factor)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow={self.beta_slow} must be positive and less than "
                f"beta_fast={self.beta_fast}"
            )


@static
@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): every frequency divided by a factor of its own.

    Which factors apply depends on the longest sequence that is computed together, see
    `Rope.angles`: the same text has other keys in a longer one.

    Attributes:
      short_factors: one per pair of rotated channels, positive; for sequences of up to
        `original_max_length` tokens. A list becomes a tuple.
      long_factors: the same for longer ones.
      original_max_length: tokens the model was trained with before.
      attention_factor: of rotated queries and keys, positive.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_length: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_at_least("original_max_length", self.original_max_length, 1)
        _check_positive("attention_factor", self.attention_factor)
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not isinstance(factors, list | tuple):
                raise TypeError(f"{name}={factors!r} must be a tuple of numbers")
            object.__setattr__(self, name, tuple(factors))
            for factor in factors:
                _check_number(name, factor)
                if not 0 < factor < math.inf:
                    raise ValueError(f"{name} hold {factor}, must be positive and finite")

    def factors(self, max_length: int) -> tuple[float, ...]:
        """The factors for sequences of up to so many tokens."""
        long = max_length > self.original_max_length
        return self.long_factors if long else self.short_factors


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary frequencies of a head; static under `jit`.

    Attributes:
      head_dim: channels of a head, `H`.
      theta: base of the frequencies ``theta ** (-2 i / R)``; more than 1 with YaRN.
      rotary_dim: even number `R` of channels that are rotated, the first ones; all if not given.
      scaling: optional change of the frequencies.
      max_length: longest sequence, by which LongRoPE chooses its factors where `angles` has no
        `longest`; used by LongRoPE only.
      interleaved: whether channels 2i and 2i + 1 are rotated together, in place of i and i + R/2.

    Raises:
      ValueError: if a value is out of the range stated here.
    """

    head_dim: int
    theta: float = 10000.0
    rotary_dim: int | None = None
    scaling: RopeScaling | None = None
    max_length: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        _checks.check_sizes(head_dim=self.head_dim)
        _check_positive("theta", self.theta)
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise ValueError(f"theta={self.theta} must be more than 1 with YaRN")
        if self.rotary_dim is not None:
            _checks.check_integer("rotary_dim", self.rotary_dim)
        if self.channels % 2 or not 0 < self.channels <= self.head_dim:
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ValueError(
                f"{name}={self.channels} must be even: RoPE rotates pairs"
                if self.channels % 2
                else f"rotary_dim={self.channels} must be 2 to head_dim={self.head_dim}"
            )
        if not isinstance(self.scaling, LongRopeScaling):
            if self.max_length is not None:
                raise ValueError(f"max_length={self.max_length} is of use for LongRoPE alone")
            return
        if self.max_length is None:
            raise ValueError("max_length=None must be given: LongRoPE chooses its factors by it")
        _checks.check_sizes(max_length=self.max_length)
        for factors in (self.scaling.short_factors, self.scaling.long_factors):
            if len(factors) != self.channels // 2:
                raise ValueError(
                    f"{len(factors)} LongRoPE factors must be {self.channels // 2}, one per pair "
                    "of channels"
                )

    @property
    def channels(self) -> int:
        """Channels that are rotated, `R`."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def amplitude(self) -> float:
        """What rotated queries and keys are multiplied with."""
        if isinstance(self.scaling, YarnScaling):
            given = self.scaling.attention_factor
            return 0.1 * math.log(self.scaling.factor) + 1 if given is None else given
        return self.scaling.attention_factor if isinstance(self.scaling, LongRopeScaling) else 1.0

    def frequencies(self, dtype: DTypeLike = np.float64, longest: int | None = None) -> np.ndarray:
        """Radians per token of each pair, ``[R/2]``.

        Args:
          dtype: float64, or float32 for what `angles` takes.
          longest: see `angles`.
        """
        real = np.dtype(dtype).type
        exponents = np.arange(0, self.channels, 2).astype(real) / real(self.channels)
        # Rounded once: a power in float32 may be off by more, and differs between machines.
        periods = np.power(np.float64(self.theta), exponents.astype(np.float64)).astype(real)
        match self.scaling:
            case LinearScaling(factor):
                return 1 / periods / real(factor)
            case LongRopeScaling() if self.max_length is not None:
                length = self.max_length if longest is None else min(longest, self.max_length)
                return 1 / (np.array(self.scaling.factors(length), real) * periods)
            case Llama3Scaling():
                return _llama3(1 / periods, self.scaling)
            case YarnScaling():
                return _yarn(periods, self.scaling, self.theta)
        return 1 / periods

    def angles(self, positions: jax.Array, longest: int | jax.Array | None = None) -> jax.Array:
        """Angles of the positions, which `rotate` takes.

        Args:
          positions: integer ``[B, T]``.
          longest: tokens of the longest sequence that these positions belong to, an integer, also
            a traced one. LongRoPE chooses its factors by it, or by `max_length` if that is less or
            this is not given; without LongRoPE it says nothing.

        Returns:
          float32 ``[B, T, 1, R/2]``.
        """
        if isinstance(self.scaling, LongRopeScaling) and isinstance(longest, jax.Array):
            original = self.scaling.original_max_length
            short, long = (
                self.frequencies(np.float32, length) for length in (original, self.max_length)
            )
            frequencies = jnp.where(longest > original, long, short)
        else:
            known = None if isinstance(longest, jax.Array) else longest
            frequencies = jnp.asarray(self.frequencies(np.float32, known))
        return positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]

    def rotate(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """`rotate` with this embedding's amplitude and pairs."""
        return rotate(x, angles, self.amplitude, interleaved=self.interleaved)


def rotate(
    x: jax.Array, angles: jax.Array, amplitude: float = 1.0, *, interleaved: bool = False
) -> jax.Array:
    """Rotates the first ``R`` channels: i and i + R/2 together, by the pair's angle.

    Args:
      x: ``[B, T, heads, H]``.
      angles: float32 ``[B, T, 1, R/2]``, R at most H.
      amplitude: the rotated channels are multiplied with it.
      interleaved: whether it is channels 2i and 2i + 1 that are rotated together.

    Returns:
      ``[B, T, heads, H]`` in `x`'s dtype, computed in float32.
    """
    half = angles.shape[-1]
    wide = x.astype(jnp.float32)
    cos, sin = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
    if interleaved:
        pairs, rest = wide[..., : 2 * half].reshape(*x.shape[:-1], half, 2), wide[..., 2 * half :]
        first, second = pairs[..., 0], pairs[..., 1]
        both = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = [both.reshape(*x.shape[:-1], 2 * half)]
    else:
        first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
        rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, rest], axis=-1).astype(x.dtype)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    real = frequencies.dtype.type
    wavelengths = (1 / frequencies) * real(2 * math.pi)
    rotations = (1 / wavelengths) * real(scaling.original_max_length)
    span = real(scaling.high_freq_factor - scaling.low_freq_factor)
    kept = (rotations - real(scaling.low_freq_factor)) / span
    between = (1 - kept) * frequencies / real(scaling.factor) + kept * frequencies
    is_high = wavelengths < real(scaling.original_max_length / scaling.high_freq_factor)
    is_low = wavelengths > real(scaling.original_max_length / scaling.low_freq_factor)
    ends = np.where(is_low, frequencies / real(scaling.factor), frequencies)
    return np.where(is_high | is_low, ends, between)


def _yarn(periods: np.ndarray, scaling: YarnScaling, theta: float) -> np.ndarray:
    count, real = len(periods), periods.dtype.type

    def channel(rotations: float) -> float:
        """The pair, as a real number, that makes so many rotations in the original context."""
        length = scaling.original_max_length / (rotations * 2 * math.pi)
        return count * math.log(length) / math.log(theta)

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    # A ramp of no width would divide by zero.
    width = real(max(last - first, 0) or 1e-3)
    kept = 1 - np.clip((np.arange(count).astype(real) - real(first)) / width, 0, 1)
    return 1 / (real(scaling.factor) * periods) * (1 - kept) + 1 / periods * kept


def _check_number(name: str, value: object) -> None:
    if value is None:
        raise TypeError(f"{name}=None must be a number")
    _checks.check_number(name, value)


def _check_positive(name: str, value: float) -> None:
    _check_number(name, value)
    _checks.check_positive(name, value)


def _check_at_least(name: str, value: float, least: float) -> None:
    _check_number(name, value)
    if not least <= value < math.inf:
        raise ValueError(f"{name}={value} must be finite and at least {least}")
