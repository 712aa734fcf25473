"""Paged KV caches: the pool of pages, its allocator, and attention over them.

`init_cache` makes the pool and `PageAllocator` hands out its pages; `append` writes tokens into
them and `attention` reads them.
"""

from turbojax.ops.latent_attention import paged_latent_attention as paged_latent_attention
from turbojax.ops.paged_attention import paged_attention as paged_attention
from turbojax.state.latent.pages import LatentPages as LatentPages
from turbojax.state.latent.pages import append_latents as append_latents
from turbojax.state.latent.pages import gather_latents as gather_latents
from turbojax.state.latent.pages import init_latent_pages as init_latent_pages
from turbojax.state.pages.allocator import PageAllocator as PageAllocator
from turbojax.state.pages.allocator import PageCopy as PageCopy
from turbojax.state.pages.allocator import PoolExhausted as PoolExhausted
from turbojax.state.pages.allocator import PoolStatistics as PoolStatistics
from turbojax.state.pages.pool import PagedCache as PagedCache
from turbojax.state.pages.pool import append as append
from turbojax.state.pages.pool import gather as gather
from turbojax.state.pages.pool import init_paged_cache as init_paged_cache
from turbojax.state.pages.prefix import PrefixCache as PrefixCache
from turbojax.state.pages.transfer import copy_pages as copy_pages
from turbojax.state.pages.transfer import read_pages as read_pages
from turbojax.state.pages.transfer import write_pages as write_pages

init_cache = init_paged_cache
attention = paged_attention
latent_attention = paged_latent_attention
