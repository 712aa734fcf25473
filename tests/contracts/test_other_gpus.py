"""Mosaic's kernels on GPUs that are no Hopper: where they lower, what they say, what they need."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from benchmarks.device import registers
from benchmarks.device.sanitizer_cases import CASES
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.caches.paged import mosaic_gpu as paged
from turbojax.caches.progressive import decode_mosaic as mosaic_decode

# One case of each kernel without products of warpgroups, and the GPUs that it is offered on.
LOWERED = {
    "cache, decode, merged, Hopper": ("8.0", "8.9", "10.0"),
    "cache, 8 tokens, Hopper": ("8.0", "8.9", "10.0"),
    "paged, turbo4, Hopper": ("8.0", "8.9", "10.0"),
    "paged, bf16, Hopper": ("8.0", "8.9", "10.0"),
    "exact cache, window, Hopper": ("8.0", "8.9", "10.0"),
    "k8v4, Hopper": ("8.9", "10.0"),
}


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, capability) for name, found in LOWERED.items() for capability in found],
)
def test_lowers(name, capability):
    call, arguments = CASES[name].build()
    with registers.lowering_for(capability):
        lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("capability", [8.0, 8.9, 10.0])
def test_default_launches_fit_the_shared_memory(monkeypatch, capability):
    """Whatever decode takes there; what it does not take, it names."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    refused = set()
    sizes = itertools.product((64, 128, 256), (4, 2), (64, 128), (1, 8, 32), (1, 32))
    for head_dim, bits, block, tokens, batch in sizes:
        config = tj.TurboConfig(key_bits=bits, value_bits=bits, block_kv=block, buffer_size=block)
        cache = jax.eval_shape(
            lambda config=config, sizes=(batch, 4096, 2, head_dim): tj.init_cache(
                *sizes, config=config
            )
        )
        query = jax.ShapeDtypeStruct((batch, tokens, 2, head_dim), jnp.bfloat16)
        refusal = mosaic_decode.decode_unsupported(
            query=query, cache=cache, options=Options(True, scale=1.0)
        )
        if refusal is not None:
            assert refusal.endswith(f"must be at most {_device.shared_memory()}"), refusal
            refused.add((head_dim, bits, block, tokens))
        assert mosaic_decode.default_launch(query, cache).cluster == 1 or capability >= 9
    # A block of so many channels is more than an Ada holds for each of four warps.
    of_one = {x[:3] for x in refused if x[3] == 1}
    assert of_one == ({(256, 4, 128)} if capability == 8.9 else set())
    assert capability == 8.9 or not refused


@pytest.mark.parametrize("capability", [8.0, 8.9, 9.0, 10.0])
@pytest.mark.parametrize("kv_dtype", ["turbo4", "fp8_e4m3", "int8", "k8v4", "turbo_k3v4", "auto"])
def test_pages_fit_the_shared_memory(monkeypatch, capability, kv_dtype):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    for head_dim, tokens, batch in itertools.product((64, 128, 256), (1, 8), (1, 32)):
        cache = jax.eval_shape(
            lambda head_dim=head_dim: tj.init_paged_cache(512, 16, 2, head_dim, kv_dtype=kv_dtype)
        )
        query = jax.ShapeDtypeStruct((batch, tokens, 4, head_dim), jnp.bfloat16)
        tables = jax.ShapeDtypeStruct((batch, 256), jnp.int32)
        options = Options(True, scale=1.0)
        arguments = {"query": query, "cache": cache, "block_tables": tables, "options": options}
        refusal = paged.unsupported(**arguments)
        if capability == 8.0 and kv_dtype in ("fp8_e4m3", "k8v4"):
            assert refusal == "needs compute capability 8.9 for 8-bit floats"
            continue
        assert refusal is None
        launch = paged.default_launch(paged.call_of(query, cache, tables, options))
        s = paged.fitting(paged.settings_of(query, cache, options, launch), head_dim)
        assert s.copies_words == (capability < 9)
        assert s.warps * s.warp_bytes(head_dim) <= _device.shared_memory()
