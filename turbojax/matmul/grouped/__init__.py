"""INT4 x FP8 products of tokens that are sorted by expert, each with its expert's weight."""

from turbojax.matmul.grouped.api import grouped_matmul as grouped_matmul
