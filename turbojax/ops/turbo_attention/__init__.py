"""TurboAttention: prefill and decode."""

from turbojax.ops.turbo_attention.api import attend as attend
from turbojax.ops.turbo_attention.api import attend_output as attend_output
from turbojax.ops.turbo_attention.api import attend_prompt as attend_prompt
from turbojax.ops.turbo_attention.api import prefill as prefill
from turbojax.ops.turbo_attention.api import turbo_attention as turbo_attention
from turbojax.ops.turbo_attention.decoding import attend_cache as attend_cache
from turbojax.ops.turbo_attention.decoding import decode as decode
