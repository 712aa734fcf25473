"""TurboAttention: prefill and decode."""

from turbojax.ops.turbo_attention.api import decode as decode
from turbojax.ops.turbo_attention.api import prefill as prefill
from turbojax.ops.turbo_attention.api import turbo_attention as turbo_attention
