"""Attention to a `Kv4Cache` or a `K8v4Cache`, and of the prompt that fills one."""

from turbojax.caches.token_scaled.api import attend_cache as attend_cache
from turbojax.caches.token_scaled.api import attend_prompt as attend_prompt
from turbojax.caches.token_scaled.api import decode as decode
from turbojax.caches.token_scaled.api import prefill as prefill
