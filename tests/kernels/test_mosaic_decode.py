"""The decode kernel for Hopper, on a CPU: what it refuses, how it is launched, that it lowers."""

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from benchmarks.shapes import MODELS
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.caches.progressive import decode_mosaic as mosaic_decode


def abstract_cache(config=tj.TurboConfig(), *, batch=2, length=1024, kv_heads=2, head_dim=128):
    return jax.eval_shape(lambda: tj.init_cache(batch, length, kv_heads, head_dim, config=config))


CAUSAL = Options(True, scale=0.1)


def abstract_query(cache, *, tokens=1, group=4, dtype=jnp.bfloat16):
    shape = (cache.batch_size, tokens, cache.num_kv_heads * group, cache.head_dim)
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(query, cache, *, options=CAUSAL, launch=None):
    def run(query, cache, lengths):
        return mosaic_decode.decode(
            query,
            cache,
            lengths,
            options=options,
            launch=launch,
        )

    lengths = jax.ShapeDtypeStruct((cache.batch_size,), jnp.int32)
    return lower_for_cuda(run, query, cache, lengths)


LOWERED = pairwise(
    queries=[(4, 1), (16, 8), (5, 1), (1, 1), (16, 1), (4, 8)],
    bits=[(4, 2), (2, 2), (4, 4), (2, 4), (3, 3), (3, 4)],
    head_dim=[128, 64, 256, 192],
    softmax=[tj.SAS(), "exact", tj.SAS(base="2")],
    dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
)[::2]


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(("queries", "bits", "head_dim", "softmax", "dtype"), LOWERED)
def test_it_lowers(queries, bits, head_dim, softmax, dtype):
    """Every width, softmax, head dim, dtype and number of queries."""
    config = tj.TurboConfig(key_bits=bits[0], value_bits=bits[1], softmax=softmax)
    cache = abstract_cache(config, head_dim=head_dim)
    query = abstract_query(cache, group=queries[0], tokens=queries[1], dtype=dtype)
    assert "mosaic_gpu" in lower(query, cache)


@pytest.mark.slow
def test_it_lowers_with_window_cap_mixed_widths_and_long_blocks():
    config = tj.TurboConfig(
        num_low_bit_key_heads=1, num_low_bit_value_heads=1, block_kv=128, buffer_size=128,
        low_bits=3,
    )  # fmt: skip
    cache = abstract_cache(config, head_dim=256)
    text = lower(
        abstract_query(cache, tokens=3),
        cache,
        options=Options(True, (300, 0), scale=0.1, logits_soft_cap=30.0),
    )
    assert "mosaic_gpu" in text


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(("splits", "cluster"), [(3, 1), (8, 8), (1, 1), (3, 3), (8, 4)])
def test_only_clusters_apart_need_a_second_kernel(splits, cluster):
    cache = abstract_cache()
    launch = mosaic_decode.Launch(splits, warpgroups=2, stages=3, cluster=cluster)
    text = lower(abstract_query(cache), cache, launch=launch)
    assert ("turbojax_decode_merge_hopper" in text) == (splits > cluster)


@pytest.mark.parametrize(
    ("splits", "cluster", "words"),
    [(5, 2, "splits=5 must be a positive multiple"), (16, 16, "cluster=16 must be from 1 to 8")],
)
def test_a_launch_that_would_lose_blocks_is_refused(splits, cluster, words):
    cache = abstract_cache()
    launch = mosaic_decode.Launch(splits, warpgroups=1, stages=2, cluster=cluster)
    with pytest.raises(ValueError, match=words):
        lower(abstract_query(cache), cache, launch=launch)


def refusal(query, cache):
    return mosaic_decode.decode_unsupported(
        query=query,
        cache=cache,
        options=Options(True, scale=1.0),
    )


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_usual_head_dims_are_taken(hopper, name):
    heads = MODELS[name]
    cache = abstract_cache(kv_heads=heads.kv, head_dim=heads.dim)
    found = refusal(abstract_query(cache, group=heads.query // heads.kv), cache)
    assert (found is None) == (heads.dim % 32 == 0)


@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
def test_every_8_bit_mode_is_taken(hopper, mode):
    cache = abstract_cache(tj.TurboConfig(mode=mode))
    assert refusal(abstract_query(cache), cache) is None


@pytest.mark.parametrize(
    ("config", "head_dim", "tokens", "words"),
    [
        (
            tj.TurboConfig(mode="float"),
            128,
            1,
            "config.mode='float' must be an 8-bit mode: its products are of int8",
        ),
        (
            tj.TurboConfig(),
            80,
            1,
            "head_dim=80 must be a multiple of 32 up to 256 with key bits (4,)",
        ),
        (
            tj.TurboConfig(key_bits=3),
            96,
            1,
            "head_dim=96 must be a multiple of 64 up to 256 with key bits (3,)",
        ),
        (
            tj.TurboConfig(block_kv=16),
            128,
            1,
            "block_kv=16 must be one of (32, 64, 128) with codes of 4 bits",
        ),
        (
            tj.TurboConfig(block_kv=32, value_bits=2),
            128,
            1,
            "block_kv=32 must be one of (64, 128) with codes of 2 bits",
        ),
        (
            tj.TurboConfig(),
            128,
            64,
            "64 query tokens must be at most 63 with config.num_first_tokens=1; "
            "TurboConfig(first_tokens=0) takes any",
        ),
        (tj.TurboConfig(), 128, 33, "132 queries of a KV head must be at most 128"),
    ],
)
def test_refusals_name_value_and_requirement(hopper, config, head_dim, tokens, words):
    cache = abstract_cache(config, head_dim=head_dim)
    assert refusal(abstract_query(cache, tokens=tokens), cache) == words


def test_windows_are_taken_of_caches_without_first_tokens(hopper):
    options = Options(True, scale=1.0, window=(9, 0))
    for config, is_taken in ((tj.TurboConfig(), False), (tj.TurboConfig(first_tokens=0), True)):
        cache = abstract_cache(config)
        found = mosaic_decode.decode_unsupported(
            query=abstract_query(cache), cache=cache, options=options
        )
        assert found is None if is_taken else "window=(9, 0) must be None" in found


@pytest.mark.parametrize("capability", [7.5, 8.6, 10.3, 12.0])
def test_only_what_it_is_compiled_for_is_taken(monkeypatch, capability):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    cache = abstract_cache()
    words = refusal(abstract_query(cache), cache)
    assert "needs an NVIDIA GPU of compute capability 8.0, 8.9, 9.0 or 10.0" in words
    assert f"has {capability}" in words


@pytest.mark.parametrize(
    ("batch", "length", "splits"),
    [(1, 1024, 4), (1, 4096, 16), (16, 1024, 1), (16, 32768, 4), (64, 4096, 1), (1, 131072, 32)],
)
def test_short_caches_fill_the_gpu_and_long_ones_are_cut_evenly(batch, length, splits):
    cache = abstract_cache(batch=batch, length=length, kv_heads=8)
    launch = mosaic_decode.default_launch(abstract_query(cache), cache)
    assert launch.splits == splits
    assert launch.cluster == (4 if (batch, length) == (1, 1024) else 1)


FITTING = [
    (dim, block, bits)
    for dim in (32, 64, 96, 128, 160, 192, 256)
    for block in (32, 64, 128)
    for bits in (2, 3, 4)
    if bits == 4 or (block > 32 and dim % 64 == 0)
]


@pytest.mark.parametrize(("head_dim", "block", "bits"), FITTING)
@pytest.mark.parametrize("batch", [1, 64])
def test_blocks_in_flight_and_results_fit_shared_memory(head_dim, block, bits, batch):
    from pallas_kernels.mosaic.hopper.decode.kernel import stage_bytes

    config = tj.TurboConfig(key_bits=bits, value_bits=bits, block_kv=block, buffer_size=block)
    cache = abstract_cache(config, batch=batch, length=32768, head_dim=head_dim)
    launch = mosaic_decode.default_launch(abstract_query(cache, group=8), cache)
    stage = stage_bytes(head_dim, block, (bits,), (bits,))
    assert 4 * launch.warpgroups * launch.stages * stage <= 227 * 1024
    # A warp leaves 8 queries' results where its blocks were.
    assert 8 * (head_dim + 2) * 4 <= launch.stages * stage


@pytest.mark.parametrize(
    ("shape", "tokens", "launch"),
    [
        ((16, 32768), 2, (4, 1, 2, 1, None, 1)),
        ((16, 32768), 3, (2, 1, 2, 1, 16, 1)),
        ((16, 32768), 8, (1, 3, 3, 1, 32, 2)),
        ((64, 4096), 8, (1, 1, 3, 1, 32, 2)),
        ((1, 8192), 8, (16, 3, 3, 1, 32, 2)),
        ((1, 1024), 4, (4, 1, 2, 4, 16, 1)),
    ],
)
def test_many_queries_have_programs_that_run_at_once(shape, tokens, launch):
    cache = abstract_cache(batch=shape[0], length=shape[1], kv_heads=8)
    got = mosaic_decode.default_launch(abstract_query(cache, tokens=tokens), cache)
    assert got == mosaic_decode.Launch(*launch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [4, 8, 32])
def test_many_queries_fit_shared_memory(head_dim, block, bits, tokens):
    from pallas_kernels.mosaic.hopper.decode_rows.kernel import RowSettings

    config = tj.TurboConfig(key_bits=bits, value_bits=bits, block_kv=block, buffer_size=block)
    cache = abstract_cache(config, batch=16, length=32768, head_dim=head_dim)
    launch = mosaic_decode.default_launch(abstract_query(cache, tokens=tokens), cache)
    s = RowSettings(**mosaic_decode._settings(cache, launch))
    assert s.warps * s.warp_bytes(head_dim) <= 227 * 1024
    # A team leaves its results where its blocks were.
    assert launch.rows * (head_dim + 10) * 4 <= s.slot_bytes(head_dim)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ((1, 1, 2, 1, 32, 3), "self.team=3 must be 1 or 2"),
        ((1, 1, 1, 1, 32, 2), "self.stages=1 must be at least self.team=2"),
    ],
)
def test_a_launch_without_code_is_refused(launch, words):
    cache = abstract_cache()
    query = abstract_query(cache, tokens=8)
    with pytest.raises(ValueError, match=words):
        lower(query, cache, launch=mosaic_decode.Launch(*launch))


def test_an_unsplit_short_cache_has_blocks_for_one_stage_only():
    cache = abstract_cache(length=64)
    launch = mosaic_decode.default_launch(abstract_query(cache), cache)
    assert launch == mosaic_decode.Launch(splits=1, warpgroups=1, stages=1, cluster=1)
