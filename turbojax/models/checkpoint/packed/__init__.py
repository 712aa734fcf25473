"""Checkpoints with 4-bit weights that other programs write: GPTQ, AWQ and compressed-tensors.

Every format packs eight codes of four bits into an int32, and has a scale, and mostly a zero point,
for each group of a row's inputs: ``weight = (code - zero) * scale``. They differ in what is packed
along which axis, in the order within a word, and in how zero points are stored; each has a file
here. GGUF's Q4_0, codes in bytes beside their scale, can be asked for too. `reading` makes a
`QuantizedDecoder` of such a folder or file.
"""

from turbojax.models.checkpoint.packed.q4_0 import Q40 as Q40
from turbojax.models.checkpoint.packed.reading import METHODS as METHODS
from turbojax.models.checkpoint.packed.reading import read as read
