"""The KV cache of one attention layer, of any kind, and attention through it."""

from turbojax.attention.options import AttentionOptions as AttentionOptions
from turbojax.caches.attend import attend_new_tokens as attend_new_tokens
from turbojax.caches.attend import attend_prompt as attend_prompt
from turbojax.caches.base import Attend as Attend
from turbojax.caches.base import Kind as Kind
from turbojax.caches.base import LayerCache as LayerCache
from turbojax.caches.images import ImageBlocks as ImageBlocks
from turbojax.caches.images import image_attention as image_attention
from turbojax.caches.kinds import CACHE_NAMES as CACHE_NAMES
from turbojax.caches.kinds import LATENT_CACHE_NAMES as LATENT_CACHE_NAMES
from turbojax.caches.kinds import CacheKind as CacheKind
from turbojax.caches.kinds import cache_by_name as cache_by_name
from turbojax.caches.kinds import init_layer_cache as init_layer_cache
from turbojax.caches.kinds import kind_for as kind_for
from turbojax.caches.kinds import kind_of as kind_of
from turbojax.caches.kinds import window_to_keep as window_to_keep
from turbojax.caches.latent.kind import attend_latents as attend_latents
from turbojax.caches.latent.kind import holds_latents as holds_latents
from turbojax.caches.layered import FirstLayers as FirstLayers
from turbojax.caches.paged.kind import PagedLayer as PagedLayer
from turbojax.caches.pooled import POLICY_NAMES as POLICY_NAMES
from turbojax.caches.pooled import PooledAttention as PooledAttention
from turbojax.caches.pooled import pooled_by_name as pooled_by_name
from turbojax.caches.whole import causal_attention as causal_attention
from turbojax.caches.whole import padded_attention as padded_attention
