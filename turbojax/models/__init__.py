"""Decoders in Flax nnx, its checkpoints, and the model shipped with turbojax."""

from turbojax import _moved
from turbojax.kv import CACHE_NAMES as CACHE_NAMES
from turbojax.kv import POLICY_NAMES as POLICY_NAMES
from turbojax.kv import Attend as Attend
from turbojax.kv import AttentionOptions as AttentionOptions
from turbojax.kv import CacheKind as CacheKind
from turbojax.kv import FirstLayers as FirstLayers
from turbojax.kv import PooledAttention as PooledAttention
from turbojax.kv import cache_by_name as cache_by_name
from turbojax.kv import causal_attention as causal_attention
from turbojax.kv import pooled_by_name as pooled_by_name
from turbojax.models.checkpoint.adapters import load_adapters as load_adapters
from turbojax.models.checkpoint.adapters import save_adapters as save_adapters
from turbojax.models.checkpoint.huggingface import BEGINNING_OF_FILE as BEGINNING_OF_FILE
from turbojax.models.checkpoint.huggingface import WEIGHTS_NAME as WEIGHTS_NAME
from turbojax.models.checkpoint.huggingface import checkpoint_folder as checkpoint_folder
from turbojax.models.checkpoint.huggingface import embedded_path as embedded_path
from turbojax.models.checkpoint.huggingface import held_out_modules as held_out_modules
from turbojax.models.checkpoint.huggingface import load as load
from turbojax.models.checkpoint.huggingface import load_decoder as load_decoder
from turbojax.models.checkpoint.huggingface import load_transformer as load_transformer
from turbojax.models.checkpoint.huggingface import open_decoder as open_decoder
from turbojax.models.checkpoint.huggingface import read_config as read_config
from turbojax.models.checkpoint.huggingface import save as save
from turbojax.models.checkpoint.huggingface import weight_files as weight_files
from turbojax.models.checkpoint.quantized import save_quantized as save_quantized
from turbojax.models.checkpoint.safetensors import BytesRead as BytesRead
from turbojax.models.checkpoint.safetensors import count_bytes_read as count_bytes_read
from turbojax.models.checkpoint.stored import StoredDecoder as StoredDecoder
from turbojax.models.config import TransformerConfig as TransformerConfig
from turbojax.models.decoder import Decoder as Decoder
from turbojax.models.decoder import unstack as unstack
from turbojax.models.engine import AsyncEngine as AsyncEngine
from turbojax.models.engine import Draft as Draft
from turbojax.models.engine import Engine as Engine
from turbojax.models.engine import EngineStatistics as EngineStatistics
from turbojax.models.engine import Event as Event
from turbojax.models.engine import Finished as Finished
from turbojax.models.engine import NewToken as NewToken
from turbojax.models.engine import NGram as NGram
from turbojax.models.engine import Replicas as Replicas
from turbojax.models.engine import Request as Request
from turbojax.models.engine import Result as Result
from turbojax.models.engine import TokenLogprobs as TokenLogprobs
from turbojax.models.engine import best_of as best_of
from turbojax.models.engine import replicate as replicate
from turbojax.models.evaluation import token_bits as token_bits
from turbojax.models.generation.caching import ModelCaches as ModelCaches
from turbojax.models.generation.caching import UncompressedEdges as UncompressedEdges
from turbojax.models.generation.caching import init_caches as init_caches
from turbojax.models.generation.constraints import AllowedTokens as AllowedTokens
from turbojax.models.generation.constraints import Constraint as Constraint
from turbojax.models.generation.constraints import ConstraintState as ConstraintState
from turbojax.models.generation.padding import align as align
from turbojax.models.generation.penalties import NO_PENALTIES as NO_PENALTIES
from turbojax.models.generation.penalties import Penalties as Penalties
from turbojax.models.generation.sampling import GREEDY as GREEDY
from turbojax.models.generation.sampling import Sampling as Sampling
from turbojax.models.generation.saving import load_cache as load_cache
from turbojax.models.generation.saving import load_session as load_session
from turbojax.models.generation.saving import save_cache as save_cache
from turbojax.models.generation.saving import save_session as save_session
from turbojax.models.generation.session import Session as Session
from turbojax.models.generation.session import generate as generate
from turbojax.models.generation.session import score as score
from turbojax.models.generation.session import start as start
from turbojax.models.generation.session import stream as stream
from turbojax.models.lora import Adapter as Adapter
from turbojax.models.lora import Adapters as Adapters
from turbojax.models.lora import init_adapters as init_adapters
from turbojax.models.lora import with_adapters as with_adapters
from turbojax.models.lora import without_adapters as without_adapters
from turbojax.models.quantize import quantize_model as quantize_model
from turbojax.models.quantized import QuantizedDecoder as QuantizedDecoder
from turbojax.models.quantized_layer import LINEARS as LINEARS
from turbojax.models.random_weights import random_decoder as random_decoder
from turbojax.models.random_weights import random_quantized_decoder as random_quantized_decoder
from turbojax.models.shapes import SHAPES as SHAPES
from turbojax.models.tensor_parallel.placing import shard as shard
from turbojax.models.tensor_parallel.specs import partition_specs as partition_specs
from turbojax.models.text.chat import chat_tokens as chat_tokens
from turbojax.models.text.chat import render_chat as render_chat
from turbojax.models.text.chat import render_template as render_template
from turbojax.models.text.tokenizer import ByteTokenizer as ByteTokenizer
from turbojax.models.text.tokenizer import JsonTokenizer as JsonTokenizer
from turbojax.models.text.tokenizer import NumberTokenizer as NumberTokenizer
from turbojax.models.text.tokenizer import Tokenizer as Tokenizer
from turbojax.models.text.tokenizer import load_tokenizer as load_tokenizer
from turbojax.models.transformer import Transformer as Transformer

__getattr__ = _moved.renamed(
    __name__,
    {
        "Llama": "turbojax.models.Transformer",
        "LlamaConfig": "turbojax.models.TransformerConfig",
        "load_llama": "turbojax.models.load_transformer",
    },
)
