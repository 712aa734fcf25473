"""Appending to KV4 and K8V4 on Hopper, on a CPU: the kernel's lanes as numpy; that it lowers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper import kv4_append
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.test_kv4_cache import awkward
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import warp
from turbojax.caches.token_scaled import append_mosaic as kv4_mosaic
from turbojax.caches.token_scaled import cache as kv4

INIT = {"kv4": kv4.init_cache, "k8v4": kv4.init_k8v4_cache}
xla = functools.partial(kv4.append, implementation="xla")


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, dtype)


def update(body, name, inputs, arrays, *, grid, warpgroups):
    """As `lanes.update`: of a program the first warp, which writes lengths, runs last."""
    assert name == kv4_append.NAME
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    def run(*given):
        held = [np.array(x) for x in given]
        pointers = [warp.Pointer(x.reshape(-1).view(np.uint8)) for x in held]
        for ids in itertools.product(*map(range, grid.values())):
            for number in reversed(range(4 * warpgroups)):
                warp.thread = lambda number=number: warp.Int(32 * number + warp.LANES)
                body(pointers, [warp.integer(i) for i in ids])
        return held[len(inputs) :]

    return jax.pure_callback(run, shapes, *inputs, *arrays)


@pytest.fixture
def append(monkeypatch):
    """`kv4.append` by the kernel, emulated."""
    monkeypatch.setattr(warp, "thread", None, raising=False)
    monkeypatch.setattr(warp, "block_barrier", lambda: None, raising=False)
    for module in (kv4_append, frame):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr(kv4_append.lanes, "update", update)
    monkeypatch.setattr(kv4_mosaic, "needs_mosaic", lambda: None)
    return functools.partial(kv4.append, implementation="mosaic_gpu")


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_ragged_tokens_have_the_bits_of_the_definition(append, kind, dtype):
    """Token by token, several, many; some are left out."""
    cache = want = INIT[kind](3, 60, 2, 40, dtype=dtype)
    # Of 13 tokens a sequence has 52 vectors, of 17 more than a program takes.
    for i, lengths in enumerate(([1, 0, 1], [13, 4, 0], [17, 30, 1])):
        shape = (3, (1, 13, 30)[i], 2, 40)
        x = normal(2 * i, shape, dtype), normal(2 * i + 1, shape, dtype)
        counts = jnp.asarray(lengths, jnp.int32)
        cache, want = (f(c, *x, lengths=counts) for f, c in ((append, cache), (xla, want)))
        assert_same_bits(cache, want)
    assert cache.lengths.tolist() == [31, 34, 2]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize("dim", [8, 128, 264])
def test_vectors_that_are_hard_to_round(append, kind, dim):
    x = jnp.asarray(awkward(dim))[:, None, None]
    new = INIT[kind](len(x), 4, 1, dim, dtype=jnp.float32)
    got, want = (f(new, x, x[::-1]) for f in (append, xla))
    # Bits of NaN may differ.
    got, want = (
        [np.asarray(y).astype(np.float64) for y in jax.tree.leaves(cache)] for cache in (got, want)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.fuzz
@pytest.mark.parametrize("tokens", [3, 40])
def test_what_has_no_room_is_left_out_and_told(append, tokens):
    x = normal(5, (2, tokens, 2, 16))
    full = kv4.init_cache(2, 10, 2, 16, dtype=jnp.float32)
    full = xla(full, x[:, :1], x[:, :1])
    calls = [jax.jit(f) for f in (append, xla)]
    for lengths in ([3, 1], [-1, 99], [tokens, 0]):
        counts = jnp.asarray(lengths, jnp.int32)
        got, full = (f(full, x, x, lengths=counts) for f in calls)
        assert_same_bits(got, full)
    assert full.overflowed.tolist() == [tokens > 6, True]


@pytest.mark.fuzz
@pytest.mark.parametrize("tokens", [150, 13])
def test_rings(append, tokens):
    """Of 128 rows more are written than there are, or they are taken in turn."""
    new = functools.partial(kv4.init_cache, 1, 400, 2, 16, dtype=jnp.float32)
    cache = want = new(local_window_size=(100, 0))
    assert cache.is_ring
    for i, count in enumerate((120, tokens)):
        x = normal(2 * i, (1, count, 2, 16)), normal(2 * i + 1, (1, count, 2, 16))
        cache, want = append(cache, *x), xla(want, *x)
        assert_same_bits(cache, want)


def test_what_is_refused_and_chosen():
    cache = kv4.init_cache(1, 10, 2, 16, dtype=jnp.float32)
    x = normal(6, (1, 1, 2, 16))
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*compute capability 8\.0, 8\.9"):
        kv4.append(cache, x, x, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="has no implementation='triton'"):
        kv4.append(cache, x, x, implementation="triton")
    # What attends by another name still appends.
    assert kv4.APPEND.beside("triton") is None
    assert kv4_mosaic.append_unsupported(cache=cache, key=x[:, :0]) == (
        "key.shape=(1, 0, 2, 16) is empty"
    )


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(
    ("kind", "tokens", "head_dim", "dtype"),
    [
        ("kv4", 1, 128, jnp.bfloat16),
        ("k8v4", 256, 128, jnp.bfloat16),
        ("kv4", 300, 80, jnp.float32),
        ("k8v4", 4, 264, jnp.float16),
    ],
)
def test_it_lowers_in_place(kind, tokens, head_dim, dtype):
    cache = jax.eval_shape(lambda: INIT[kind](4, 400, 8, head_dim, dtype=dtype))
    x = jax.ShapeDtypeStruct((4, tokens, 8, head_dim), dtype)
    text = lower_for_cuda(kv4_mosaic.append, cache, x, x, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert "mosaic_gpu" in text
    assert text.count("output_operand_alias<") == (6 if tokens < 5 else 4)


def test_it_lowers_under_vmap():
    """Of stacked layers, one after the other."""
    cache = jax.eval_shape(lambda: kv4.init_cache(2, 200, 2, 64))
    x = jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16)
    one = cache, x, x, jax.ShapeDtypeStruct((2,), jnp.int32)
    many = jax.tree.map(lambda y: jax.ShapeDtypeStruct((3, *y.shape), y.dtype), one)
    assert "mosaic_gpu" in lower_for_cuda(jax.vmap(kv4_mosaic.append), *many)
