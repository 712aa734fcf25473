"""Decoding an `ExactCache` by the kernel for Hopper, on a CPU: who decodes what, copies, lowering.

What a warp computes is tested in `test_mosaic_paged.py`: it is the kernel of pages.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic.hopper.paged import copies, inputs, kernel
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import warp
from turbojax import _device
from turbojax.attention import cudnn
from turbojax.attention.options import Options
from turbojax.caches import exact as exact_attention
from turbojax.caches.exact import api, mosaic_gpu
from turbojax.caches.exact import cache as exact
from turbojax.caches.paged import mosaic_gpu as paged


def shapes(*, batch=2, tokens=1, heads=8, kv_heads=2, head_dim=128, room=300, dtype=jnp.bfloat16):
    """A query and a cache that are shapes alone."""
    cache = jax.eval_shape(lambda: exact.init_cache(batch, room, kv_heads, head_dim, dtype=dtype))
    return jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), dtype), cache


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    monkeypatch.setattr(cudnn, "missing", lambda: None)


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"window": (99, 0)}),
        ({"head_dim": 256, "tokens": 3, "dtype": jnp.float16}, {"logits_soft_cap": 30.0}),
        ({"head_dim": 64, "room": 5000, "batch": 9}, {"window": (7, 3), "logits_soft_cap": 30.0}),
    ],
)
def test_it_lowers(shape, options):
    attend = functools.partial(
        mosaic_gpu.attend, options=Options(True, options.pop("window", None), scale=0.1, **options)
    )
    text = lower_for_cuda(jax.jit(attend), *shapes(**shape))
    assert "turbojax_paged_hopper" in text


@pytest.mark.parametrize(
    ("shape", "options", "chosen"),
    [
        ({}, {}, "cudnn"),
        ({}, {"window": (99, 0)}, "mosaic_gpu"),
        ({}, {"logits_soft_cap": 30.0}, "mosaic_gpu"),
        ({"head_dim": 256}, {}, "mosaic_gpu"),
        ({"tokens": 2}, {}, "mosaic_gpu"),
        ({"tokens": 17}, {}, "xla"),
        ({"head_dim": 96}, {"window": (99, 0)}, "xla"),
        ({"dtype": jnp.float32}, {}, "xla"),
    ],
)
def test_who_decodes(hopper, shape, options, chosen):
    given = Options(True, options.pop("window", None), scale=0.1, **options)
    assert api._choose_decode(*shapes(**shape), given) == chosen
    given = dataclasses.replace(given, implementation="repeatable")
    repeatable = api._choose_decode(*shapes(**shape), given)
    assert repeatable == ("mosaic_gpu" if chosen == "cudnn" else chosen)


def test_what_repeats_is_plain_jax_where_there_is_no_kernel():
    rng = np.random.default_rng(1)
    key, value = (jnp.asarray(rng.normal(size=(2, 9, 2, 64)), jnp.float32) for _ in "kv")
    cache = exact.append(exact.init_cache(2, 12, 2, 64, dtype=jnp.float32), key, value)
    query = jnp.asarray(rng.normal(size=(2, 1, 4, 64)), jnp.float32)
    found, plain = (tj.decode(query, cache, implementation=i) for i in ("repeatable", "xla"))
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"head_dim": 96}, "head_dim=96 must be one of (64, 128, 256)"),
        ({"tokens": 17}, "68 queries of a KV head must be at most 64"),
        ({"dtype": jnp.float32}, "cache.dtype=float32 must be one of ('bfloat16', 'float16')"),
    ],
)
def test_refusals_name_value_and_requirement(hopper, shape, words):
    assert mosaic_gpu.unsupported(*shapes(**shape)) == words


def test_other_dtypes_than_the_cache_are_refused(hopper):
    query, cache = shapes()
    query = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    words = "query.dtype=float32 must equal cache.dtype=bfloat16"
    assert mosaic_gpu.unsupported(query, cache) == words


def test_it_is_refused_where_there_is_no_hopper():
    query, cache = (jnp.zeros((1, 1, 2, 64), jnp.bfloat16), exact.init_cache(1, 8, 2, 64))
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: needs an NVIDIA GPU of .* 9\.0"):
        tj.decode(query, cache, implementation="mosaic_gpu")


def test_prompts_are_left_to_what_attends_to_them():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 64)), jnp.float32)
    given, chosen = (
        exact_attention.attention(x, x, x, implementation=i) for i in ("mosaic_gpu", None)
    )
    np.testing.assert_array_equal(given, chosen)


def test_its_gradient_is_that_of_plain_jax(monkeypatch):
    rng = np.random.default_rng(1)
    key, value = (jnp.asarray(rng.normal(size=(2, 9, 2, 64)), jnp.float32) for _ in range(2))
    query = jnp.asarray(rng.normal(size=(2, 3, 4, 64)), jnp.float32)
    cache = exact.append(exact.init_cache(2, 12, 2, 64, dtype=jnp.float32), key, value)
    options = Options(True, (4, 0), scale=0.1, logits_soft_cap=5.0)
    plain = functools.partial(api._by_xla, options=options)
    monkeypatch.setattr(mosaic_gpu, "attend", lambda q, c, options: (plain(q, c), None))

    def loss(attend, query, key):
        held = dataclasses.replace(cache, key=key)
        return jnp.sum(attend(query, held) ** 2)

    ours = functools.partial(api._by_kernel, options)
    got, want = (
        jax.grad(functools.partial(loss, f), argnums=(0, 1))(query, cache.key)
        for f in (ours, plain)
    )
    for a, b in zip(got, want, strict=True):
        # Sums of two programs, of some hundred products of numbers about 1.
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-18)


@pytest.mark.parametrize(
    ("head_dim", "block", "room", "limit", "length", "begin"),
    [
        (128, 32, 50, 50, 45, 32),  # past the sequence's end there is nothing
        (64, 64, 48, 96, 90, 64),  # a rolling buffer, which begins anew in the middle of the block
        (256, 16, 32, 4000, 3981, 3968),
    ],
)
def test_rows_come_to_their_places(monkeypatch, head_dim, block, room, limit, length, begin):
    for module in (copies, inputs, kernel):
        monkeypatch.setattr(module, "lane", warp)
    number = warp.Int(warp.LANES)
    here = inputs.Place(number >> 2, number & 3, number, inputs.parity(number >> 2))
    rng = np.random.default_rng(head_dim)
    key, value = rng.integers(1, 2**15, (2, 2, room, 3, head_dim)).astype(np.uint16)
    stored = inputs.Pages(
        *(warp.Pointer(x.view(np.uint8).ravel()) for x in (key, value)), *[None] * 5
    )
    a = inputs.Arrays(
        query=None, lengths=None, query_lengths=None, outputs=[], tokens=1, heads=6, kv_heads=3,
        head_dim=head_dim, dtype="bfloat16", pages=stored, tables=None, page_size=1,
        max_pages=limit, num_pages=2 * room, room=room,
    )  # fmt: skip
    at = types.SimpleNamespace(
        batch=warp.integer(1), head=warp.integer(2), length=warp.integer(length),
        stop=warp.integer(-(-length // block)),
    )  # fmt: skip
    options = Options(True, scale=1.0)
    s = paged.plain_settings("bfloat16", 2, head_dim, options, paged.Launch(False), limit)
    assert s.block == block
    slot = np.full(2 * block * head_dim * 2, 0xFF, np.uint8)
    first = warp.integer(begin // block)
    copies._copy_rows(a, at, here, first, (warp.Pointer(slot), None), s)
    got = slot.view(np.uint16).reshape(2, block, head_dim)
    tokens = begin + np.arange(block)
    for side, x in zip(got, (key, value), strict=True):
        held = tokens < length
        np.testing.assert_array_equal(side[held], x[1, tokens[held] % room, 2])
        assert not side[~held].any()
