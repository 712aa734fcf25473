"""Exact attention within prompts and to an `ExactCache`, and that cache's own names."""

from turbojax.ops.exact_attention.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from turbojax.ops.exact_attention.api import REPEATABLE as REPEATABLE
from turbojax.ops.exact_attention.api import attend as attend
from turbojax.ops.exact_attention.api import attend_cache as attend_cache
from turbojax.ops.exact_attention.api import attention as attention
from turbojax.ops.exact_attention.api import decode as decode
from turbojax.ops.exact_attention.reference import masked_attention as masked_attention
