"""Paged KV caches: the pool of pages, its allocator, and attention over them.

`init_cache` makes the pool and `PageAllocator` hands out its pages; `append` writes tokens into
them and `attention` reads them; `append_and_attend` does both.
"""

from turbojax.caches.latent import paged_latent_attention as paged_latent_attention
from turbojax.caches.latent.pages import LatentPages as LatentPages
from turbojax.caches.latent.pages import append_latents as append_latents
from turbojax.caches.latent.pages import gather_latents as gather_latents
from turbojax.caches.latent.pages import init_latent_pages as init_latent_pages
from turbojax.caches.paged import paged_attention as paged_attention
from turbojax.caches.paged.allocator import PageAllocator as PageAllocator
from turbojax.caches.paged.allocator import PageCopy as PageCopy
from turbojax.caches.paged.allocator import PoolExhausted as PoolExhausted
from turbojax.caches.paged.allocator import PoolStatistics as PoolStatistics
from turbojax.caches.paged.decoding import append_and_attend as append_and_attend
from turbojax.caches.paged.pool import PagedCache as PagedCache
from turbojax.caches.paged.pool import append as append
from turbojax.caches.paged.pool import gather as gather
from turbojax.caches.paged.pool import init_paged_cache as init_paged_cache
from turbojax.caches.paged.prefix import PrefixCache as PrefixCache
from turbojax.caches.paged.transfer import copy_pages as copy_pages
from turbojax.caches.paged.transfer import read_pages as read_pages
from turbojax.caches.paged.transfer import write_pages as write_pages

init_cache = init_paged_cache
attention = paged_attention
latent_attention = paged_latent_attention
