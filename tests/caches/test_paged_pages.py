"""Whole pages: copied, read and written back, to the bit; and the facade `turbojax.paged`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.caches.cache_helpers import assert_same_bits
from turbojax import paged
from turbojax.caches.paged.pool import page_arrays

PAGES, SIZE, HEADS, HEAD_DIM = 8, 16, 2, 16
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8", "turbo4", "k8v4", "turbo_k3v2")

copy = jax.jit(paged.copy_pages)
read = jax.jit(paged.read_pages)
write = jax.jit(paged.write_pages)


@functools.cache
def filled(kind):
    """A pool with random bits, without NaN: XLA for CPUs may drop its sign and payload."""
    cache = paged.init_cache(PAGES, SIZE, HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.bfloat16)
    rng = np.random.default_rng(1)
    content = {}
    for name, x in page_arrays(cache).items():
        raw = rng.integers(0, 256, (*x.shape[:-1], x.shape[-1] * x.dtype.itemsize), np.uint8)
        numbers = raw.view(x.dtype)
        is_nan = np.isnan(numbers.astype(np.float32))
        content[name] = np.where(is_nan, np.ones((), x.dtype), numbers)
    return paged.write_pages(cache, np.arange(PAGES), content)


def bits(x):
    x = np.ascontiguousarray(np.asarray(x))
    return x.view({1: np.uint8, 2: np.uint16}[x.dtype.itemsize])


def arrays(cache):
    return {name: np.array(bits(x)) for name, x in page_arrays(cache).items()}


def assert_pages(cache, want):
    for name, x in arrays(cache).items():
        np.testing.assert_array_equal(x, want[name])


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("call", [copy, paged.copy_pages], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_copies_read_before_they_write(kind, call):
    """A chain 1 -> 2 -> 3 and a swap; padding on either side does nothing."""
    cache = filled(kind)
    want = {name: x.copy() for name, x in arrays(cache).items()}
    for x in want.values():
        x[[2, 3, 6, 5]] = x[[1, 2, 5, 6]]
    got = call(cache, np.array([1, 2, -1, 5, 6, 4, -1]), np.array([2, 3, 0, 6, 5, -1, 3]))
    assert_pages(got, want)
    assert int(got.lost) == 0


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_content_is_moved_through_the_host(kind):
    """Out of one pool into another, as numpy arrays, in a fixed number with padding."""
    cache = filled(kind)
    pages = np.array([6, 0, 3, -1])
    content = jax.tree.map(np.asarray, read(cache, pages))
    for name, x in content.items():
        np.testing.assert_array_equal(bits(x)[:3], arrays(cache)[name][pages[:3]])
        is_integer = np.issubdtype(x.dtype, np.integer)
        assert not x[3].any() if is_integer else np.isnan(x[3].astype(np.float32)).all()
    empty = paged.init_cache(PAGES, SIZE, HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.bfloat16)
    want = arrays(empty)
    for name, x in want.items():
        x[[1, 7, 2]] = arrays(cache)[name][[6, 0, 3]]
    for call in (write, paged.write_pages):
        got = call(empty, np.array([1, 7, 2, -1]), content)
        assert_pages(got, want)
        assert int(got.lost) == 0


def test_a_number_outside_the_pool_under_jit():
    """Nothing of another page is read or written; tokens not stored are counted."""
    cache = filled("turbo4")
    got = copy(cache, np.array([PAGES, -2, 1, 2]), np.array([3, 4, PAGES, -3]))
    assert_pages(got, arrays(cache))
    assert int(got.lost) == 4 * SIZE
    content = read(cache, np.array([PAGES, -2, -1, 2]))
    assert np.isnan(np.asarray(content["key_norm"][:3])).all()
    np.testing.assert_array_equal(content["value"][:3], 0)
    np.testing.assert_array_equal(bits(content["value"][3]), arrays(cache)["value"][2])
    got = write(cache, np.array([PAGES, -2, -1, 2]), content)
    assert_pages(got, arrays(cache))
    assert int(got.lost) == 2 * SIZE


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["auto", "turbo4"])
def test_a_donated_pool_is_reused(kind):
    cache = paged.init_cache(2048, SIZE, HEADS, HEAD_DIM, kv_dtype=kind, dtype=jnp.float32)
    pages = jnp.arange(3)
    donate = functools.partial(jax.jit, donate_argnums=0)
    for lowered in (
        donate(paged.copy_pages).lower(cache, pages, pages + 3),
        donate(paged.write_pages).lower(cache, pages, paged.read_pages(cache, pages)),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes - 16
        assert memory.temp_size_in_bytes < cache.nbytes // 16


PAIR = np.array([1, 2])
WRONG = {
    "source": (
        ValueError,
        lambda c: paged.copy_pages(c, PAIR + 6, PAIR),
        r"sources=\[7, 8\]",
    ),
    "wide source": (
        ValueError,
        lambda c: paged.copy_pages(c, PAIR + 2**32, PAIR),
        "sources holds 4294967297, must be within -2147483648..2147483647",
    ),
    "wide pages": (ValueError, lambda c: paged.read_pages(c, PAIR - 2**40), "pages holds -1099511"),
    "destination": (ValueError, lambda c: paged.copy_pages(c, PAIR, PAIR - 3), r"\[-2, -1\] must"),
    "twice": (ValueError, lambda c: paged.copy_pages(c, PAIR, PAIR * 0), "page 0 more than once"),
    "count": (ValueError, lambda c: paged.copy_pages(c, PAIR, PAIR[:1]), r"\(1,\) must be \[2\]"),
    "rank": (ValueError, lambda c: paged.read_pages(c, PAIR[None]), r"\(1, 2\) must be \[n\]"),
    "dtype": (TypeError, lambda c: paged.read_pages(c, PAIR * 1.0), "pages.dtype=float32"),
    "read": (ValueError, lambda c: paged.read_pages(c, PAIR + 7), r"pages=\[8, 9\] must be within"),
    "cache": (TypeError, lambda c: paged.read_pages(PAIR, PAIR), "must be a PagedCache"),
    "written twice": (
        ValueError,
        lambda c: paged.write_pages(c, PAIR * 0, paged.read_pages(c, PAIR)),
        "pages names page 0 more than once",
    ),
    "content": (
        ValueError,
        lambda c: paged.write_pages(c, PAIR, {"key": c.key[:2]}),
        r"content has \['key'\], must have \['key', 'key_norm', 'value', 'value_norm'\]",
    ),
    "shape": (
        ValueError,
        lambda c: paged.write_pages(c, PAIR, paged.read_pages(c, PAIR[:1])),
        r"content\['key'\].shape=\(1, 2, 16, 8\) must be \(2, 2, 16, 8\)",
    ),
    "content's dtype": (
        TypeError,
        lambda c: paged.write_pages(
            c, PAIR, {**paged.read_pages(c, PAIR), "key": np.zeros((2, 2, 16, 8), np.int8)}
        ),
        r"content\['key'\].dtype=int8 must be uint8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(filled("turbo4"))


def test_the_facade():
    assert paged.init_cache is paged.init_paged_cache
    assert paged.attention is paged.paged_attention
    cache = paged.init_cache(2, 16, 1, 32)
    content = paged.read_pages(cache, np.arange(2))
    assert_same_bits(paged.write_pages(cache, np.arange(2), content), cache)
