"""Numpy oracles of the numerics: float64 and integers, no jax, written from the equations."""

from oracles.cache import Cache as Cache
from oracles.gradient import Gradients as Gradients
from oracles.gradient import attention_gradients as attention_gradients
from oracles.gradient import rounded as rounded
from oracles.online import attention as attention
from oracles.online import decode as decode
from oracles.online import plain_attention as plain_attention
from oracles.online import quantize_blocks as quantize_blocks
from oracles.online import visible as visible
from oracles.quantizers import channel_parameters as channel_parameters
from oracles.quantizers import dequantize_channels as dequantize_channels
from oracles.quantizers import e4m3 as e4m3
from oracles.quantizers import head_priority as head_priority
from oracles.quantizers import pack as pack
from oracles.quantizers import quantize_channels as quantize_channels
from oracles.quantizers import quantize_fp8 as quantize_fp8
from oracles.quantizers import quantize_int8 as quantize_int8
from oracles.quantizers import quantize_with_scale as quantize_with_scale
from oracles.quantizers import rank_heads as rank_heads
from oracles.quantizers import round_ratio as round_ratio
from oracles.quantizers import scale_of as scale_of
from oracles.quantizers import sixteen_bits as sixteen_bits
from oracles.quantizers import unpack as unpack
from oracles.softmax import PRINTED_CUBIC as PRINTED_CUBIC
from oracles.softmax import least_squares_cubic as least_squares_cubic
from oracles.softmax import sas as sas
