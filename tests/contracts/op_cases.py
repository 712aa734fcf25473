"""One call of every public op, of every cache and page format, and of a model's decode step.

What `test_export.py` and `test_debugging.py` try each of them with. Most are the calls that are
split over meshes; operands are ordinary ones: ragged lengths, empty sequences, padding.
"""

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax.numpy as jnp
from flax import nnx

import turbojax as tj
from tests.contracts import manual_cases
from tests.contracts.manual_cases import TOKENS, B, Built, H, K, N, lengths, normal, pages, prompt
from turbojax import caches as kv
from turbojax import models, paged, smoothing
from turbojax.caches import attend_new_tokens, attend_prompt
from turbojax.caches.latent.formats import LATENT_DTYPES
from turbojax.caches.paged.formats import FORMATS
from turbojax.numerics.config import PriorityMethod

CASES: dict[str, Callable[[], Built]] = dict(manual_cases.CASES)
"""By name: what makes a function and its arguments."""


def page_case(kv_dtype: str) -> Callable[[], Built]:
    return lambda: pages(kv_dtype)


def layer_case(kind: Any) -> Callable[[], Built]:
    """A ragged prompt and a new token through a layer's cache."""

    def call(cache: Any, query: Any, key: Any, value: Any, size: Any) -> Any:
        out, cache = attend_prompt(size)(query, key, value, cache)
        one, cache = attend_new_tokens()(query[:, :1], key[:, :1], value[:, :1], cache)
        return out, one, cache

    def build() -> Built:
        cache = kv.init_layer_cache(B, 48, K, H, kind=kind)
        return call, (cache, *prompt(), lengths())

    return build


CASES |= {f"pages of {name}": page_case(name) for name in FORMATS if name not in ("auto", "turbo4")}
CASES |= {f"layer of {name}": layer_case(name) for name in ("int8", "int4", "e4m3", "paged")}
CASES |= {f"layer of {name}": layer_case(kv.cache_by_name(name, K)) for name in ("kivi4", "gear4")}


def latent_page_case(kv_dtype: str) -> Callable[[], Built]:
    def call(
        cache: Any, query: Any, rope: Any, latent: Any, key: Any, tables: Any, size: Any
    ) -> Any:
        empty = jnp.zeros_like(size)
        cache = paged.append_latents(cache, latent, key, tables, empty, new_lengths=size)
        return cache, paged.latent_attention(query, rope, cache, tables, size, scale=0.1)

    def build() -> Built:
        queries = normal(0, B, 3, N, 64), normal(1, B, 3, N, 16)
        tokens = normal(2, B, TOKENS, 64), normal(3, B, TOKENS, 16)
        cache = tj.init_latent_pages(3 * B, 16, 64, 16, kv_dtype=kv_dtype)
        tables = jnp.arange(3 * B, dtype=jnp.int32).reshape(B, 3)
        return call, (cache, *queries, *tokens, tables, lengths())

    return build


CASES |= {f"latent pages of {name}": latent_page_case(name) for name in LATENT_DTYPES}


def smoothing_case() -> Built:
    """Statistics of keys, some of which are padding, and factors of all kinds."""

    def call(key: Any, mask: Any, weight: Any) -> Any:
        seen = smoothing.KeyStatistics.init(K, H).update(key, 2 * key, mask)
        norm = smoothing.rope_preserving_norm(seen.pair_norm)
        return (
            seen,
            norm,
            smoothing.channel_rope_scale(seen.absmax),
            smoothing.channel_absmean_scale(weight),
            smoothing.per_tensor_scale(weight),
        )

    mask = jnp.arange(TOKENS)[None] < lengths()[:, None]
    return call, (normal(0, B, TOKENS, K, H), mask, normal(1, 64, 48))


def heads_case() -> Built:
    def call(key: Any) -> Any:
        return [tj.head_priority(key, method) for method in get_args(PriorityMethod)]

    return call, (normal(0, B, TOKENS, K, H),)


CASES |= {"smoothing": smoothing_case, "priority of heads": heads_case}


@functools.cache
def decoder() -> models.Decoder:
    config = models.TransformerConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=64,
    )
    return models.unstack(models.Transformer(config, rngs=nnx.Rngs(0)))


def decode_step(decoder: Any, caches: Any, tokens: Any, lengths: Any) -> Any:
    """One token of every sequence through a model."""
    attend = attend_new_tokens()
    hidden, layers = decoder.hidden(tokens[:, None], lengths[:, None], attend, caches.layers)
    chosen = jnp.argmax(decoder.logits(hidden[:, 0]), axis=-1).astype(jnp.int32)
    return chosen, models.ModelCaches(layers), lengths + 1


def model_case() -> Built:
    config = tj.TurboConfig(block_q=16, block_kv=16, num_low_bit_key_heads=1)
    caches = models.init_caches(decoder(), B, 64, config)
    tokens = jnp.arange(B, dtype=jnp.int32)
    return decode_step, (decoder(), caches, tokens, jnp.zeros(B, jnp.int32))


CASES["a model's step"] = model_case
