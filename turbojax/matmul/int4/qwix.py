"""INT4 weights from and to qwix's quantized arrays (`qwix.QArray`).

A `QArray` holds a `qvalue` in the shape of the original, and a `scale` and perhaps a `zero_point`
of the same rank, whose axes divide those of `qvalue`: ``(qvalue - zero_point) * scale``, each of
the two repeated along its axes, in the dtype of `scale`.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, _extras
from turbojax.matmul.int4.codes import from_codes, to_codes
from turbojax.matmul.int4.weight import Int4Weight

_NARROW = ("bfloat16", "float16")


def from_qwix(array: Any, *, in_axis: int = 0) -> Int4Weight:
    """The INT4 weight of a `qwix.QArray`, with the same values.

    With scales of 16 bits ``dequantize(weight).astype(scale.dtype)`` has the bits that
    `qwix.dequantize` computes, and with one float32 scale an output those of `dequantize` itself.

    Args:
      array: a `qwix.QArray`, or anything with its attributes: `qvalue` int4 of two axes, `scale`
        with one number an output, or for all outputs, and group of 32, 64 or a multiple of 128
        inputs, or for all inputs; `zero_point` likewise, or None. Scales in float32 must be one an
        output, or numbers that bfloat16 or float16 holds.
      in_axis: the axis of the inputs: 0 for ``[in, out]``, a kernel of Flax, 1 for ``[out, in]``.

    Raises:
      TypeError: if the array has no such attributes, or a dtype is another.
      ValueError: if a shape, or a float32 scale, does not fit.
    """
    for name in ("qvalue", "scale", "zero_point"):
        if not hasattr(array, name):
            raise TypeError(
                f"array is a {type(array).__name__}, must have {name}, as a qwix.QArray"
            )
    _check_axis(in_axis)
    for name in ("qvalue", "scale"):
        part = getattr(array, name)
        if not hasattr(part, "dtype"):
            raise TypeError(f"{name} is a {type(part).__name__}, must be an array")
    codes = jnp.asarray(array.qvalue)
    kind = getattr(array, "qtype", None)
    if codes.dtype != jnp.int4 or (kind is not None and not _is_int4(kind)):
        raise TypeError(
            f"qvalue.dtype={codes.dtype} and qtype={kind} must be int4: other types have no weight "
            "in 4 bits"
        )
    if codes.ndim != 2 or 0 in codes.shape:
        raise ValueError(f"{array.qvalue.shape=} must have two axes, none of them empty")
    codes = _outputs_first(codes.astype(jnp.int8), in_axis)
    scale = _grouped("scale", array.scale, codes, in_axis)
    zero = array.zero_point
    if zero is not None:
        if zero.dtype != jnp.int4:
            raise TypeError(f"zero_point.dtype={zero.dtype} must be int4")
        zero = _grouped("zero_point", zero.astype(jnp.int8), codes, in_axis)
    scale, factor = _narrow(scale)
    scale, zero = _alike(scale, zero)
    inputs, count = codes.shape[1], scale.shape[1]
    size = None if count == 1 else inputs // count
    if size is not None and size not in (32, 64) and size % 128:
        raise ValueError(
            f"{count} groups of {inputs} inputs are of {size}, must be of 32, 64 or a multiple of "
            "128"
        )
    return from_codes(codes, scale, zero, group_size=size, output_scale=factor)


def to_qwix(weight: Int4Weight, *, in_axis: int = 0) -> Any:
    """A weight as a `qwix.QArray`, with the same values.

    Args:
      weight: one weight, neither gated nor with scales in e4m3, whose values are rounded. Its
        `output_scale` becomes part of the scale, which is float32 unless all of it is 1.
      in_axis: the axis of the inputs, see `from_qwix`.

    Returns:
      The array: `qvalue` and `zero_point` in int4.

    Raises:
      ImportError: if qwix is not installed.
      TypeError: if it is no weight.
      ValueError: if a `QArray` cannot hold it: it is gated or has scales in e4m3, a zero point is
        8, or the product of a scale and its output's is no float32 number.
    """
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"weight is a {type(weight).__name__}, must be an Int4Weight")
    _check_axis(in_axis)
    if weight.gated:
        raise ValueError(f"{weight.gated=} must be False: convert gate and up one by one")
    if weight.scale_dtype == "e4m3":
        raise ValueError(f"{weight.scale_dtype=} must be 'bf16' or 'f16': others round values")
    if weight.stack:
        raise ValueError(f"{weight.stack=} must be (): stacks are converted one by one")
    plain = to_codes(weight)
    scale = _whole_scale(np.asarray(plain.scales), np.asarray(plain.output_scale))
    zero = None if plain.zeros is None else np.asarray(plain.zeros)
    if zero is not None and zero.max() > 7:
        raise ValueError("zeros hold 8, and must be -8 to 7: int4 has no more")
    if weight.in_size % weight.group_size:
        # In a QArray groups divide the inputs; a single group may have any size.
        scale = _one_group("scales", scale)
        zero = None if zero is None else _one_group("zeros", zero)
    elif _is_one(scale) and (zero is None or _is_one(zero)):
        scale, zero = scale[:, :1], None if zero is None else zero[:, :1]
    qarray = _qarray_type()

    def placed(x: Any) -> jax.Array:
        return _outputs_first(jnp.asarray(x), in_axis)

    return qarray(
        qvalue=placed(plain.codes).astype(jnp.int4),
        scale=placed(scale),
        zero_point=None if zero is None else placed(zero).astype(jnp.int4),
        qtype=jnp.int4,
    )


def _qarray_type() -> Any:
    try:
        return importlib.import_module("qwix").QArray
    except ImportError as error:
        raise ImportError(f"to_qwix needs the package qwix: {_extras.install('qwix')}") from error


def _is_int4(kind: Any) -> bool:
    try:
        return jnp.dtype(kind) == jnp.int4
    except TypeError:  # such as "nf4"
        return False


def _check_axis(in_axis: int) -> None:
    if in_axis not in (0, 1):
        raise ValueError(f"{in_axis=} must be 0 or 1")


def _outputs_first(x: jax.Array, in_axis: int) -> jax.Array:
    """``[in, out]`` as ``[out, in]``, and back."""
    return x.T if in_axis == 0 else x


def _grouped(name: str, x: jax.Array, codes: jax.Array, in_axis: int) -> jax.Array:
    """One number for each output and group, ``[out, groups]``."""
    if x.ndim != 2:
        raise ValueError(f"{name}.shape={x.shape} must have two axes, as qvalue")
    if 0 in x.shape:
        raise ValueError(f"{name}.shape={x.shape} must have no empty axis")
    x = _outputs_first(jnp.asarray(x), in_axis)
    outputs, inputs = codes.shape
    if x.shape[0] not in (1, outputs) or inputs % x.shape[1]:
        raise ValueError(
            f"{name} has {x.shape[0]} numbers along {outputs} outputs and {x.shape[1]} along "
            f"{inputs} inputs, must have 1 or {outputs}, and a number that divides {inputs}"
        )
    return jnp.broadcast_to(x, (outputs, x.shape[1]))


def _narrow(scale: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Scales of 16 bits, and a float32 factor of each output."""
    if scale.dtype.name in _NARROW:
        return scale, None
    if scale.dtype != jnp.float32:
        raise TypeError(f"scale.dtype={scale.dtype} must be bfloat16, float16 or float32")
    is_concrete = _checks.is_concrete(scale)
    if scale.shape[1] == 1 or (is_concrete and _is_one(np.asarray(scale))):
        return jnp.ones(scale.shape, jnp.bfloat16), scale[:, 0]
    if is_concrete:
        for name in _NARROW:
            narrow = scale.astype(name)
            if np.array_equal(narrow.astype(jnp.float32), scale):
                return narrow, None
    raise ValueError(
        "scale in float32 must be one an output, or hold numbers of bfloat16 or float16: quantize "
        "with qwix's scale_dtype=jnp.bfloat16"
    )


def _alike(scale: jax.Array, zero: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Both arrays with as many groups as the one that has more."""
    if zero is None:
        return scale, None
    counts = scale.shape[1], zero.shape[1]
    count = max(counts)
    if count % min(counts):
        raise ValueError(f"groups of scale and zero_point, {counts}, must divide each other")
    wide = [jnp.repeat(x, count // x.shape[1], axis=1) for x in (scale, zero)]
    return wide[0], wide[1]


def _whole_scale(scales: np.ndarray, output_scale: np.ndarray) -> np.ndarray:
    """Scales times those of their outputs, ``[out, groups]``."""
    if (output_scale == 1).all():
        return scales
    exact = scales.astype(np.float64) * output_scale.astype(np.float64)[:, None]
    narrow = exact.astype(np.float32)
    if not np.array_equal(narrow, exact, equal_nan=True):
        raise ValueError(
            "scales times output_scale must be float32 numbers, which they are where one of them "
            "is a power of two"
        )
    return narrow


def _is_one(x: np.ndarray) -> bool:
    return bool((x == x[:, :1]).all())


def _one_group(name: str, x: np.ndarray) -> np.ndarray:
    if not _is_one(x):
        raise ValueError(f"{name} must be the same in all groups of an output, which are not whole")
    return x[:, :1]
