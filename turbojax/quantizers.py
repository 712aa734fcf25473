"""Quantizers: FlashQ stages 1 and 2, e4m3, INT4 weights, packing, head priorities."""

from turbojax.matmul.int4.weight import Int4Weight as Int4Weight
from turbojax.matmul.int4.weight import quantize_weight as quantize_weight
from turbojax.numerics.fp8 import E4M3_MAX as E4M3_MAX
from turbojax.numerics.fp8 import Fp8Tokens as Fp8Tokens
from turbojax.numerics.fp8 import quantize_fp8 as quantize_fp8
from turbojax.numerics.fp8 import quantize_tokens as quantize_tokens
from turbojax.numerics.fp8 import round_to_e4m3 as round_to_e4m3
from turbojax.numerics.head_priority import head_priority as head_priority
from turbojax.numerics.head_priority import rank_heads as rank_heads
from turbojax.numerics.int8 import INT8_RANGE as INT8_RANGE
from turbojax.numerics.int8 import absolute_maximum as absolute_maximum
from turbojax.numerics.int8 import quantize_int8 as quantize_int8
from turbojax.numerics.int8 import quantize_with_scale as quantize_with_scale
from turbojax.numerics.int8 import round_scale as round_scale
from turbojax.numerics.int8 import scale_from_maximum as scale_from_maximum
from turbojax.numerics.packing import pack as pack
from turbojax.numerics.packing import packed_size as packed_size
from turbojax.numerics.packing import unpack as unpack
from turbojax.numerics.progressive import dequantize_channels as dequantize_channels
from turbojax.numerics.progressive import quantize_channels as quantize_channels
