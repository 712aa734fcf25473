"""The language of the kernels' inner parts: what one lane of a warp computes, inside `inline_mgpu`.

Pallas works on arrays of a whole warpgroup. Where that is not enough, code is written for one lane,
in numbers of 32 bits whose operators emit operations (`numbers`), with functions that are one
instruction each (`instructions`, `half`), pointers, barriers and copies (`memory`), and a lane's
part of a warpgroup's arrays (`fragments`). `tests/oracles/warp.py` has the same names for arrays of
32 lanes, on which such code runs on a CPU.
"""

from pallas_kernels.mosaic.lane import fragments as fragments
from pallas_kernels.mosaic.lane import half as half
from pallas_kernels.mosaic.lane.instructions import *  # noqa: F403
from pallas_kernels.mosaic.lane.memory import *  # noqa: F403
from pallas_kernels.mosaic.lane.numbers import *  # noqa: F403
from pallas_kernels.mosaic.lane.warpgroup import *  # noqa: F403
