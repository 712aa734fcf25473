"""Which blocks of keys a block of queries attends to, and how coarsely: levels 0, 1, 2, 4, 8.

A level map is data for `turbojax.pooled_attention`: `r` averages a block's keys and values over
groups of `r` tokens, 0 skips it. `select_levels` makes one, by a policy: from an estimate of where
the attention goes (`TopK`, `Threshold`), from how alike the keys are (`SimilarityCap` around
another policy), or from positions alone (`LocalWindow`, `Strided`). `grid_order` is for tokens of
images and videos: it makes blocks of neighbours.
"""

from turbojax.levels.api import Policy as Policy
from turbojax.levels.api import level_density as level_density
from turbojax.levels.api import select_levels as select_levels
from turbojax.levels.estimate import block_importance as block_importance
from turbojax.levels.order import grid_order as grid_order
from turbojax.levels.patterns import LocalWindow as LocalWindow
from turbojax.levels.patterns import Pattern as Pattern
from turbojax.levels.patterns import Strided as Strided
from turbojax.levels.ranking import Threshold as Threshold
from turbojax.levels.ranking import TopK as TopK
from turbojax.levels.similarity import SimilarityCap as SimilarityCap
from turbojax.levels.similarity import key_similarity as key_similarity
