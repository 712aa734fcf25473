"""TurboAttention: prefill and decode."""

from turbojax.attention.turbo.api import attend as attend
from turbojax.attention.turbo.api import attend_output as attend_output
from turbojax.attention.turbo.api import turbo_attention as turbo_attention
from turbojax.caches.progressive.api import attend_cache as attend_cache
from turbojax.caches.progressive.api import attend_prompt as attend_prompt
from turbojax.caches.progressive.api import decode as decode
from turbojax.caches.progressive.api import prefill as prefill
