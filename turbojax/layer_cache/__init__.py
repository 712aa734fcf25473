"""The KV cache of one attention layer, of any kind, and attention through it."""

from turbojax.layer_cache.attend import attend_new_tokens as attend_new_tokens
from turbojax.layer_cache.attend import attend_prompt as attend_prompt
from turbojax.layer_cache.attend import causal_attention as causal_attention
from turbojax.layer_cache.attend import padded_attention as padded_attention
from turbojax.layer_cache.kinds import CACHE_NAMES as CACHE_NAMES
from turbojax.layer_cache.kinds import CacheKind as CacheKind
from turbojax.layer_cache.kinds import LayerCache as LayerCache
from turbojax.layer_cache.kinds import cache_by_name as cache_by_name
from turbojax.layer_cache.kinds import init_layer_cache as init_layer_cache
from turbojax.layer_cache.options import Attend as Attend
from turbojax.layer_cache.options import AttentionOptions as AttentionOptions
from turbojax.layer_cache.paged import PagedLayer as PagedLayer
from turbojax.layer_cache.pooled import POLICY_NAMES as POLICY_NAMES
from turbojax.layer_cache.pooled import PooledAttention as PooledAttention
from turbojax.layer_cache.pooled import pooled_by_name as pooled_by_name
