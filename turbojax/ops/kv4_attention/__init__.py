"""Attention to a `Kv4Cache` or a `K8v4Cache`, and of the prompt that fills one."""

from turbojax.ops.kv4_attention.api import attend_cache as attend_cache
from turbojax.ops.kv4_attention.api import attend_prompt as attend_prompt
from turbojax.ops.kv4_attention.api import decode as decode
from turbojax.ops.kv4_attention.api import prefill as prefill
