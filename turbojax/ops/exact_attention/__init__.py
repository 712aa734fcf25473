"""Exact attention within prompts and to an `ExactCache`, and that cache's own names."""

from turbojax.ops.exact_attention.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from turbojax.ops.exact_attention.api import attend as attend
from turbojax.ops.exact_attention.api import attend_cache as attend_cache
from turbojax.ops.exact_attention.api import attention as attention
from turbojax.ops.exact_attention.api import cudnn_unsupported as cudnn_unsupported
from turbojax.ops.exact_attention.api import decode as decode
from turbojax.ops.exact_attention.reference import masked_attention as masked_attention

# What `turbojax.baselines.exact` held, under one roof for one release more.
from turbojax.state.exact import ExactCache as ExactCache
from turbojax.state.exact import append as append
from turbojax.state.exact import init_cache as init_cache
