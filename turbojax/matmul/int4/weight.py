"""INT4 weights in groups, each with a scale (FireQ, Baek et al., 2025).

How codes and scales lie in memory is in `turbojax.matmul.int4.layout`.

Scales and codes are rounded exactly, so their bits are the same everywhere: an approximate quotient
gives a candidate, and comparisons of numbers that float32 holds exactly confirm or correct it.

e4m3 has no positive number below 2**-9, float16 no normal one below 2**-14. Rows whose scales the
dtype cannot hold are multiplied with a power of two first, and their `output_scale` with its
reciprocal.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._programs import one_program
from turbojax._pytrees import pytree
from turbojax.matmul.int4.layout import BLOCK as BLOCK
from turbojax.matmul.int4.layout import GATED_ROWS as GATED_ROWS
from turbojax.matmul.int4.layout import OUT_MULTIPLE as OUT_MULTIPLE
from turbojax.matmul.int4.layout import (
    code_rows,
    code_tiles,
    round_up,
    scale_rows,
    scale_tiles,
    size_of_part,
    stored_inputs,
    stored_rows,
)
from turbojax.matmul.int4.layout import pack_codes as pack_codes
from turbojax.matmul.int4.layout import unpack_codes as unpack_codes
from turbojax.matmul.int4.row_powers import (
    E4M3_SCALES,
    FLOAT16_SCALES,
    INT4_RANGE,
    SMALLEST_NORMAL,
    power_of_two,
    row_powers,
)
from turbojax.numerics.fp8 import E4M3_MAX
from turbojax.numerics.int8 import absolute_maximum

ScaleDtype = Literal["e4m3", "bf16", "f16"]
_SCALE_DTYPES = {
    "e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "bf16": jnp.dtype(jnp.bfloat16),
    "f16": jnp.dtype(jnp.float16),
}
# The scales that a row can have, for dtypes whose range weights may exceed.
_RANGES = {"e4m3": E4M3_SCALES, "f16": FLOAT16_SCALES}
_RECIPROCAL_RANGE = float(np.float32(1 / INT4_RANGE))


@pytree
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """A weight ``[out, in]`` in 4 bits (FireQ, section 3.1).

    `N` is `out_size` rounded up to a multiple of 64, `K` is `in_size` rounded up to one of 128 and
    of `group_size`. Padding is zeros. In a gated weight rows of two weights alternate, see
    `gate_and_up`.

    Every array may have leading axes, the same ones, of a stack of weights (experts, the layers of
    a scan). `dequantize` takes them; `matmul` takes one weight, or a stack under `jax.vmap`.

    Attributes:
      codes: uint8 ``[N / 64, K / 128, 64, 64]``: tiles of 64 rows and 128 inputs, two nibbles a
        byte, see `turbojax.matmul.int4.layout`.
      scales: float8_e4m3fn, bfloat16 or float16 ``[N / 64, K / group_size, 64]``; NaN where some
        value of a group was not finite.
      output_scale: float32 ``[N]``, a factor of each output; 1 in padding. A row's power of two is
        part of it (see `quantize_weight`), so another factor multiplies it and does not replace it.
      out_size: outputs.
      in_size: inputs.
      group_size: inputs that share a scale.
      gated: whether it holds a gate and its partner; `out_size` counts both.
      zeros: int8 as `scales`, or None: the code whose value is zero, of weights that are not
        symmetric: a value is ``(code - zero) * scale``. Only with scales of 16 bits.
    """

    codes: jax.Array
    scales: jax.Array
    output_scale: jax.Array
    out_size: int = dataclasses.field(metadata={"static": True})
    in_size: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(default=BLOCK, metadata={"static": True})
    gated: bool = dataclasses.field(default=False, metadata={"static": True})
    zeros: jax.Array | None = None

    AXES: ClassVar = {"codes": "FIRC", "scales": "FIR", "output_scale": "F", "zeros": "FIR"}

    def local(self, parts: Callable[[str], int]) -> "Int4Weight":
        """The weight of one device, which has its part of the arrays, see `size_of_part`."""
        tiles, blocks = self.codes.shape[-4:-2]
        out_size = size_of_part("out_size", self.out_size, parts("F"), tiles * OUT_MULTIPLE)
        in_size = size_of_part("in_size", self.in_size, parts("I"), blocks * BLOCK)
        return dataclasses.replace(self, out_size=out_size, in_size=in_size)

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_size, in_size)``."""
        return self.out_size, self.in_size

    @property
    def scale_dtype(self) -> ScaleDtype:
        """``"e4m3"``, ``"bf16"`` or ``"f16"``: which of the variants this is."""
        if self.scales.dtype == jnp.float8_e4m3fn:
            return "e4m3"
        return "bf16" if self.scales.dtype == jnp.bfloat16 else "f16"

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes, those of a stack of weights; of one weight none."""
        return self.codes.shape[:-4]

    @property
    def result_size(self) -> int:
        """Size of a product's last axis: `out_size`, of a gated weight half of it."""
        return self.out_size // 2 if self.gated else self.out_size

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Stored rows and inputs, ``(N, K)``."""
        return stored_rows(self.out_size, self.gated), stored_inputs(self.in_size, self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros, padding included."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.output_scale.nbytes + zeros

    def validate(self) -> None:
        """Checks the invariants of shapes and dtypes.

        Raises:
          TypeError: if a dtype is none of the above.
          ValueError: if a size or a shape does not fit, or there are zeros with scales in e4m3.
        """
        _check_group_size(self.group_size)
        _checks.check_sizes(out_size=self.out_size, in_size=self.in_size)
        if self.gated and self.out_size % 2:
            raise ValueError(f"{self.out_size=} of a gated weight must be even")
        rows, inputs = self.padded_shape
        tiles, groups = rows // OUT_MULTIPLE, inputs // self.group_size
        by_group = (tiles, groups, OUT_MULTIPLE)
        wanted = {
            "codes": ((tiles, inputs // BLOCK, OUT_MULTIPLE, BLOCK // 2), ("uint8",)),
            "scales": (by_group, ("float8_e4m3fn", "bfloat16", "float16")),
            "output_scale": ((rows,), ("float32",)),
        }
        if self.zeros is not None:
            wanted["zeros"] = (by_group, ("int8",))
        for name, (shape, dtypes) in wanted.items():
            array = getattr(self, name)
            if array.dtype.name not in dtypes:
                raise TypeError(f"{name}.dtype={array.dtype} must be {' or '.join(dtypes)}")
            if array.shape != (*self.stack, *shape):
                raise ValueError(
                    f"{name}.shape={array.shape} must be {(*self.stack, *shape)} for "
                    f"{self.out_size=}, {self.in_size=}, {self.group_size=}, {self.gated=}"
                )
        if self.zeros is not None and self.scale_dtype == "e4m3":
            raise ValueError(
                f"scales.dtype={self.scales.dtype} must be bfloat16 or float16 of a weight with "
                "zeros"
            )


def quantize_weight(
    w: jax.Array,
    *,
    group_size: int = BLOCK,
    scale_dtype: ScaleDtype = "e4m3",
    output_scale: jax.Array | float | None = None,
) -> Int4Weight:
    """Quantizes a weight to 4 bits (FireQ, section 3.1).

    A group of `group_size` inputs of one output has the scale ``s = max|w| / 7``, rounded to
    `scale_dtype`, in e4m3 at least 2**-9; its codes are ``clip(rint(w / s), -8, 7)`` with that
    rounded scale. There are no `zeros`.

    With e4m3 scales a row in which some ``max|w| / 7`` is above 64 or, zero aside, below 2**-9 is
    multiplied with a power of two first, so that its largest weight lies in ``[224, 448)``, and
    its `output_scale` with the reciprocal. That is exact, so a row keeps its relative error
    whatever its size. What remains is one row's range: a group whose largest weight is more than
    2**14 times below its row's becomes coarser, and one 7 * 2**16 times below becomes 0; that
    changes no weight by more than 2**-17 of its row's largest.

    Scales in float16 are kept normal numbers the same way: a row in which some ``max|w| / 7`` is
    above 65504 or, zero aside, below 2**-14 is brought to a largest weight in
    ``[7 * 2**14, 7 * 2**15)``.

    Args:
      w: bfloat16, float16 or float32 ``[out, in]``.
      group_size: 32, 64 or a multiple of 128, which the kernels for Hopper take.
      scale_dtype: ``"e4m3"``, where a weight's value is rounded to e4m3 too, or ``"bf16"`` or
        ``"f16"``, where the scale multiplies the sum of its group.
      output_scale: optional factor of the outputs, a number or ``[out]``: what undoes a scaling of
        `w` (see `per_tensor_scale`). Its values change no code, unless a row's factor would no
        longer be a normal float32 number; then the row's power of two is smaller.

    Returns:
      The weight. A group in which something is not finite has scale NaN and codes 0.

    Raises:
      TypeError: if a dtype is not supported.
      ValueError: if a shape or option is none of these.
    """
    w = jnp.asarray(w)
    _checks.check_float_dtype("w", w)
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(f"{w.shape=} must be [out, in], no axis empty")
    _check_group_size(group_size)
    group_size = int(group_size)
    if scale_dtype not in _SCALE_DTYPES:
        raise ValueError(f"{scale_dtype=} must be one of {tuple(_SCALE_DTYPES)}")
    factor = _output_scale(output_scale, w.shape[0])
    codes, scales, factor = _quantize(w, factor, group_size, scale_dtype)
    return Int4Weight(
        codes=codes,
        scales=scales,
        output_scale=factor,
        out_size=w.shape[0],
        in_size=w.shape[1],
        group_size=group_size,
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize(
    w: jax.Array, factor: jax.Array, group_size: int, scale_dtype: ScaleDtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A weight's three arrays."""
    rows, inputs = stored_rows(w.shape[0]), stored_inputs(w.shape[1], group_size)
    w = w.astype(jnp.float32)
    w = jnp.pad(w, ((0, rows - w.shape[0]), (0, inputs - w.shape[1])))
    groups = w.reshape(rows, inputs // group_size, group_size)
    factor = _pad_rows(factor, rows, 1.0)
    maximum = absolute_maximum(groups, 2)
    if scale_dtype in _RANGES:
        power = row_powers(maximum[..., 0], factor, _RANGES[scale_dtype])
        scaled_by = power_of_two(power)[:, None, None]
        groups = jnp.where(jnp.abs(groups) < SMALLEST_NORMAL, 0, groups) * scaled_by
        maximum = maximum * scaled_by
        factor = jnp.where(power == 0, factor, factor * power_of_two(-power))
    scale = _rounded_scale(maximum, _SCALE_DTYPES[scale_dtype])
    scale = jnp.where(maximum < jnp.inf, scale, jnp.nan)
    codes = code_tiles(pack_codes(_codes(groups, scale).reshape(rows, inputs)))
    return codes, scale_tiles(scale[..., 0].astype(_SCALE_DTYPES[scale_dtype])), factor


def _rounded_scale(maximum: jax.Array, dtype: np.dtype) -> jax.Array:
    """``maximum / 7`` rounded to the nearest number of `dtype`, ties to even, as float32."""
    unsigned = jnp.uint8 if dtype.itemsize == 1 else jnp.uint16
    guess = jnp.minimum(maximum * _RECIPROCAL_RANGE, float(jnp.finfo(dtype).max))
    # The bits of positive floats, read as integers, increase with them, so a neighbour is one away.
    bits = jax.lax.bitcast_convert_type(guess.astype(dtype), unsigned).astype(jnp.int32)

    def value(bits: jax.Array) -> jax.Array:
        rounded = jax.lax.bitcast_convert_type(bits.astype(unsigned), dtype)
        return rounded.astype(jnp.float32)

    # Seven times the middle between neighbours has 12 bits at most.
    above = (value(bits) + value(bits + 1)) * (INT4_RANGE / 2)
    below = (value(bits) + value(jnp.maximum(bits - 1, 0))) * (INT4_RANGE / 2)
    is_odd = bits % 2 == 1
    up = (maximum > above) | (is_odd & (maximum == above))
    down = (bits > 0) & ((maximum < below) | (is_odd & (maximum == below)))
    bits = bits + up.astype(jnp.int32) - down.astype(jnp.int32)
    if dtype.itemsize == 1:
        return value(jnp.maximum(bits, 1))
    if dtype == jnp.float16:
        return jnp.where(maximum < SMALLEST_NORMAL, 1.0, value(jnp.maximum(bits, 1)))
    # Devices differ in how they treat subnormal numbers.
    return jnp.where(maximum < SMALLEST_NORMAL, 1.0, jnp.maximum(value(bits), SMALLEST_NORMAL))


def _codes(w: jax.Array, scale: jax.Array) -> jax.Array:
    """``clip(rint(w / scale), -8, 7)`` in int8, ties to even; 0 where the scale is NaN.

    A code times a scale is exact in float32, and so is the difference to a value near it.
    """
    lowest, highest = -INT4_RANGE - 1, INT4_RANGE
    guess = jnp.rint(jnp.clip(w * (1 / scale), lowest - 1, highest + 1))
    rest = 2 * (w - guess * scale)
    is_odd = jnp.rint(0.5 * guess) * 2 != guess
    above = (rest > scale) | (is_odd & (rest == scale))
    below = (rest < -scale) | (is_odd & (rest == -scale))
    codes = guess + above.astype(jnp.float32) - below.astype(jnp.float32)
    return jnp.where(jnp.isfinite(scale), jnp.clip(codes, lowest, highest), 0).astype(jnp.int8)


@jax.jit
def dequantize(weight: Int4Weight) -> jax.Array:
    """The weight's values, `output_scale` applied.

    With e4m3 scales a value is ``e4m3(scale * code)``, with scales of 16 bits ``scale * code``, or
    ``scale * (code - zero)``.

    Args:
      weight: the weight, or a stack of some.

    Returns:
      float32 ``[..., out, in]``; of a gated weight all rows of the gate, then those of its partner.
    """
    if weight.stack:
        return jax.vmap(dequantize)(weight)
    values = scaled_values(weight) * weight.output_scale[:, None]
    return unpad_rows(values, weight)[:, : weight.in_size]


def scaled_values(weight: Int4Weight) -> jax.Array:
    """The weight's values, float32 ``[N, K]``: padded, in stored order, without `output_scale`.

    With e4m3 scales they are ``e4m3(scale * code)``, saturating (FireQ's table of 16 values a
    group), with scales of 16 bits ``scale * integer``, see `integers`.
    """
    scale = jnp.repeat(scale_rows(weight.scales), weight.group_size, axis=1)
    values = integers(weight).astype(jnp.float32) * scale.astype(jnp.float32)
    if weight.scale_dtype != "e4m3":
        return values
    # Not through e4m3, to which a CPU converts one number at a time.
    small = jnp.rint(values * 2.0**9) * 2.0**-9
    large = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=3)
    values = jnp.where(jnp.abs(values) < 2.0**-6, small, large)
    return jnp.clip(values, -E4M3_MAX, E4M3_MAX)


def in_blocks(weight: Int4Weight) -> Int4Weight:
    """The same values in groups of at most 128 inputs, for kernels: scales are repeated."""
    if weight.group_size <= BLOCK:
        return weight
    blocks = stored_inputs(weight.in_size) // BLOCK

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, weight.group_size // BLOCK, axis=-2)[..., :blocks, :]

    return dataclasses.replace(
        weight,
        codes=weight.codes[..., :blocks, :, :],
        scales=repeated(weight.scales),
        zeros=None if weight.zeros is None else repeated(weight.zeros),
        group_size=BLOCK,
    )


def integers(weight: Int4Weight) -> jax.Array:
    """The integers that scales multiply, int8 ``[N, K]``: the codes, less their zeros."""
    codes = unpack_codes(code_rows(weight.codes))
    if weight.zeros is None:
        return codes
    return codes - jnp.repeat(scale_rows(weight.zeros), weight.group_size, axis=1)


def unpad_rows(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """Stored rows ``[N, ...]`` to outputs ``[out_size, ...]``, those of a gate first."""
    if not weight.gated:
        return x[: weight.out_size]
    parts = x.reshape(-1, 2, GATED_ROWS, *x.shape[1:])
    gate, up = (parts[:, i].reshape(-1, *x.shape[1:])[: weight.result_size] for i in (0, 1))
    return jnp.concatenate([gate, up])


def pad_rows(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """The inverse of `unpad_rows`, padded by 0: a bias in the order of the weight's rows."""
    rows = stored_rows(weight.out_size, weight.gated)
    if weight.gated:
        half = weight.result_size
        x = _alternate([_pad_rows(part, round_up(half, GATED_ROWS)) for part in jnp.split(x, 2)])
    return x if x.shape[0] == rows else _pad_rows(x, rows)  # devices may have parts of it


def concatenate(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Joins weights of the same inputs along their outputs, for example those of q, k and v.

    Args:
      weights: at least one, none of them gated, alike in `in_size`, group size, scale dtype and
        in whether they have zeros.

    Returns:
      A weight whose rows are those of the weights, one after the other, padded at the end alone.

    Raises:
      ValueError: if there is none, or they are not alike, or gated.
    """
    _check_alike(weights)
    out_size = sum(w.out_size for w in weights)
    taken = tuple(w.out_size for w in weights)
    return _join(tuple(weights), out_size, stored_rows(out_size), jnp.concatenate, taken)


def gate_and_up(gate: Int4Weight, up: Int4Weight) -> Int4Weight:
    """Joins the two weights of a gated product, so that both results of an output lie together.

    Rows ``16 i`` to ``16 i + 7`` are rows ``8 i`` to ``8 i + 7`` of the gate, and the next eight
    are the same rows of its partner. `matmul` with ``activation="swiglu"`` takes such a weight.

    Args:
      gate: the weight ``[F, in]`` whose product is activated.
      up: the weight ``[F, in]`` that it is multiplied with, alike in all sizes and dtypes.

    Returns:
      A gated weight of ``2 F`` outputs.

    Raises:
      ValueError: if they are not alike, or gated.
    """
    _check_alike((gate, up))
    if gate.out_size != up.out_size:
        raise ValueError(f"{gate.out_size=} must equal {up.out_size=}")
    rows = round_up(gate.out_size, GATED_ROWS)
    out_size = 2 * gate.out_size
    stored = stored_rows(out_size, gated=True)
    joined = _join((gate, up), out_size, stored, _alternate, (rows, rows))
    return dataclasses.replace(joined, gated=True)


@one_program("out_size", "rows", "join", "taken")
def _join(
    weights: tuple[Int4Weight, ...],
    out_size: int,
    rows: int,
    join: Callable[[list[jax.Array]], jax.Array],
    taken: tuple[int, ...],
) -> Int4Weight:
    """A weight of rows that are `join`ed; each weight gives as many as `taken` says."""

    def leaf(arrays: list[jax.Array], padding: float) -> jax.Array:
        parts = [x[:n] for x, n in zip(arrays, taken, strict=True)]
        return _pad_rows(join(parts), rows, padding)

    first = weights[0]
    nothing = E4M3_SCALES.smallest if first.scale_dtype == "e4m3" else 1.0
    scales = leaf([scale_rows(w.scales) for w in weights], nothing)
    zeros = [scale_rows(w.zeros) for w in weights if w.zeros is not None]
    return Int4Weight(
        codes=code_tiles(leaf([code_rows(w.codes) for w in weights], 0)),
        scales=scale_tiles(scales),
        output_scale=leaf([w.output_scale for w in weights], 1.0),
        out_size=out_size,
        in_size=first.in_size,
        group_size=first.group_size,
        zeros=scale_tiles(leaf(zeros, 0)) if zeros else None,
    )


@one_program()
def _alternate(gate_and_up: list[jax.Array]) -> jax.Array:
    """Rows of both in alternating groups of eight; their number is a multiple of 8."""
    parts = [x.reshape(-1, GATED_ROWS, *x.shape[1:]) for x in gate_and_up]
    return jnp.stack(parts, axis=1).reshape(-1, *gate_and_up[0].shape[1:])


@one_program("rows", "value")
def _pad_rows(x: jax.Array, rows: int, value: float = 0) -> jax.Array:
    padding = jnp.full((rows - x.shape[0], *x.shape[1:]), value, x.dtype)
    return jnp.concatenate([x, padding])


def _output_scale(scale: jax.Array | float | None, out_size: int) -> jax.Array:
    """float32 ``[out]``."""
    scale = jnp.asarray(1.0 if scale is None else scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"output_scale.dtype={scale.dtype} must be floating point")
    if scale.shape not in ((), (out_size,)):
        raise ValueError(f"output_scale.shape={scale.shape} must be () or ({out_size},)")
    return jnp.broadcast_to(scale.astype(jnp.float32), (out_size,))


def _check_group_size(group_size: int) -> None:
    _checks.check_integer("group_size", group_size)
    if group_size not in (32, 64) and (group_size < BLOCK or group_size % BLOCK):
        raise ValueError(f"{group_size=} must be 32, 64 or a multiple of {BLOCK}")


def _check_alike(weights: Sequence[Int4Weight]) -> None:
    if not weights:
        raise ValueError("weights must hold at least one weight")
    traits = [
        (w.in_size, w.group_size, w.scale_dtype, w.zeros is not None, w.gated) for w in weights
    ]
    if any(t != traits[0] for t in traits) or weights[0].gated:
        raise ValueError(
            f"weights must be alike in in_size, group_size, scale_dtype and zeros (or none), and "
            f"not gated; they are {traits}"
        )
    for w in weights:
        if w.stack:
            raise ValueError(f"{w.stack=} must be (): weights are joined one by one, see jax.vmap")
