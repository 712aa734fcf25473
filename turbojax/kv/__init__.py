"""The KV cache of one attention layer, of any kind, and attention through it."""

from turbojax.kv.attend import attend_new_tokens as attend_new_tokens
from turbojax.kv.attend import attend_prompt as attend_prompt
from turbojax.kv.base import Attend as Attend
from turbojax.kv.base import Kind as Kind
from turbojax.kv.base import LayerCache as LayerCache
from turbojax.kv.images import ImageBlocks as ImageBlocks
from turbojax.kv.images import image_attention as image_attention
from turbojax.kv.kinds import CACHE_NAMES as CACHE_NAMES
from turbojax.kv.kinds import LATENT_CACHE_NAMES as LATENT_CACHE_NAMES
from turbojax.kv.kinds import CacheKind as CacheKind
from turbojax.kv.kinds import cache_by_name as cache_by_name
from turbojax.kv.kinds import init_layer_cache as init_layer_cache
from turbojax.kv.kinds import kind_for as kind_for
from turbojax.kv.kinds import kind_of as kind_of
from turbojax.kv.kinds import window_to_keep as window_to_keep
from turbojax.kv.latent import attend_latents as attend_latents
from turbojax.kv.latent import holds_latents as holds_latents
from turbojax.kv.layered import FirstLayers as FirstLayers
from turbojax.kv.pages import PagedLayer as PagedLayer
from turbojax.kv.pooled import POLICY_NAMES as POLICY_NAMES
from turbojax.kv.pooled import PooledAttention as PooledAttention
from turbojax.kv.pooled import pooled_by_name as pooled_by_name
from turbojax.kv.whole import causal_attention as causal_attention
from turbojax.kv.whole import padded_attention as padded_attention
from turbojax.ops.options import AttentionOptions as AttentionOptions
