"""Attention, caches and models over many devices."""

from turbojax.parallel.appending import append as append
from turbojax.parallel.appending import append_to_pages as append_to_pages
from turbojax.parallel.appending import store_prompt as store_prompt
from turbojax.parallel.context import ring_attention as ring_attention
from turbojax.parallel.context import ring_pooled_attention as ring_pooled_attention
from turbojax.parallel.decode import attend_cache as attend_cache
from turbojax.parallel.decode import attend_new_tokens as attend_new_tokens
from turbojax.parallel.decode import decode as decode
from turbojax.parallel.decode import paged_attention as paged_attention
from turbojax.parallel.heads import heads_attention as heads_attention
from turbojax.parallel.layers import ContextAttention as ContextAttention
from turbojax.parallel.processes import Processes as Processes
from turbojax.parallel.processes import start as start
from turbojax.parallel.splitting import split as split
from turbojax.parallel.zigzag import from_zigzag as from_zigzag
from turbojax.parallel.zigzag import permutation as permutation
from turbojax.parallel.zigzag import positions as positions
from turbojax.parallel.zigzag import to_zigzag as to_zigzag
from turbojax.sharding.axes import Axes as Axes
from turbojax.sharding.meshes import mesh_of as mesh_of
from turbojax.sharding.specs import partition_specs as partition_specs
from turbojax.sharding.specs import shardings as shardings
from turbojax.sharding.varying import as_carried as as_carried
from turbojax.sharding.varying import varying_like as varying_like
