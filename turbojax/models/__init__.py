"""A Llama-family decoder in Flax nnx, its checkpoints, and the model shipped with turbojax."""

from turbojax.models.caching import CACHE_NAMES as CACHE_NAMES
from turbojax.models.caching import CacheKind as CacheKind
from turbojax.models.caching import ModelCaches as ModelCaches
from turbojax.models.caching import cache_by_name as cache_by_name
from turbojax.models.caching import init_caches as init_caches
from turbojax.models.checkpoint import BEGINNING_OF_FILE as BEGINNING_OF_FILE
from turbojax.models.checkpoint import embedded_path as embedded_path
from turbojax.models.checkpoint import held_out_modules as held_out_modules
from turbojax.models.checkpoint import load as load
from turbojax.models.checkpoint import save as save
from turbojax.models.config import LlamaConfig as LlamaConfig
from turbojax.models.decoder import SHAPES as SHAPES
from turbojax.models.decoder import Decoder as Decoder
from turbojax.models.decoder import random_decoder as random_decoder
from turbojax.models.decoder import unstack as unstack
from turbojax.models.generation import Session as Session
from turbojax.models.generation import generate as generate
from turbojax.models.generation import score as score
from turbojax.models.generation import start as start
from turbojax.models.generation import stream as stream
from turbojax.models.llama import Attend as Attend
from turbojax.models.llama import Llama as Llama
from turbojax.models.llama import causal_attention as causal_attention
from turbojax.models.pooled import POLICY_NAMES as POLICY_NAMES
from turbojax.models.pooled import PooledAttention as PooledAttention
from turbojax.models.pooled import pooled_by_name as pooled_by_name
