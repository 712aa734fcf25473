"""Attention to the pages of a `PagedCache`."""

from turbojax.ops.paged_attention.api import attend_pages as attend_pages
from turbojax.ops.paged_attention.api import paged_attention as paged_attention
from turbojax.ops.paged_attention.api import select as select
