"""What FireQ's suite multiplies, what a call needs at least, and whether its output is right.

Weights and activations are normal numbers, sampled in float32. Every number format gets the same
ones, so that methods differ in nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.suites import common
from turbojax import fireq
from turbojax.fireq import Fp8Tokens, Int4Weight

Row = dict[str, Any]
# This many rows of an output are compared.
_COMPARED = 4
# Relative L1: rounding gives 0.03 at most, a wrong output about 1.
_WRONG = 0.05


class Arrays:
    """Inputs, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def get(self, make: Callable[..., Any], *sizes: Any) -> Any:
        """``make(*sizes)``, the same arrays every time."""
        if (make, sizes) not in self._made:
            self._made[make, sizes] = make(*sizes)
        return self._made[make, sizes]


@functools.partial(jax.jit, static_argnums=1)
def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def activations(tokens: int, size: int) -> jax.Array:
    """bfloat16 ``[tokens, size]``."""
    return _normal(0, (tokens, size)).astype(jnp.bfloat16)


def tokens_of(tokens: int, size: int) -> Fp8Tokens:
    """The activations in e4m3."""
    return fireq.quantize_activation(activations(tokens, size), implementation="xla")


def dense(outputs: int, inputs: int, seed: int = 1) -> jax.Array:
    """A weight in bfloat16, ``[outputs, inputs]``, of standard deviation ``inputs**-0.5``."""
    return (_normal(seed, (outputs, inputs)) * inputs**-0.5).astype(jnp.bfloat16)


def dense_fp8(outputs: int, inputs: int) -> jax.Array:
    """The weight in e4m3, times the root of its inputs."""
    return _normal(1, (outputs, inputs)).astype(jnp.float8_e4m3fn)


def int4(outputs: int, inputs: int, scale_dtype: str = "e4m3", seed: int = 1) -> Int4Weight:
    """The weight in 4 bits, its standard deviation as a factor of the outputs."""
    w = _normal(seed, (outputs, inputs))
    return fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=inputs**-0.5)


def gate_and_up(inner: int, size: int) -> Int4Weight:
    """Both weights of a gated product in 4 bits."""
    return fireq.gate_and_up(int4(inner, size, seed=1), int4(inner, size, seed=2))


def dense_gate_and_up(inner: int, size: int) -> jax.Array:
    """The same in bfloat16, ``[2 inner, size]``, the gate first."""
    return jnp.concatenate([dense(inner, size, 1), dense(inner, size, 2)])


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
        """The microseconds that the ceilings allow, and which of them sets the time.

        Args:
          ceilings: GB/s under ``"copy"``, TFLOP/s under number formats; None if not measured.
        """
        amounts = {"copy": self.nbytes / 1e3}
        if self.operations:
            amounts[self.unit] = self.operations / 1e6
        rates = {name: ceilings.get(name) for name in amounts}
        if any(rate is None for rate in rates.values()):
            return None
        return max((amount / rates[name], name) for name, amount in amounts.items())

    def facts(self, microseconds: float, ceilings: Mapping[str, float | None]) -> Row:
        """Rates, and the share of the time that the ceilings allow."""
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


Check = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""Takes an output and its reference; gives some rows, what they should be, whether all is
finite."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to time.

    Attributes:
      function: arrays and pytrees in and out.
      arguments: what it is called with.
      needs: what it must do.
      check: compiled beside the function; None where `errors` does it all.
      against: arguments of `check` after the output.
      errors: of an output, without `check`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: Needs
    check: Check | None = None
    against: tuple[Any, ...] = ()
    errors: Callable[[Any], Row] | None = None

    def lower(self) -> jax.stages.Lowered:
        """The function for these arguments."""
        return jax.jit(self.function).lower(*self.arguments)

    def lower_check(self, output: Any) -> jax.stages.Lowered | None:
        """The check of an output of these shapes and dtypes."""
        if self.check is None:
            return None
        return jax.jit(self.check).lower(output, *self.against)

    def measure(
        self, compiled: Callable[..., Any], check: Any, repetitions: int | None
    ) -> tuple[float, Row]:
        """Microseconds, and facts for the row.

        Raises:
          ArithmeticError: if the output is wrong.
        """
        facts = self._errors(compiled(*self.arguments), check)
        taken = timing.measure(compiled, self.arguments, repetitions=repetitions)
        return taken.microseconds, {
            "spread": taken.spread,
            "clock": taken.clock,
            "repetitions": taken.repetitions,
            "wall_us": taken.wall_microseconds,
            "kernels": kernel_facts(taken.kernels),
            **facts,
        }

    def _errors(self, output: Any, check: Any) -> Row:
        if check is None:
            return {} if self.errors is None else self.errors(output)
        got, want, is_finite = check(output, *self.against)
        if not is_finite:
            raise ArithmeticError("the output is not finite")
        return close(got, want)


def kernel_facts(kernels: Any) -> list[Row]:
    """The longest kernels, for a row."""
    return [{"name": name[:80], "us": us} for name, us in kernels[:8]]


def close(got: jax.Array, want: jax.Array) -> Row:
    """The errors of an output.

    Raises:
      ArithmeticError: if they are more than rounding makes.
    """
    errors = common.errors(got, want)
    if not errors["relative_l1"] <= _WRONG:
        raise ArithmeticError(f"the output is wrong: its relative L1 error is {errors}")
    return errors


def compared_rows(count: int) -> np.ndarray:
    """Which rows of this many are compared: the first, the last and some between."""
    return np.linspace(0, count - 1, _COMPARED).astype(np.int32)


def values(x: jax.Array | Fp8Tokens | Int4Weight) -> jax.Array:
    """What an operand stands for, in float32."""
    if isinstance(x, Fp8Tokens):
        return x.codes.astype(jnp.float32) * x.scale.astype(jnp.float32)[..., None]
    if isinstance(x, Int4Weight):
        return fireq.dequantize(x)
    return x.astype(jnp.float32)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x w^T`` in float32 of a few rows.

    A sum and no matrix product: XLA need not search for the fastest way, and nothing is rounded.
    """
    return jnp.sum(x[:, None] * w[None], axis=-1)


def check_product(
    out: jax.Array, x: jax.Array | Fp8Tokens, w: jax.Array | Int4Weight
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares a product in any format with that of its own operands in float32."""
    rows = compared_rows(out.shape[0])
    some = jax.tree.map(lambda leaf: leaf[rows], x)
    return out[rows], product(values(some), values(w)), jnp.all(jnp.isfinite(out))
