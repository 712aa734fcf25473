"""Attention to the pages of a `PagedCache`."""

from turbojax.caches.paged.api import attend as attend
from turbojax.caches.paged.api import paged_attention as paged_attention
from turbojax.caches.paged.api import select as select
from turbojax.caches.paged.decoding import append_and_attend as append_and_attend
from turbojax.caches.paged.decoding import store_and_attend as store_and_attend
