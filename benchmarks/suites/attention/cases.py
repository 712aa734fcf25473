"""What the rows of the attention suites share: calls, cases, and caches by name."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.measuring.samples import Error
from benchmarks.measuring.work import Work
from benchmarks.shapes import Shape
from turbojax import TurboConfig
from turbojax.caches.progressive.kind import PROGRESSIVE

Choice = Literal["short", "thorough", "hopper", "hopper-short", "default"]
"""Which rows of a shape: some or all, those of the suite of Hopper's kernels, or the default."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to time.

    Attributes:
      function: jitted by the caller; arrays and pytrees in and out.
      arguments: what it is called with.
      work: what it must do.
      error: of its output, against exact float32 arithmetic on the same inputs.
      facts: more for the row.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: Work
    error: Callable[[Any], Error]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to be measured.

    Attributes:
      method: what runs, a part of the row's name: ``"cudnn"``, ``"turbo-4bit"``.
      implementation: of ours, or None.
      build: makes the call from the group's inputs. Raises NotImplementedError if it cannot.
    """

    method: str
    implementation: str | None
    build: Callable[[Any], Call]

    def name(self, operation: str, shape: Shape) -> str:
        """``decode/llama3-8b/b16-s32768/turbo-4bit/triton``."""
        parts = [operation, shape.label, self.method, self.implementation]
        return "/".join(part for part in parts if part)


def turbo_configs(kv_heads: int) -> dict[str, TurboConfig]:
    """The caches of the suite by name."""
    return {name: PROGRESSIVE.by_name(name, kv_heads) for name in PROGRESSIVE.names}
