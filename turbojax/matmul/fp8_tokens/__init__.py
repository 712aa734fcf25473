"""Activations to e4m3, one scale per token, as they are or normalized first."""

from turbojax.matmul.fp8_tokens.api import quantize_activation as quantize_activation
from turbojax.matmul.fp8_tokens.api import rms_norm_quantize as rms_norm_quantize
from turbojax.matmul.fp8_tokens.api import scale_quantize as scale_quantize
