"""Every table of the evidence, and what the docs show of the newest result."""

from benchmarks.evidence import caches, pooling, rounding, softmaxes
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

SHOWN = Shown(
    ("evidence",),
    {table.name: table.render for table in TABLES},
    {table.plot: table.draw for table in TABLES},
)
