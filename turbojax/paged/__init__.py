"""Paged KV caches: the pool of pages, its allocator, and attention over them.

`init_cache` makes the pool and `PageAllocator` hands out its pages; `append` writes tokens into
them and `attention` reads them.
"""

from turbojax.cache.allocator import PageAllocator as PageAllocator
from turbojax.cache.allocator import PageCopy as PageCopy
from turbojax.cache.allocator import PoolExhausted as PoolExhausted
from turbojax.cache.allocator import PoolStatistics as PoolStatistics
from turbojax.cache.paged import PagedCache as PagedCache
from turbojax.cache.paged import append as append
from turbojax.cache.paged import gather as gather
from turbojax.cache.paged import init_paged_cache as init_paged_cache
from turbojax.cache.pages import copy_pages as copy_pages
from turbojax.cache.pages import read_pages as read_pages
from turbojax.cache.pages import write_pages as write_pages
from turbojax.cache.prefix import PrefixCache as PrefixCache
from turbojax.ops.paged_attention import paged_attention as paged_attention

init_cache = init_paged_cache
attention = paged_attention
