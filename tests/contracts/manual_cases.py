"""Calls of every op and cache, and what shall split their arrays over the devices of a mesh.

An axis is known by its size: `B` sequences are split over a mesh's "data", and heads, `N` and `K`,
over its "model"; every other size is held whole. So a call of a device's own slices is a call with
the slices of these axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import turbojax as tj
from turbojax import fireq, k8v4, paged, polar
from turbojax.caches import exact as exact_attention
from turbojax.caches.exact import cache as exact
from turbojax.caches.paged import kind as kv_pages
from turbojax.caches.token_scaled import cache as kv4

B, K, N, H = 8, 4, 12, 32
TOKENS, PAGES = 40, 5
CONFIG = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)
STORED = tj.TurboConfig(block_q=16)
MIXED = tj.TurboConfig(block_q=16, num_low_bit_key_heads=1, num_low_bit_value_heads=1)
POOL = 7 * B
AXES = {B: "data", POOL: "data", K: "model", N: "model"}

Built = tuple[Callable[..., Any], tuple[Any, ...]]
CASES: dict[str, Callable[[], Built]] = {}
"""By name: what makes a function and its arguments, arrays of all devices."""


def spec_of(x: Any) -> P:
    """How an array is split."""
    return P(*(AXES.get(size) for size in x.shape))


def index_of(x: Any, at: dict[str, int], sizes: dict[str, int]) -> tuple[slice, ...]:
    """Which part of an array a device has.

    Args:
      x: of all devices.
      at: where in the mesh the device is.
      sizes: of the mesh.
    """

    def of(size: int, axis: str | None) -> slice:
        if axis is None:
            return slice(None)
        part = size // sizes[axis]
        return slice(at[axis] * part, (at[axis] + 1) * part)

    return tuple(of(*both) for both in zip(x.shape, spec_of(x), strict=True))


def case(build: Callable[[], Built]) -> Callable[[], Built]:
    """Registers a case under its function's name."""
    CASES[build.__name__.strip("_").replace("_", " ")] = build
    return build


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype)))


def lengths(least: int = 0, most: int = TOKENS) -> jax.Array:
    return jnp.asarray(np.linspace(least, most, B).astype(np.int32))


def prompt(
    tokens: int = TOKENS, heads: int = N, kv_heads: int = K, channels: int = H
) -> tuple[jax.Array, ...]:
    return tuple(
        normal(i, B, tokens, n, channels) for i, n in enumerate((heads, kv_heads, kv_heads))
    )


# Attention ---------------------------------------------------------------------------------------


@case
def _turbo() -> Built:
    def call(query: Any, key: Any, value: Any, size: Any, sinks: Any) -> Any:
        options = {"is_causal": True, "key_value_seq_lengths": size, "sinks": sinks}
        return tj.turbo_attention(query, key, value, config=CONFIG, return_residual=True, **options)

    return call, (*prompt(), lengths(), normal(9, N, dtype=jnp.float32))


@case
def _turbo_gradient() -> Built:
    """Of all that has one; slopes, sinks and a bias are the same on several devices."""

    def call(query: Any, key: Any, value: Any, slopes: Any, sinks: Any, bias: Any) -> Any:
        def attend(*x: Any) -> Any:
            query, key, value, slopes, sinks, bias = x
            modifiers = {"alibi_slopes": slopes, "sinks": sinks, "bias": bias}
            out = tj.turbo_attention(query, key, value, config=CONFIG, is_causal=True, **modifiers)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(attend, argnums=tuple(range(6)))(query, key, value, slopes, sinks, bias)

    rest = (normal(i, N, dtype=jnp.float32) for i in (8, 9))
    return call, (*prompt(), *rest, normal(7, 1, N, TOKENS, TOKENS, dtype=jnp.float32))


@case
def _float() -> Built:
    config = tj.TurboConfig(mode="float", block_q=16, block_kv=16, buffer_size=16)

    def call(*x: Any) -> Any:
        return tj.turbo_attention(*x, config=config, local_window_size=20, logits_soft_cap=3.0)

    return call, prompt()


@case
def _exact_prompt() -> Built:
    return exact_attention.attention, prompt()


@case
def _pooled() -> Built:
    def call(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        def attend(*x: Any) -> Any:
            *x, sinks = x
            sizes = {"block_q": 16, "block_kv": 16, "is_causal": True}
            levels = tj.select_levels(*x[:2], tj.levels.TopK(0.4, 0.7, 0.9, 1.0), **sizes)
            return tj.pooled_attention(*x, levels, sinks=sinks, return_residual=True, **sizes)

        (out, residual), pull = jax.vjp(attend, query, key, value, sinks)
        return out, residual, pull((jnp.ones_like(out), jnp.ones_like(residual)))

    return call, (*prompt(48), normal(9, N, dtype=jnp.float32))


@case
def _merged() -> Built:
    return tj.merge_attention, (normal(0, 2, B, 5, N, H), normal(1, 2, B, 5, N, dtype=jnp.float32))


# Caches ------------------------------------------------------------------------------------------


def progressive(cache: Any, query: Any, key: Any, value: Any, size: Any, sinks: Any) -> Any:
    """A prompt, a few tokens more, and queries of them."""
    prompt = {"key_value_seq_lengths": size, "sinks": sinks}
    out, cache = tj.prefill(query, key, value, cache, **prompt)
    cache = tj.append(cache, key[:, :3], value[:, :3], lengths=jnp.minimum(size, 3))
    one = {"return_residual": True, "sinks": sinks}
    return cache, out, tj.decode(query[:, :3], cache, **one), tj.dequantize(cache)


@case
def _progressive() -> Built:
    cache = tj.init_cache(B, 150, K, H, config=STORED)
    sinks = normal(9, N, dtype=jnp.float32)
    return progressive, (cache, *prompt(70), lengths(0, 70), sinks)


@case
def _progressive_of_two_bits() -> Built:
    """The cache is made inside, where a device ranks its own heads."""

    def call(*x: Any) -> Any:
        query, key = x[:2]
        cache = tj.init_cache(query.shape[0], 150, key.shape[2], H, config=MIXED)
        return progressive(cache, *x)[1:]

    return call, (*prompt(70), lengths(0, 70), normal(9, N, dtype=jnp.float32))


@case
def _exact_cache() -> Built:
    def call(cache: Any, query: Any, key: Any, value: Any, size: Any) -> Any:
        cache = exact.append(cache, key, value, lengths=size)
        out = tj.decode(query[:, :1], cache, local_window_size=9)
        return cache, out, tj.decode(query[:, :3], cache, logits_soft_cap=5.0)

    return call, (exact.init_cache(B, 50, K, H), *prompt(), lengths())


def token_scaled(module: Any) -> Built:
    def call(cache: Any, query: Any, key: Any, value: Any, size: Any) -> Any:
        out, cache = module.prefill(query, key, value, cache, key_value_seq_lengths=size)
        cache = module.append(cache, key[:, :1], value[:, :1])
        return out, cache, module.decode(query[:, :2], cache), kv4.dequantize(cache)

    return call, (module.init_cache(B, 50, K, H), *prompt(), lengths())


@case
def _kv4() -> Built:
    return token_scaled(fireq)


@case
def _k8v4() -> Built:
    return token_scaled(k8v4)


def tables() -> jax.Array:
    """Pages of a device's own pool: all devices have the same, whatever their number."""
    return jnp.asarray(np.arange(B * PAGES).reshape(B, PAGES) % (POOL // B), jnp.int32)


def pages(kv_dtype: str) -> Built:
    def call(cache: Any, query: Any, key: Any, value: Any, table: Any, size: Any) -> Any:
        # One sequence after the other: all of them have the same few pages.
        cache = paged.append(cache, key[:1], value[:1], table[:1], 0 * size[:1])
        out = tj.paged_attention(query, cache, table, size, return_residual=True)
        one = tj.paged_attention(query[:, :1], cache, table, size, query_offset=size // 2)
        arrays = cache.key, cache.value, cache.key_norm, cache.value_norm
        return *arrays, jnp.broadcast_to(cache.dropped_tokens, size.shape), out, one

    cache = tj.init_paged_cache(POOL, 16, K, H, kv_dtype=kv_dtype)
    return call, (cache, *prompt(), tables(), lengths())


@case
def _pages_of_codes() -> Built:
    return pages("turbo4")


@case
def _pages_as_they_are() -> Built:
    return pages("auto")


@case
def _window_of_pages() -> Built:
    """A prompt longer than what a layer keeps is taken in parts; the cache is made there, empty."""

    def call(query: Any, key: Any, value: Any, size: Any) -> Any:
        sizes = query.shape[0], 300, key.shape[2], H
        layer = kv_pages.init_layer(*sizes, kind="fp8_e4m3", page_size=16, local_window_size=9)
        given = {"key_value_seq_lengths": size, "local_window_size": (8, 0)}
        return tj.prefill(query, key, value, layer, **given)[0]

    return call, (*prompt(160), lengths(0, 160))


@case
def _latent() -> Built:
    def call(cache: Any, query: Any, rope: Any, latent: Any, key: Any, size: Any) -> Any:
        cache = tj.append_latents(cache, latent, key, lengths=size)
        return cache, tj.latent_attention(query, rope, cache, scale=0.1, return_residual=True)

    queries = normal(0, B, 3, N, 64), normal(1, B, 3, N, 16)
    tokens = normal(2, B, TOKENS, 64), normal(3, B, TOKENS, 16)
    return call, (tj.init_latent_cache(B, 128, 64, 16), *queries, *tokens, lengths())


# Products ----------------------------------------------------------------------------------------


@case
def _int4() -> Built:
    """A bias of all devices: its gradient is the sum of theirs."""
    weight = fireq.quantize_weight(normal(5, 256, 128))

    def call(x: Any, bias: Any) -> Any:
        def product(x: Any, bias: Any) -> Any:
            y = fireq.matmul(x, weight, bias=bias, activation="gelu")
            return y + fireq.matmul(x, weight, activations="bf16")

        out, pull = jax.vjp(product, x, bias)
        return out, pull(jnp.cos(out))

    return call, (normal(0, B, 5, 128), normal(1, 256, dtype=jnp.float32))


@case
def _int4_e4m3_gradient() -> Built:
    weight = fireq.quantize_weight(normal(5, 256, 128))

    def call(x: Any) -> Any:
        out, pull = jax.vjp(lambda x: fireq.matmul(x, weight, gradient="e4m3"), x)
        return out, pull(jnp.cos(out))

    return call, (normal(0, B, 5, 128),)


@case
def _experts() -> Built:
    """Routed, sorted, multiplied and summed, under `vmap`."""
    weight = fireq.quantize_experts(normal(5, 3, 128, 128))

    def one(x: Any, logits: Any, bias: Any) -> Any:
        chosen = fireq.route(logits, 2)
        order = fireq.dispatch(chosen.experts, 3)
        y = fireq.grouped_matmul(x[order.tokens], weight, order.group_sizes, bias=bias)
        return fireq.combine(y, order.places, chosen.weights)

    def call(x: Any, logits: Any, bias: Any) -> Any:
        def product(x: Any, bias: Any) -> Any:
            return jax.vmap(one, in_axes=(0, 0, None))(x, logits, bias)

        out, pull = jax.vjp(product, x, bias)
        return out, pull(jnp.cos(out))

    inputs = normal(0, B, 5, 128), normal(1, B, 5, 3, dtype=jnp.float32)
    return call, (*inputs, normal(2, 3, 128, dtype=jnp.float32))


@case
def _tokens() -> Built:
    def call(x: Any, scale: Any) -> Any:
        return fireq.quantize_activation(x), fireq.rms_norm_quantize(x, scale, eps=1e-5)

    return call, (normal(0, B, 5, 64), normal(1, 64))


@case
def _codecs() -> Built:
    rotation = polar.rotation(64, seed=0)

    def call(x: Any) -> Any:
        codes, norms = polar.encode(x, rotation)
        softmax = tj.sas_softmax(x.astype(jnp.float32))
        return codes, polar.decode(codes, norms, rotation), softmax

    return call, (normal(0, B, 5, N, 64),)


# Transforms --------------------------------------------------------------------------------------


@case
def _scan_over_layers() -> Built:
    """Caches of several layers in one array; what a layer gives is what the next one gets."""

    def call(caches: Any, query: Any, key: Any, value: Any) -> Any:
        def layer(query: Any, cache: Any) -> Any:
            cache = tj.append(cache, key, value)
            return query + tj.decode(query, cache), cache

        return jax.lax.scan(layer, query, caches)

    cache = tj.init_cache(B, 150, K, H, config=STORED)
    caches = jax.tree.map(lambda x: jnp.stack([x] * 2), cache)
    return call, (caches, *prompt(3))


@case
def _mapped() -> Built:
    """`vmap` of the gradient and of a cache's steps, along an axis of its own."""

    def one(query: Any, key: Any, value: Any, cache: Any) -> Any:
        def total(*x: Any) -> Any:
            out = tj.turbo_attention(*x, config=CONFIG, is_causal=True)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        cache = tj.append(cache, key[:, :20], value[:, :20])
        slopes = jax.grad(total, argnums=(0, 1, 2))(query, key, value)
        return slopes, cache, tj.decode(query[:, :1], cache)

    cache = tj.init_cache(B, 150, K, H, config=STORED)
    arrays = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (*prompt(), cache))
    return jax.vmap(one), arrays
