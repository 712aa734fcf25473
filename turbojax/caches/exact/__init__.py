"""Exact attention within prompts and to an `ExactCache`, and that cache's own names."""

from turbojax.caches.exact.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from turbojax.caches.exact.api import REPEATABLE as REPEATABLE
from turbojax.caches.exact.api import attend as attend
from turbojax.caches.exact.api import attend_cache as attend_cache
from turbojax.caches.exact.api import attention as attention
from turbojax.caches.exact.api import decode as decode
from turbojax.caches.exact.reference import masked_attention as masked_attention
