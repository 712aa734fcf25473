"""What is static in a call of attention, checked once; and what a layer asks of attention.

Users hand an op keyword arguments, and a layer has `AttentionOptions`; both become `Options`, which
every implementation takes as they are.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._registry import IMPLEMENTATION_NAMES


def _check_scores(scale: object, logits_soft_cap: float | None) -> None:
    _checks.check_number("scale", scale)
    _checks.check_number("logits_soft_cap", logits_soft_cap)
    _checks.check_positive("logits_soft_cap", logits_soft_cap)


def check_output_dtype(dtype: Any) -> str | None:
    """The name of an output's dtype, which must be float32; None, for the query's, stays."""
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name != "float32":
        raise ValueError(f"output_dtype={dtype!r} must be float32, or None for the query's")
    return name


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query sees, by positions alone: causality and a sliding window.

    Attributes:
      is_causal: a query sees keys up to its own position.
      window: (left, right): a query at ``p`` sees keys in ``[p - left, p + right]``; None for all.

    Raises:
      ValueError: unless the window is None, an integer (of either side) or a pair, none negative.
    """

    is_causal: bool
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        # One form, so that equal options are equal and hash alike.
        object.__setattr__(self, "is_causal", bool(self.is_causal))
        object.__setattr__(self, "window", _checks.normalize_window(self.window))

    def mask(
        self, query_position: jax.Array, key_position: jax.Array, key_length: jax.Array
    ) -> jax.Array:
        """Visible pairs of positions ``[B or 1, T]`` and ``[B or 1, S]``: bool ``[B, T, S]``."""
        q, k = query_position[:, :, None], key_position[:, None, :]
        visible = jnp.broadcast_to(
            k < key_length[:, None, None], (key_length.shape[0], q.shape[1], k.shape[2])
        )
        if self.is_causal:
            visible = visible & (k <= q)
        if self.window is not None:
            left, right = self.window
            visible = visible & (k >= q - left) & (k <= q + right)
        return visible

    def key_range(
        self,
        first: jax.Array,
        last: jax.Array,
        key_length: jax.Array,
        shift: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Keys ``[start, stop)`` outside which queries ``first..last`` see nothing.

        `shift` (int32 ``[B]``) is by how much a query's position exceeds a key's of the same index;
        0 if not given. Returns int32 scalars, valid for every sequence; empty ranges have ``stop <=
        start``.
        """
        start, stop = jnp.zeros_like(first), jnp.max(key_length)
        least, most = (0, 0) if shift is None else (jnp.min(shift), jnp.max(shift))
        if self.is_causal:
            stop = jnp.minimum(stop, last + most + 1)
        if self.window is not None:
            left, right = self.window
            start = jnp.maximum(start, first + least - left)
            stop = jnp.minimum(stop, last + most + right + 1)
        if shift is not None:
            stop = jnp.maximum(stop, 0)
            start = jnp.minimum(start, stop)
        return start, stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Visibility):
    """The options of a call of attention; static under `jit`, and checked when they are made.

    Attributes:
      scale: factor of the scores, finite; it may be negative.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``; positive and finite.
      out_dtype: of the output, ``"float32"``; None for the query's own.
      implementation: the name of what attends; None to choose.
      residual: whether the log-sum-exp is wanted.

    Raises:
      TypeError: if the scale or the cap is not a Python number.
      ValueError: if a value, or the window, is not as stated.
    """

    scale: float
    logits_soft_cap: float | None = None
    out_dtype: str | None = None
    implementation: str | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        _check_scores(self.scale, self.logits_soft_cap)
        super().__post_init__()
        object.__setattr__(self, "scale", float(self.scale))
        if self.logits_soft_cap is not None:
            object.__setattr__(self, "logits_soft_cap", float(self.logits_soft_cap))
        object.__setattr__(self, "out_dtype", check_output_dtype(self.out_dtype))

    def dtype_of_output(self, query: jax.Array | jax.ShapeDtypeStruct) -> jnp.dtype:
        """The output's dtype, for queries of this dtype."""
        return jnp.dtype(query.dtype if self.out_dtype is None else self.out_dtype)

    @classmethod
    def complete(
        cls,
        head_dim: int,
        *,
        scale: float | None,
        is_causal: bool,
        local_window_size: int | tuple[int, int] | None,
        logits_soft_cap: float | None,
        output_dtype: Any = None,
        implementation: str | None = None,
        residual: bool = False,
    ) -> Self:
        """The options that a user's arguments stand for, see `turbojax.turbo_attention`."""
        window: Any = local_window_size  # brought into one form with the rest
        return cls(
            scale=plain_scale(head_dim) if scale is None else scale,
            is_causal=is_causal,
            window=window,
            logits_soft_cap=logits_soft_cap,
            out_dtype=output_dtype,
            implementation=implementation,
            residual=residual,
        )


def plain_scale(head_dim: int) -> float:
    """The factor of scores where none is given."""
    return 1 / math.sqrt(head_dim)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How a layer's causal attention differs from the plain one; static under `jit`.

    Attributes:
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: optional number of tokens that a query sees, its own included, as model
        configurations count them.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.

    Raises:
      TypeError: if a number is not a Python number, or the window not an integer.
      ValueError: if the scale is not finite (it may be negative), the window below 1, or the cap
        not positive and finite.
    """

    scale: float | None = None
    local_window_size: int | None = None
    logits_soft_cap: float | None = None

    def __post_init__(self) -> None:
        _check_scores(self.scale, self.logits_soft_cap)
        if self.local_window_size is not None:
            _checks.check_sizes(local_window_size=self.local_window_size)

    def complete(self, head_dim: int, implementation: str | None = None) -> Options:
        """The options of an op's call, for heads of `head_dim` channels."""
        given = {**self.arguments(), "implementation": implementation}
        return Options.complete(head_dim, is_causal=True, **given)

    def arguments(self) -> dict[str, Any]:
        """The options as arguments of `turbo_attention`, `decode` and their like.

        These count the tokens on either side of the query's own.
        """
        window = self.local_window_size
        return {
            "scale": self.scale,
            "local_window_size": None if window is None else (window - 1, 0),
            "logits_soft_cap": self.logits_soft_cap,
        }


PLAIN = AttentionOptions()
"""Causal attention to all tokens, scores over ``sqrt(H)``."""


def require_causal(options: Options) -> None:
    """Raises ValueError unless options are causal: queries must not see later tokens."""
    if not options.is_causal:
        raise ValueError(f"{options.is_causal=} must be True: newest tokens attend causally")


def check_implementation(
    implementation: object, names: tuple[str, ...] = IMPLEMENTATION_NAMES
) -> None:
    """Raises ValueError unless the implementation is None or one of the names."""
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")


def require_plain(options: AttentionOptions, what: str, *, but_scale: bool = False) -> None:
    """Raises NotImplementedError if a layer asks `what` for more than causal attention."""
    allowed = AttentionOptions(scale=options.scale) if but_scale else PLAIN
    if options != allowed:
        raise NotImplementedError(
            f"{what} has no window and no cap of scores: {options} is not supported"
        )
