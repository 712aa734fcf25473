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

BY_WEIGHT = tuple("bcdefjgahi")
"""Letters in the order of a real model's rows, should there not be time for all of them."""


def specs_of(subject: subjects.Subject, letters: Sequence[str], *, quick: bool) -> list[Spec]:
    """The rows of some tables, table by table in the order of `letters`."""
    by_letter = {table.letter: table for table in TABLES}
    every = [spec for letter in letters for spec in by_letter[letter].specs(subject)]
    return [spec for spec in every if spec.quick or not quick]


def prepared(
    model: str, dtype: str | None, letters: Sequence[str], *, quick: bool
) -> tuple[subjects.Subject, list[Spec]]:
    """A subject, see `subject.load`, and its rows."""
    subject = subjects.load(model, dtype, subjects.QUICK if quick else None)
    return subject, specs_of(subject, letters, quick=quick)


def _shown(results: str, left_out: str = "") -> Shown:
    """What the docs show of these results, without tables of some letters."""
    words = results.replace("_", " ")
    shown = [table for table in TABLES if table.letter not in left_out]
    return Shown(
        (results,),
        {f"{words} {table.word}": table.render for table in shown},
        {f"{results}_{table.word}.png": table.draw for table in shown},
    )


SHOWN = _shown("evidence")
# Pooled attention on it was not measured.
SMOLLM2 = _shown("evidence_smollm2", "i")
