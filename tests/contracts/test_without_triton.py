"""What a Hopper GPU runs by default is not lowered to Triton by Pallas: jax has deprecated that.

Each call here is lowered for Hopper, with nothing chosen by name. `STILL` lists those in which
Pallas' Triton backend is left, and why; the list is exact, so a call that no longer needs it has to
be taken off. `docs/kernels.md` says what these calls become on a jax without that backend.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import _device, fireq, k8v4, models, paged
from turbojax.attention import cudnn
from turbojax.caches.token_scaled import cache as kv4
from turbojax.models.engine import programs, step
from turbojax.quantizers import quantize_weight

TRITON = "custom_call @__gpu$xla.gpu.triton"
CASES = {}


def shape(*size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(size, dtype)


def abstract(make, *arguments, **options):
    """The shapes of what a function makes."""
    return jax.eval_shape(functools.partial(make, *arguments, **options))


# Within whole sequences ---------------------------------------------------------------------------


def attention(differentiates=False, tokens=16384, head_dim=128, dtype=jnp.bfloat16, **config):
    config = tj.TurboConfig(**config)
    attend = functools.partial(tj.turbo_attention, config=config, is_causal=True)
    operands = [shape(1, tokens, heads, head_dim, dtype=dtype) for heads in (8, 2, 2)]
    return (differentiated(attend) if differentiates else attend), operands


def differentiated(attend):
    def run(*operands):
        out, pull = jax.vjp(attend, *operands)
        return pull(jnp.ones_like(out))

    return run


def pooled(gradient=False, head_dim=128, dtype=jnp.bfloat16, block_q=128):
    operands = [shape(1, 512, heads, head_dim, dtype=dtype) for heads in (2, 1, 1)]
    levels = jnp.ones((1, 1, 512 // block_q, 4), jnp.int8)
    attend = functools.partial(tj.pooled_attention, levels=levels, block_q=block_q)
    return (differentiated(attend) if gradient else attend), operands


gradient = functools.partial(attention, differentiates=True)
for mode in ("fp8", "int8_fp8", "int8"):
    CASES[f"attention, {mode}"] = functools.partial(attention, mode=mode)
    CASES[f"attention, gradient, {mode}"] = functools.partial(gradient, mode=mode)
    CASES[f"attention, 8-bit gradient, {mode}"] = functools.partial(
        gradient, mode=mode, gradient="8bit"
    )
CASES |= {
    "attention, paper's": functools.partial(attention, mode="int8", softmax=tj.SAS()),
    "attention, 256 channels": functools.partial(attention, head_dim=256),
    "attention, 80 channels": functools.partial(attention, head_dim=80),
    "attention, float32": functools.partial(attention, dtype=jnp.float32),
    "attention, float": functools.partial(attention, mode="float"),
    "attention, float, float32": functools.partial(attention, mode="float", dtype=jnp.float32),
    "attention, gradient, float": functools.partial(gradient, mode="float"),
    "attention, 320 channels": functools.partial(attention, head_dim=320),
    "attention, blocks of 32": functools.partial(
        attention, block_q=32, block_kv=32, buffer_size=32
    ),
    "pooled": pooled,
    "pooled, gradient": functools.partial(pooled, gradient=True),
    "pooled, 80 channels": functools.partial(pooled, head_dim=80),
    "pooled, 192 channels": functools.partial(pooled, head_dim=192),
    "pooled, float32": functools.partial(pooled, dtype=jnp.float32),
    "pooled, gradient, float32": functools.partial(pooled, gradient=True, dtype=jnp.float32),
    "pooled, blocks of 64 queries": functools.partial(pooled, block_q=64),
}


# Compressed caches --------------------------------------------------------------------------------


def cache_call(call, tokens, heads=8, batch=2, capacity=1024, head_dim=128, **config):
    cache = abstract(tj.init_cache, batch, capacity, 2, head_dim, config=tj.TurboConfig(**config))
    operands = [shape(batch, tokens, n, head_dim) for n in (heads, 2, 2)]
    return functools.partial(call), (cache, *operands)


def prefill(cache, query, key, value):
    return tj.prefill(query, key, value, cache)


def append(cache, query, key, value):
    return tj.append(cache, key, value)


def decode(cache, query, key, value):
    return tj.decode(query, cache)


CASES |= {
    "cache, prefill": functools.partial(cache_call, prefill, 600),
    "cache, append": functools.partial(cache_call, append, 1),
    "cache, append, several": functools.partial(cache_call, append, 100),
    "cache, decode": functools.partial(cache_call, decode, 1),
    "cache, decode, long": functools.partial(cache_call, decode, 1, capacity=32768),
    "cache, decode, mixed": functools.partial(
        cache_call, decode, 1, num_low_bit_key_heads=1, num_low_bit_value_heads=1
    ),
    "cache, decode, 3 bits": functools.partial(cache_call, decode, 1, key_bits=3),
    "cache, decode, 80 channels": functools.partial(cache_call, decode, 1, head_dim=80),
    "cache, decode, float": functools.partial(cache_call, decode, 1, mode="float"),
}


def fireq_call(init, call, tokens, head_dim=128):
    cache = abstract(init, 2, 1024, 2, head_dim)
    return call, (cache, *[shape(2, tokens, heads, head_dim) for heads in (8, 2, 2)])


def kv4_append(cache, query, key, value):
    return kv4.append(cache, key, value)


def kv4_decode(cache, query, key, value):
    return fireq.decode(query, cache)


def kv4_prefill(cache, query, key, value):
    return fireq.prefill(query, key, value, cache)


for name, init in (("kv4", kv4.init_cache), ("k8v4", k8v4.init_cache)):
    CASES[f"{name}, append"] = functools.partial(fireq_call, init, kv4_append, 1)
    CASES[f"{name}, decode"] = functools.partial(fireq_call, init, kv4_decode, 1)
    CASES[f"{name}, prefill"] = functools.partial(fireq_call, init, kv4_prefill, 600)


# Pages --------------------------------------------------------------------------------------------


def pages(call, kv_dtype, tokens, head_dim=128, dtype=jnp.bfloat16):
    cache = abstract(tj.init_paged_cache, 64, 64, 2, head_dim, kv_dtype=kv_dtype, dtype=dtype)
    operands = [shape(2, tokens, n, head_dim, dtype=dtype) for n in (8, 2, 2)]
    tables, lengths = shape(2, 20, dtype=jnp.int32), shape(2, dtype=jnp.int32)
    return call, (cache, *operands, tables, lengths)


def paged_append(cache, query, key, value, tables, lengths):
    return paged.append(cache, key, value, tables, lengths)


def paged_attention(cache, query, key, value, tables, lengths):
    return tj.paged_attention(query, cache, tables, lengths)


PAGES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8", "turbo4", "k8v4", "int8_v4", "turbo_k3v2")
for kind in PAGES:
    CASES[f"pages, append, {kind}"] = functools.partial(pages, paged_append, kind, 5)
    CASES[f"pages, attention, {kind}"] = functools.partial(pages, paged_attention, kind, 1)
    CASES[f"pages, prompt, {kind}"] = functools.partial(pages, paged_attention, kind, 512)
CASES |= {
    "pages, append, 80 channels": functools.partial(pages, paged_append, "turbo4", 5, 80),
    "pages, attention, 80 channels": functools.partial(pages, paged_attention, "turbo4", 1, 80),
    "pages, attention, float32": functools.partial(
        pages, paged_attention, "turbo4", 1, dtype=jnp.float32
    ),
}


# Layers and models --------------------------------------------------------------------------------


def matmul(tokens, outputs=512, inputs=1024, dtype=jnp.bfloat16, **options):
    weight = jax.eval_shape(quantize_weight, shape(outputs, inputs, dtype=jnp.float32))
    return functools.partial(fireq.matmul, **options), (shape(tokens, inputs, dtype=dtype), weight)


def norm():
    call = functools.partial(fireq.rms_norm_quantize, eps=1e-5)
    return call, (shape(16, 4096), shape(4096))


CASES |= {
    "matmul, one token": functools.partial(matmul, 1),
    "matmul, 128 tokens": functools.partial(matmul, 128),
    "matmul, 3000 tokens": functools.partial(matmul, 3000),
    "matmul, odd sizes": functools.partial(matmul, 5, outputs=100, inputs=300),
    "matmul, float32": functools.partial(matmul, 5, dtype=jnp.float32),
    "tokens to e4m3": lambda: (fireq.quantize_activation, (shape(16, 4096),)),
    "tokens to e4m3, odd": lambda: (fireq.quantize_activation, (shape(3, 301),)),
    "tokens to e4m3, normalized": norm,
}


def engine_step(kv_dtype="turbo4"):
    decoder = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), models.unstack(models.load()))
    config = decoder.config
    cache = abstract(
        tj.init_paged_cache, 64, 16, config.num_kv_heads, config.head_dim, kv_dtype=kv_dtype
    )
    caches = (cache,) * config.num_layers
    sizes = {"kinds": {kv_dtype}, "is_dense": False}
    [program] = programs.prompt_programs(4, 32, 256, **sizes)
    slots = jax.eval_shape(lambda: step.new_state(1, 4, 16, 256))
    run = functools.partial(
        step.run_step.__wrapped__, program=program, implementation=None, windows=(None,)
    )
    return run, (decoder, caches, slots, step.idle_work(program, 4).packed())


CASES["engine, a step of the embedded model"] = engine_step


# What is left, and why. A reason that names a kernel is of work to do.
_FLOAT32 = "float32 operands: matrix instructions of Hopper have at most 16 bits"
_SHAPES = "a head dim or block that no matrix instruction is made for"
STILL = {
    "attention, blocks of 32": _SHAPES,
    "attention, float, float32": _FLOAT32,
    "pooled, float32": _FLOAT32,
    "pooled, gradient, float32": _FLOAT32,
    "pooled, 192 channels": _SHAPES,
    "pooled, blocks of 64 queries": _SHAPES,
    "cache, decode, 80 channels": _SHAPES,
    "cache, decode, float": "mode 'float' decodes in unrounded numbers",
    "matmul, float32": _FLOAT32,
    "attention, gradient, float": "exact attention that is differentiated is no call of cuDNN",
}


def lowered(monkeypatch, name):
    """The text of a call's program for Hopper."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    # cuDNN is chosen where Hopper has it; here it is not, so that jax's own attention stands in.
    exact = functools.partial(cudnn.dot_product_attention, implementation="xla")
    monkeypatch.setattr(cudnn, "missing", lambda: None)
    monkeypatch.setattr(
        cudnn, "dot_product_attention", lambda *x, implementation, **options: exact(*x, **options)
    )
    call, operands = CASES[name]()
    return lower_for_cuda(call, *operands)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", CASES)
def test_what_hopper_runs_needs_no_triton(monkeypatch, name):
    needed = TRITON in lowered(monkeypatch, name)
    if name in STILL:
        assert needed, f"{name!r} no longer needs Triton: take it off `STILL` ({STILL[name]})"
    else:
        assert not needed, f"{name!r} is lowered to Triton"


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", STILL)
def test_without_the_backend_it_is_plain_jax(monkeypatch, name):
    """Nothing is refused on a jax that no longer has it."""
    jax.clear_caches()
    monkeypatch.setattr(_device, "has_pallas_triton", lambda: False)
    assert TRITON not in lowered(monkeypatch, name)
    jax.clear_caches()


def test_the_list_names_cases():
    assert set(STILL) <= set(CASES)
