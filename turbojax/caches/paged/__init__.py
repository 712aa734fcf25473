"""Attention to the pages of a `PagedCache`."""

from turbojax.caches.paged.api import attend_pages as attend_pages
from turbojax.caches.paged.api import paged_attention as paged_attention
from turbojax.caches.paged.api import select as select
