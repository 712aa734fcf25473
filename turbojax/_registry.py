"""Which implementation runs an op, and in words why another one cannot."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from turbojax import _device

ImplementationName = Literal["xla", "triton", "mosaic_gpu", "jax_triton"]
IMPLEMENTATION_NAMES = ("mosaic_gpu", "jax_triton", "triton", "xla")


def _supports_everything(**_: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an op, `run`, on checked arguments.

    Given these by name (arrays or `ShapeDtypeStruct`s), `unsupported` returns None, or the reason
    why `run` cannot take them here.
    """

    name: ImplementationName
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = _supports_everything


@dataclasses.dataclass(frozen=True)
class Registry:
    """The implementations of one op, fastest first."""

    op: str
    implementations: tuple[Implementation, ...]

    @property
    def preferred(self) -> tuple[Implementation, ...]:
        """In the order of choice; where Mosaic's kernels were never run, other kernels go first."""
        if _device.is_measured():
            return self.implementations
        ranks = {"mosaic_gpu": 1, "xla": 2}
        return tuple(sorted(self.implementations, key=lambda i: ranks.get(i.name, 0)))

    def select(self, requested: str | None, **arguments: Any) -> Implementation:
        """The implementation asked for, or the first that takes these arguments.

        A name never falls back to another. Raises ValueError if it is unknown, and
        NotImplementedError, with each refusal, if none can run this.
        """
        if requested is not None and requested not in IMPLEMENTATION_NAMES:
            raise ValueError(
                f"implementation={requested!r} must be None or one of {IMPLEMENTATION_NAMES}"
            )
        candidates = [i for i in self.preferred if requested in (None, i.name)]
        if not candidates:
            names = ", ".join(repr(i.name) for i in self.implementations)
            raise NotImplementedError(
                f"{self.op} has no implementation={requested!r}; it has {names}"
            )
        symbol = _symbolic_size(arguments)
        refusals = []
        for candidate in candidates:
            if symbol is not None and candidate.name != "xla":
                refusal: str | None = f"kernels take no symbolic sizes, such as {symbol}"
            else:
                refusal = candidate.unsupported(**arguments)
            if refusal is None:
                return candidate
            refusals.append(f"{candidate.name}: {refusal}")
        raise NotImplementedError(f"{self.op} cannot run here: " + "; ".join(refusals))

    def beside(self, attending: str | None) -> Any:
        """The name to ask this op for, given `attending`, what the attending op is asked for.

        It is the same name, but None where this op has no such implementation: some only attend.
        Then the one that writes a cache is chosen, and all of these write the same bits. Unknown
        names stay, for `select` to refuse.
        """
        known = attending in IMPLEMENTATION_NAMES
        has_it = any(i.name == attending for i in self.implementations)
        return None if known and not has_it else attending


def _symbolic_size(arguments: Any) -> str | None:
    """A size of an array that `jax.export` leaves open, or None."""
    for x in jax.tree.leaves(arguments):
        for size in getattr(x, "shape", ()):
            if not isinstance(size, int):
                return str(size)
    return None
