"""Every table of the evidence, and what the docs show of the newest result."""

from collections.abc import Sequence

from benchmarks.evidence import caches, pooling, rounding, softmaxes
from benchmarks.evidence import subject as subjects
from benchmarks.evidence.rows import Spec
from benchmarks.suite import Shown

TABLES = (
    caches.METHODS,
    softmaxes.PARTS,
    caches.BLOCKS,
    caches.HEADS,
    rounding.CHANNELS,
    softmaxes.SAS_TABLE,
    rounding.FIREQ,
    caches.POLAR,
    pooling.POOLING,
    caches.INT4,
)
"""By letter; ``k``, speed, is of other results."""


def specs_of(subject: subjects.Subject, letters: Sequence[str], *, quick: bool) -> list[Spec]:
    """The rows of some tables."""
    every = [spec for table in TABLES if table.letter in letters for spec in table.specs(subject)]
    return [spec for spec in every if spec.quick or not quick]


def prepared(
    model: str, dtype: str | None, letters: Sequence[str], *, quick: bool
) -> tuple[subjects.Subject, list[Spec]]:
    """A subject, see `subject.load`, and its rows."""
    sizes = subjects.QUICK if quick else subjects.Sizes()
    subject = subjects.load(model, dtype, sizes)
    return subject, specs_of(subject, letters, quick=quick)


SHOWN = Shown(
    ("evidence",),
    {table.name: table.render for table in TABLES},
    {table.plot: table.draw for table in TABLES},
)
