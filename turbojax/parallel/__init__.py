"""Attention, caches and models over many devices."""

from turbojax.parallel.appending import append as append
from turbojax.parallel.appending import append_to_pages as append_to_pages
from turbojax.parallel.appending import store_prompt as store_prompt
from turbojax.parallel.decode import attend_cache as attend_cache
from turbojax.parallel.decode import attend_new_tokens as attend_new_tokens
from turbojax.parallel.decode import decode as decode
from turbojax.parallel.decode import paged_attention as paged_attention
from turbojax.sharding.axes import Axes as Axes
from turbojax.sharding.specs import partition_specs as partition_specs
from turbojax.sharding.specs import shardings as shardings
