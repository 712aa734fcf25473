"""One small call of every kernel, for `benchmarks.device.sanitize`.

Shapes are the smallest that reach every part of a kernel: more than one block, an odd end, a mask.
Operands are made by numpy, so that little else runs on the GPU.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plgpu_triton

import turbojax as tj
from pallas_kernels.mosaic.hopper.latent import kernel as latent_kernel
from pallas_kernels.mosaic.hopper.paged_prompt.expand import Codec
from pallas_kernels.triton import gradient_rows
from pallas_kernels.triton import quantize as stage1
from pallas_kernels.triton._common import WHOLE, parameters
from turbojax.caches.exact import cache as exact
from turbojax.caches.paged import paged_attention
from turbojax.caches.paged import pool as paged
from turbojax.caches.progressive.update import store_prompt
from turbojax.caches.token_scaled import cache as kv4
from turbojax.matmul.fp8_tokens import quantize_activation, rms_norm_quantize
from turbojax.matmul.grouped import grouped_matmul
from turbojax.matmul.int4.api import matmul
from turbojax.matmul.int4.codes import from_codes
from turbojax.matmul.int4.experts import quantize_experts
from turbojax.quantizers import Fp8Tokens, quantize_weight


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and the kernels in it."""

    kernels: tuple[str, ...]
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    needs: str | None = None


def _normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype)))


def _prompt(tokens: int = 150, dim: int = 64) -> tuple[jax.Array, ...]:
    return tuple(_normal(i, 1, tokens, heads, dim) for i, heads in enumerate((2, 1, 1)))


def _attention(implementation: str, mode: Any, dim: int = 64) -> Any:
    config = tj.TurboConfig.paper(mode=mode)
    call = functools.partial(
        tj.turbo_attention, config=config, is_causal=True, implementation=implementation
    )
    return call, _prompt(dim=dim)


def _gradient(mode: Any, gradient: Any, dim: int = 64) -> Any:
    config = tj.TurboConfig(mode=mode, gradient=gradient)

    def call(*arrays: jax.Array) -> Any:
        attend = functools.partial(tj.turbo_attention, config=config, is_causal=True)
        out, pull = jax.vjp(attend, *arrays)
        return pull(jnp.ones_like(out))

    return call, _prompt(dim=dim)


def _bias(rows: int) -> Any:
    """Attention with a bias, of keys that are no multiple of 4, and all its gradients."""
    config = tj.TurboConfig(mode="fp8", gradient="8bit")

    def call(*arrays: jax.Array) -> Any:
        options: dict[str, Any] = {"is_causal": True, "implementation": "mosaic_gpu"}

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> Any:
            return tj.turbo_attention(query, key, value, bias=bias, config=config, **options)

        out, pull = jax.vjp(attend, *arrays)
        return pull(jnp.ones_like(out))

    return call, (*_prompt(dim=128), _normal(3, 1, 2, rows, 150))


def _stage1() -> Any:
    """Keys in int8, values in e4m3, and rows of a gradient: by kernels for Triton."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        lengths = jnp.array([key.shape[1] - 3], jnp.int32)
        dtypes = {"key_dtype": jnp.int8, "value_dtype": jnp.float8_e4m3fn}
        codes = stage1.keys_and_values(key, value, lengths, block=64, **dtypes)
        residual = jnp.zeros(query.shape[:3], jnp.float32)
        rows = gradient_rows.prepare_rows(
            *(query, query, query, residual, residual, lengths),
            block=64,
            query_dtype=jnp.int8,
            gradient_dtype=jnp.float8_e4m3fn,
            tokens=256,
        )
        return codes, rows

    return call, _prompt()


def _write(implementation: Any) -> Any:
    def call(cache: Any, key: jax.Array, value: jax.Array, new: jax.Array) -> Any:
        lengths = jnp.array([150], jnp.int32)
        cache = store_prompt(cache, key, value, lengths, implementation=implementation)

        # 22 tokens are in the buffer: after ten more it is full, and becomes a block.
        def step(cache: Any, token: jax.Array) -> Any:
            return tj.append(cache, token, token, implementation=implementation), None

        return jax.lax.scan(step, cache, jnp.moveaxis(new, 1, 0)[:, :, None])[0]

    config = tj.TurboConfig(block_q=32, block_kv=32, buffer_size=32)
    cache = tj.init_cache(1, 200, 1, 64, config=config)
    return call, (cache, *_prompt()[1:], _normal(5, 1, 12, 1, 64))


def _two_widths(implementation: Any) -> Any:
    """Tokens of an empty cache, whose first full buffer ranks the heads."""

    def call(cache: Any, new: jax.Array) -> Any:
        def step(cache: Any, token: jax.Array) -> Any:
            return tj.append(cache, token, -token, implementation=implementation), None

        return jax.lax.scan(step, cache, jnp.moveaxis(new, 1, 0)[:, :, None])[0]

    config = tj.TurboConfig(
        num_low_bit_key_heads=2, num_low_bit_value_heads=1, block_kv=32, buffer_size=32
    )
    return call, (tj.init_cache(2, 200, 3, 64, config=config), _normal(5, 2, 34, 3, 64))


def _decode(implementation: str, capacity: int = 400, tokens: int = 1, **config: Any) -> Any:
    def call(cache: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        lengths = jnp.array([330], jnp.int32)
        cache = store_prompt(cache, key, value, lengths, implementation=implementation)
        return tj.decode(query, cache, implementation=implementation)

    arguments = (_normal(3, 1, tokens, 4, 64), *_prompt(330)[1:])
    cache = tj.init_cache(1, capacity, 1, 64, config=tj.TurboConfig(**config))
    return call, (cache, *arguments)


def _kv4(init: Callable[..., Any], implementation: str) -> Any:
    """Many tokens, then one."""
    name: Any = "xla" if implementation == "triton" else implementation

    def call(cache: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        for x in (key, value), (key[:, :1], value[:, :1]):
            cache = kv4.append(cache, *x, implementation=name)
        return tj.decode(query, cache, implementation=implementation)

    arguments = (_normal(3, 1, 1, 4, 64), *_prompt(330)[1:])
    return call, (init(1, 400, 1, 64), *arguments)


def _fp8_tokens(implementation: Any) -> Any:
    def call(x: jax.Array, scale: jax.Array) -> Any:
        chosen = {"implementation": implementation}
        return quantize_activation(x, **chosen), rms_norm_quantize(x, scale, eps=1e-5, **chosen)

    return call, (_normal(0, 5, 300), _normal(1, 300))


def _int4(
    implementation: str, tokens: int, outputs: int, inputs: int, scale_dtype: str = "e4m3"
) -> Any:
    def call(codes: jax.Array, scale: jax.Array, weight: Any, bias: jax.Array) -> Any:
        x = Fp8Tokens(codes, scale, np.dtype(jnp.bfloat16))
        return matmul(x, weight, bias=bias, activation="silu", implementation=implementation)

    codes = _normal(0, tokens, inputs, dtype=jnp.float8_e4m3fn)
    w = _normal(1, outputs, inputs, dtype=jnp.float32)
    weight = quantize_weight(w, scale_dtype=scale_dtype)
    bias = _normal(2, outputs, dtype=jnp.float32)
    return call, (codes, jnp.ones(tokens, jnp.bfloat16), weight, bias)


def _experts(implementation: str, sizes: tuple[int, ...], outputs: int, inputs: int) -> Any:
    """Three tokens are no expert's."""

    def call(codes: jax.Array, scale: jax.Array, weight: Any, bias: jax.Array) -> Any:
        x = Fp8Tokens(codes, scale, np.dtype(jnp.bfloat16))
        groups = jnp.array(sizes, jnp.int32)
        given: Any = {"bias": bias, "activation": "silu", "implementation": implementation}
        return grouped_matmul(x, weight, groups, **given)

    tokens, experts = sum(sizes) + 3, len(sizes)
    codes = _normal(0, tokens, inputs, dtype=jnp.float8_e4m3fn)
    weight = quantize_experts(_normal(1, experts, outputs, inputs, dtype=jnp.float32))
    bias = _normal(2, experts, outputs, dtype=jnp.float32)
    return call, (codes, jnp.ones(tokens, jnp.bfloat16), weight, bias)


def _unrounded(tokens: int, outputs: int, inputs: int) -> Any:
    """Codes with scales of 16 bits and zero points, times tokens in bfloat16."""
    codes = jax.random.randint(jax.random.key(1), (outputs, inputs), -8, 8, jnp.int8)
    groups = -(-inputs // 128)
    scales = jnp.abs(_normal(2, outputs, groups, dtype=jnp.float32)).astype(jnp.bfloat16)
    weight = from_codes(codes, scales, jnp.ones((outputs, groups), jnp.int8), group_size=128)

    def call(x: jax.Array, weight: Any) -> Any:
        return matmul(x, weight, activations="bf16", implementation="mosaic_gpu")

    return call, (_normal(0, tokens, inputs), weight)


def _int4_gradient(tokens: int, outputs: int, inputs: int) -> Any:
    def call(x: jax.Array, weight: Any, d_out: jax.Array) -> Any:
        options = {"gradient": "e4m3", "implementation": "mosaic_gpu"}
        return jax.vjp(functools.partial(matmul, weight=weight, **options), x)[1](d_out)

    weight = quantize_weight(_normal(1, outputs, inputs, dtype=jnp.float32))
    return call, (_normal(0, tokens, inputs), weight, _normal(2, tokens, outputs))


def _paged(implementation: str, kv_dtype: Any, width: int) -> Any:
    """Wide tables mean several parts and a merge; on Hopper very wide ones, whole parts."""

    def call(cache: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        tables = jnp.arange(width, dtype=jnp.int32)[None]
        start = jnp.zeros(1, jnp.int32)
        cache = paged.append(cache, key, value, tables, start, implementation=append)
        lengths = jnp.array([key.shape[1]], jnp.int32)
        return paged_attention(query, cache, tables, lengths, implementation=implementation)

    has_integers = any(side.has_norm for side in paged.FORMATS[kv_dtype])
    append: Any = implementation if has_integers or implementation == "mosaic_gpu" else "xla"
    scales = {"key_scale": 0.05, "value_scale": 0.05} if kv_dtype.startswith("fp8") else {}
    cache = paged.init_paged_cache(
        width, 16, 1, 64, kv_dtype=kv_dtype, dtype=jnp.bfloat16, **scales
    )
    tokens = 1100 if width > 64 else 100
    return call, (cache, _normal(3, 1, 2, 4, 64), *_prompt(tokens)[1:])


def _exact() -> Any:
    def call(cache: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        cache = exact.append(cache, key, value)
        return tj.decode(query, cache, local_window_size=(60, 0), implementation="mosaic_gpu")

    return call, (exact.init_cache(1, 333, 1, 64), _normal(3, 1, 2, 4, 64), *_prompt(330)[1:])


def _paged_append(kv_dtype: str, dim: int, tokens: int) -> Any:
    """Tokens across the ends of pages; one is past its table."""

    def call(cache: Any, key: jax.Array, value: jax.Array) -> Any:
        tables = jnp.array([[2, 0, 1, 3]], jnp.int32)
        start = jnp.array([64 - tokens + 1], jnp.int32)
        return paged.append(cache, key, value, tables, start, implementation="mosaic_gpu")

    cache = paged.init_paged_cache(4, 16, 1, dim, kv_dtype=kv_dtype, dtype=jnp.bfloat16)
    return call, (cache, *_prompt(tokens, dim)[1:])


def _paged_prompt(kv_dtype: str, queries: int) -> Any:
    """Many queries, to pages that must be read out, or not."""
    call, (cache, _, key, value) = _paged("mosaic_gpu", kv_dtype, 80)
    return call, (cache, _normal(3, 1, queries, 4, 64), key, value)


def _latent(kind: str) -> Any:
    """Six parts of a tile, and a few tokens, of two sequences, three queries each."""
    data, bits = _LATENTS[kind]
    latent = jnp.ones((24, 16, 512 * bits // 8), jnp.uint8)
    latent = latent if bits == 4 else _normal(0, 24, 16, 512, dtype=data)
    scale = None if bits == 16 else jnp.ones((24, 16), jnp.float32)
    codec = {16: None, 8: Codec(), 4: Codec(tuple(range(0, 128, 8)), 63.5, 0.01)}[bits]
    # One part would be written without `join`, and four or fewer joined by one warp.
    s = dataclasses.replace(latent_kernel.settings(0.1, 2, 3, 24, codec=codec), shortest=64)
    tables = jnp.arange(24, dtype=jnp.int32)[None].repeat(2, 0)
    lengths, real = jnp.array([330, 5], jnp.int32), jnp.array([3, 2], jnp.int32)
    query, rope = _normal(1, 2, 3, 24, 512), _normal(2, 2, 3, 24, 64)
    call = functools.partial(latent_kernel.attend, settings=s)
    return call, (query, rope, latent, scale, _normal(3, 24, 16, 64), tables, lengths, real)


def _pooled(implementation: str) -> Any:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, levels: jax.Array) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return tj.pooled_attention(
                q,
                k,
                v,
                levels,
                is_causal=True,
                block_q=128,
                block_kv=64,
                implementation=implementation,
            )

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    # Every level, and blocks that are skipped.
    levels = np.array([[1, 2, 0, 0, 0], [8, 4, 2, 1, 0], [4, 0, 8, 2, 1]], np.int8)
    return call, (*_prompt(270), jnp.asarray(levels)[None, None])


# Dtypes and bits of latents.
_LATENTS = {
    "bf16": (jnp.bfloat16, 16),
    "fp8": (jnp.float8_e4m3fn, 8),
    "turbo4": (jnp.uint8, 4),
}


def _case(kernels: str, build: Callable[..., Any], *arguments: Any) -> Case:
    names = tuple(f"turbojax_{name}" for name in kernels.split())
    return Case(names, functools.partial(build, *arguments))


_PAGED = "paged_hopper paged_merge_hopper"
_PROMPT = "paged_prompt_hopper paged_join_hopper"
_EXPANDED = f"paged_expand_hopper {_PROMPT}"
_PARTS = "paged_append paged_attention"
_GRADIENT = "gradient_rows_hopper query_gradient_hopper key_gradient_hopper"
_ATTENTION = "quantize_hopper attention_hopper"
_POOLED = (
    "pool_hopper pooled_attention_hopper pooled_query_gradient_hopper pooled_key_gradient_hopper"
)
_BIAS = "attention_hopper query_gradient_hopper key_gradient_hopper bias_gradient_hopper"

CASES = {
    # On Hopper what is quantized before attention is by its own kernels.
    "attention, int8": _case("attention", _attention, "triton", "int8"),
    "attention, int8_fp8": _case("attention", _attention, "triton", "int8_fp8"),
    "stage 1": _case("maxima quantize gradient_rows", _stage1),
    "attention, float": _case("attention", _attention, "triton", "float"),
    "cache, written": _case("compress append", _write, "triton"),
    "cache, written, Hopper": _case(
        "compress_hopper count_hopper append_hopper", _write, "mosaic_gpu"
    ),
    "cache, two widths": _case("rank append", _two_widths, "triton"),
    "cache, decode": _case("decode decode_merge", _decode, "triton"),
    "kv4, decode": _case("kv4_decode decode_merge", _kv4, kv4.init_cache, "triton"),
    "k8v4, decode": _case("kv4_decode decode_merge", _kv4, kv4.init_k8v4_cache, "triton"),
    "fp8 tokens": _case("fp8_tokens", _fp8_tokens, "triton"),
    "fp8 tokens, Hopper": _case("fp8_tokens_hopper", _fp8_tokens, "mosaic_gpu"),
    "int4, many tokens": _case("int4_matmul", _int4, "triton", 130, 136, 300),
    "int4, few tokens": _case("int4_matmul", _int4, "triton", 3, 136, 1024),
    "experts": _case("grouped_matmul", _experts, "triton", (3, 0, 20, 1), 136, 300),
    "paged, turbo4": _case(_PARTS, _paged, "triton", "turbo4", 20),
    "paged, turbo4, parts": _case(f"{_PARTS} paged_merge", _paged, "triton", "turbo4", 80),
    "paged, k8v4": _case(_PARTS, _paged, "triton", "k8v4", 20),
    "paged, 3 and 2 bits": _case(_PARTS, _paged, "triton", "turbo_k3v2", 20),
    "paged, int8": _case(_PARTS, _paged, "triton", "int8", 20),
    "paged, fp8": _case("paged_attention", _paged, "triton", "fp8_e4m3", 20),
    "paged, bf16": _case("paged_attention", _paged, "triton", "auto", 20),
    "pooled": _case(
        "pool pooled_forward pooled_query_gradient pooled_key_gradient", _pooled, "triton"
    ),
    "attention, jax-triton": Case(
        ("attention_kernel",),
        functools.partial(_attention, "jax_triton", "int8_fp8"),
        needs="jax_triton",
    ),
    "attention, int8, Hopper": _case(_ATTENTION, _attention, "mosaic_gpu", "int8"),
    "attention, int8_fp8, Hopper": _case(_ATTENTION, _attention, "mosaic_gpu", "int8_fp8"),
    "attention, in turns, Hopper": _case(
        "attention_hopper", _attention, "mosaic_gpu", "int8_fp8", 128
    ),
    "attention, in turns, 256 channels, Hopper": _case(
        "attention_hopper", _attention, "mosaic_gpu", "int8", 256
    ),
    "gradient, 8bit, Hopper": _case(f"maxima_hopper {_GRADIENT}", _gradient, "int8_fp8", "8bit"),
    "gradient, in turns, Hopper": _case(_GRADIENT, _gradient, "int8_fp8", "8bit", 128),
    "gradient, Hopper": _case(_GRADIENT, _gradient, "fp8", "float"),
    "bias, Hopper": _case(_BIAS, _bias, 150),
    "bias, one row, Hopper": _case(_BIAS, _bias, 1),
    "cache, decode, Hopper": _case("decode_hopper", _decode, "mosaic_gpu"),
    # So long that programs are too many to merge among themselves.
    "cache, decode, merged, Hopper": _case(
        "decode_hopper decode_merge_hopper", _decode, "mosaic_gpu", 20_000
    ),
    "cache, 4 tokens, Hopper": _case("decode_rows_hopper", _decode, "mosaic_gpu", 400, 4),
    "cache, 8 tokens, Hopper": _case("decode_rows_hopper", _decode, "mosaic_gpu", 400, 8),
    "int4, many tokens, Hopper": _case(
        "int4_expand_hopper fp8_matmul_hopper", _int4, "mosaic_gpu", 4100, 136, 300
    ),
    "int4, large tiles, Hopper": _case(
        "int4_matmul_many_hopper", _int4, "mosaic_gpu", 130, 136, 300
    ),
    "int4, tiles, Hopper": _case("int4_matmul_hopper", _int4, "mosaic_gpu", 100, 136, 300, "bf16"),
    "int4, few tokens, Hopper": _case("int4_few_hopper", _int4, "mosaic_gpu", 3, 136, 1024),
    "experts, Hopper": _case(
        "grouped_matmul_hopper", _experts, "mosaic_gpu", (3, 0, 20, 1), 136, 300
    ),
    "experts, four warpgroups, Hopper": _case(
        "grouped_matmul_hopper", _experts, "mosaic_gpu", (3, 0, 20, 1) * 30, 136, 300
    ),
    "int4, few unrounded tokens, Hopper": _case("w4a16_few_hopper", _unrounded, 3, 136, 300),
    "int4, unrounded tokens, Hopper": _case("w4a16_hopper", _unrounded, 130, 136, 300),
    "int4, gradient, Hopper": _case(
        "int4_expand_transposed_hopper fp8_matmul_hopper", _int4_gradient, 130, 136, 300
    ),
    "paged, turbo4, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "turbo4", 20),
    "paged, fp8, several steps, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "fp8_e4m3", 80),
    "paged, turbo4, parts, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "turbo4", 8400),
    "paged, k8v4, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "k8v4", 20),
    "paged, int8, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "int8", 20),
    "paged, int8 keys, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "int8_v4", 20),
    "paged, 3 and 2 bits, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "turbo_k3v2", 20),
    "kv4, Hopper": _case(f"kv4_append_hopper {_PAGED}", _kv4, kv4.init_cache, "mosaic_gpu"),
    "k8v4, Hopper": _case(f"kv4_append_hopper {_PAGED}", _kv4, kv4.init_k8v4_cache, "mosaic_gpu"),
    "paged, bf16, Hopper": _case(_PAGED, _paged, "mosaic_gpu", "auto", 80),
    "exact cache, window, Hopper": _case(_PAGED, _exact),
    **{
        f"paged append, {kind}, Hopper": _case(
            "paged_append_hopper", _paged_append, kind, dim, tokens
        )
        for kind, dim, tokens in (
            ("turbo_k3v4", 128, 37),
            ("k8v4", 64, 1),
            ("auto", 16, 5),
            ("int8", 128, 37),
            ("fp8_e5m2", 256, 3),
        )
    },
    "paged, prompt, bf16, Hopper": _case("paged_prompt_hopper", _paged_prompt, "auto", 260),
    "paged, prompt, fp8, parts, Hopper": _case(
        f"paged_turn_hopper {_PROMPT}", _paged_prompt, "fp8_e4m3", 40
    ),
    "paged, prompt, turbo4, parts, Hopper": _case(_EXPANDED, _paged_prompt, "turbo4", 40),
    "paged, prompt, 2 and 3 bits, Hopper": _case(_EXPANDED, _paged_prompt, "turbo_k2v3", 40),
    **{
        f"latent, {kind}, Hopper": _case("latent_hopper latent_join_hopper", _latent, kind)
        for kind in _LATENTS
    },
    "pooled, Hopper": _case(_POOLED, _pooled, "mosaic_gpu"),
}


# What must be found, or finding nothing means nothing ---------------------------------------------


def _out_of_bounds() -> Any:
    def kernel(x: Any, out: Any) -> None:
        at = jnp.arange(64, dtype=jnp.int32)
        # Far past its end: allocations may be larger than asked for.
        plgpu_triton.store(out.at[at + 2**24], plgpu_triton.load(x.at[at]))

    call = pl.pallas_call(
        kernel,
        in_specs=[WHOLE],
        out_specs=WHOLE,
        out_shape=jax.ShapeDtypeStruct((64,), jnp.float32),
        compiler_params=parameters(1, 1),
        name="turbojax_control",
    )
    return call, (_normal(0, 64, dtype=jnp.float32),)


def _race() -> Any:
    """Two warpgroups write the same words and read what they find, and no barrier between."""

    def kernel(x: Any, out: Any, shared: Any) -> None:
        me = jax.lax.axis_index("warpgroup")
        shared[...] = x[...] * (me + 1).astype(jnp.float32)
        out[me] = shared[...]

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="turbojax_control_hopper",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return call, (_normal(0, 128, dtype=jnp.float32),)


CONTROLS = {
    "control, out of bounds": ("memcheck", _case("control", _out_of_bounds)),
    "control, a race": ("racecheck", _case("control_hopper", _race)),
}
