"""The language of the kernels' inner parts: what one lane of a warp computes, inside `inline_mgpu`.

Pallas works on arrays of a whole warpgroup. Where that is not enough, code is written for one lane,
in numbers of 32 bits whose operators emit operations (`numbers`), with functions that are one
instruction each (`instructions`, `half`), pointers, barriers and copies (`memory`), and a lane's
part of a warpgroup's arrays (`fragments`). `tests/oracles/warp.py` has the same names for arrays of
32 lanes, on which such code runs on a CPU.
"""

from pallas_kernels.mosaic.lane import fragments as fragments
from pallas_kernels.mosaic.lane import half as half
from pallas_kernels.mosaic.lane.instructions import ROUNDER as ROUNDER
from pallas_kernels.mosaic.lane.instructions import absolute as absolute
from pallas_kernels.mosaic.lane.instructions import add_rounder as add_rounder
from pallas_kernels.mosaic.lane.instructions import among_four as among_four
from pallas_kernels.mosaic.lane.instructions import assembly as assembly
from pallas_kernels.mosaic.lane.instructions import ballot as ballot
from pallas_kernels.mosaic.lane.instructions import block_barrier as block_barrier
from pallas_kernels.mosaic.lane.instructions import divide as divide
from pallas_kernels.mosaic.lane.instructions import dot4 as dot4
from pallas_kernels.mosaic.lane.instructions import exp2 as exp2
from pallas_kernels.mosaic.lane.instructions import flip_masked as flip_masked
from pallas_kernels.mosaic.lane.instructions import floor as floor
from pallas_kernels.mosaic.lane.instructions import fma as fma
from pallas_kernels.mosaic.lane.instructions import from_lane as from_lane
from pallas_kernels.mosaic.lane.instructions import half_to_float as half_to_float
from pallas_kernels.mosaic.lane.instructions import held as held
from pallas_kernels.mosaic.lane.instructions import largest_of_warp as largest_of_warp
from pallas_kernels.mosaic.lane.instructions import log2 as log2
from pallas_kernels.mosaic.lane.instructions import log2_of_any as log2_of_any
from pallas_kernels.mosaic.lane.instructions import matmul as matmul
from pallas_kernels.mosaic.lane.instructions import maxima_of_halves as maxima_of_halves
from pallas_kernels.mosaic.lane.instructions import maximum as maximum
from pallas_kernels.mosaic.lane.instructions import minima_of_halves as minima_of_halves
from pallas_kernels.mosaic.lane.instructions import minimum as minimum
from pallas_kernels.mosaic.lane.instructions import named_barrier as named_barrier
from pallas_kernels.mosaic.lane.instructions import pack_bytes as pack_bytes
from pallas_kernels.mosaic.lane.instructions import pack_e4m3 as pack_e4m3
from pallas_kernels.mosaic.lane.instructions import pack_e5m2 as pack_e5m2
from pallas_kernels.mosaic.lane.instructions import partner as partner
from pallas_kernels.mosaic.lane.instructions import permute_bytes as permute_bytes
from pallas_kernels.mosaic.lane.instructions import reciprocal as reciprocal
from pallas_kernels.mosaic.lane.instructions import reciprocal_root as reciprocal_root
from pallas_kernels.mosaic.lane.instructions import reduce_lanes as reduce_lanes
from pallas_kernels.mosaic.lane.instructions import root as root
from pallas_kernels.mosaic.lane.instructions import rounded_quotient as rounded_quotient
from pallas_kernels.mosaic.lane.instructions import signed_byte as signed_byte
from pallas_kernels.mosaic.lane.instructions import special as special
from pallas_kernels.mosaic.lane.instructions import tanh as tanh
from pallas_kernels.mosaic.lane.instructions import thread as thread
from pallas_kernels.mosaic.lane.instructions import uniform as uniform
from pallas_kernels.mosaic.lane.instructions import warp_barrier as warp_barrier
from pallas_kernels.mosaic.lane.instructions import with_sign_of as with_sign_of
from pallas_kernels.mosaic.lane.memory import ClusterPointer as ClusterPointer
from pallas_kernels.mosaic.lane.memory import Pointer as Pointer
from pallas_kernels.mosaic.lane.memory import arrive_after_copies as arrive_after_copies
from pallas_kernels.mosaic.lane.memory import cluster_barrier as cluster_barrier
from pallas_kernels.mosaic.lane.memory import commit_copies as commit_copies
from pallas_kernels.mosaic.lane.memory import copy as copy
from pallas_kernels.mosaic.lane.memory import copy_words as copy_words
from pallas_kernels.mosaic.lane.memory import expect_bytes as expect_bytes
from pallas_kernels.mosaic.lane.memory import init_barrier as init_barrier
from pallas_kernels.mosaic.lane.memory import join_bits as join_bits
from pallas_kernels.mosaic.lane.memory import load_matrices as load_matrices
from pallas_kernels.mosaic.lane.memory import prefetch as prefetch
from pallas_kernels.mosaic.lane.memory import publish_barriers as publish_barriers
from pallas_kernels.mosaic.lane.memory import publish_stores as publish_stores
from pallas_kernels.mosaic.lane.memory import store_matrices as store_matrices
from pallas_kernels.mosaic.lane.memory import wait as wait
from pallas_kernels.mosaic.lane.memory import wait_for_copies as wait_for_copies
from pallas_kernels.mosaic.lane.numbers import Bool as Bool
from pallas_kernels.mosaic.lane.numbers import Float as Float
from pallas_kernels.mosaic.lane.numbers import Int as Int
from pallas_kernels.mosaic.lane.numbers import chain as chain
from pallas_kernels.mosaic.lane.numbers import either as either
from pallas_kernels.mosaic.lane.numbers import integer as integer
from pallas_kernels.mosaic.lane.numbers import loop as loop
from pallas_kernels.mosaic.lane.numbers import number as number
from pallas_kernels.mosaic.lane.numbers import number_of as number_of
from pallas_kernels.mosaic.lane.numbers import scalar as scalar
from pallas_kernels.mosaic.lane.numbers import total as total
from pallas_kernels.mosaic.lane.numbers import tree as tree
from pallas_kernels.mosaic.lane.numbers import when as when
from pallas_kernels.mosaic.lane.warpgroup import finish as finish
from pallas_kernels.mosaic.lane.warpgroup import start_product as start_product
