"""What the tests of the kernel that writes pages of codes share: tokens of all kinds, and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.caches.cache_helpers import assert_same_bits
from turbojax.caches.paged import pool as paged

# Each number of bits on either side, and keys without codes.
MIXES = ("k8v4", "int8", "turbo_k4v2", "turbo_k2v3", "int8_v4", "turbo_k3v4")
TABLES = np.array([[7, 2, 9, -1], [0, 11, 3, 8], [4, 1, 5, 6]], np.int32)
PAGES = 12


@functools.cache
def compiled(implementation):
    return jax.jit(functools.partial(paged.append, implementation=implementation))


def new(head_dim, dtype, page_size=16, heads=3, seed=4, kv_dtype="turbo4"):
    """A pool full of litter, which nothing but the tokens may change."""
    formats = paged.FORMATS[kv_dtype]
    given = {"seed": seed} if formats.is_rotated else {}
    # Few of the tokens are too large for it, and many are subnormal numbers.
    scales = {"key_scale": formats.key, "value_scale": formats.value}
    given |= {name: 0.3 for name, side in scales.items() if side.has_scale}
    cache = paged.init_paged_cache(
        PAGES, page_size, heads, head_dim, dtype=dtype, kv_dtype=kv_dtype, **given
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.integers(0, 200, x.shape).astype(x.dtype)) if x.ndim else x, cache
    )


def tokens(count, head_dim, dtype, heads=3, seed=0, batch=3):
    """Vectors of lengths from float16's subnormal numbers to its largest, a few channels loud."""
    rng = np.random.default_rng(seed)
    shape = (2, batch, count, heads, head_dim)
    x = rng.normal(size=shape) * np.exp(rng.uniform(-18, 6, size=(*shape[:-1], 1)))
    x = x * np.where(rng.random(head_dim) < 0.1, 9.0, 1.0)
    return tuple(jnp.asarray(np.clip(y, -6e4, 6e4), dtype) for y in x)


def strange(head_dim, dtype, heads=3):
    """One vector a kind: what is no number, what is too large or too small, zeros, few channels."""
    largest = float(jnp.finfo(dtype).max)
    rng = np.random.default_rng(1)
    normal = rng.normal(size=head_dim)
    normal *= 1 / np.linalg.norm(normal)
    kinds = [np.zeros(head_dim), -np.zeros(head_dim), np.full(head_dim, largest)]
    kinds += [np.eye(head_dim)[i % head_dim] * size for i, size in enumerate((1, -3.5, 6e4, 61727))]
    # -0 among the coordinates: a half of zeros, and one whose sum is 0.
    kinds += [np.eye(head_dim)[5] - np.eye(head_dim)[4], np.eye(head_dim)[1] + np.eye(head_dim)[3]]
    for bad in (np.nan, np.inf, -np.inf, largest, -largest, 61_740.0, 1e-40):
        kinds.append(np.where(np.arange(head_dim) == 7, bad, 0.0))
        kinds.append(np.where(np.arange(head_dim) == 3, bad, normal))
    # Around 65,504, around half of the smallest float16, around what counts as nothing.
    kinds += [normal * size for size in np.linspace(65_000, 66_100, 23)]
    kinds += [normal * 2.0**-24 * size for size in np.linspace(0.3, 2.7, 25)]
    kinds += [normal * 10.0**power for power in range(-46, 39, 3)]
    kinds += [-normal * 2.0**-30 * size for size in (0.999, 1, 1.001)]
    kinds += [np.eye(head_dim)[2] * 2.0**-30, np.eye(head_dim)[2] * 2.0**20]
    kinds += [np.full(head_dim, sign * 2.0**power) for sign in (1, -1) for power in (-3, 0, 5)]
    # Of int8: where scales end and begin, ties of two integers.
    kinds += [normal * 127 * size for size in (65_504, 65_540, 2.0**-32, 1e-7)]
    kinds += [np.eye(head_dim)[1] * size for size in (8.3e6, 8.4e6, 2.0**-25, 2.0**-25 * 1.01)]
    halves = np.where(np.arange(head_dim), np.arange(head_dim) % 250 - 124.5, 127.0)
    kinds += [halves * size for size in (1, 3 * 2.0**-20, -1111)]
    with np.errstate(over="ignore"):
        x = np.clip(kinds, -1e39, 1e39).astype(np.float32).astype(jnp.dtype(dtype))
    x = np.concatenate([x, np.zeros((-len(x) % (3 * heads), head_dim), x.dtype)])
    x = jnp.asarray(x).reshape(3, -1, heads, head_dim)
    return x, jnp.flip(x, (0, 1))


def integers(*values):
    return jnp.asarray(values, jnp.int32)


def assert_stores_the_same(cache, key, value, tables, lengths, run, **given):
    """The bits of plain JAX, of every array; returns the pool."""
    want = compiled("xla")(cache, key, value, tables, lengths, **given)
    got = run(cache, key, value, tables, lengths, **given)
    bits = functools.partial(jax.tree.map, as_bits)
    assert_same_bits(bits(got), bits(want))
    return got


def check_ragged(same, head_dim, dtype, page_size=16, kv_dtype="turbo4"):
    """Over the ends of pages; then one token each, of which a sequence gets none."""
    cache = new(head_dim, dtype, page_size, kv_dtype=kv_dtype)
    before, count = integers(page_size - 2, 0, 3), integers(21, 5, 0)
    cache = same(cache, *tokens(21, head_dim, dtype), TABLES, before, new_lengths=count)
    assert int(cache.dropped_tokens) == 0
    one = tokens(1, head_dim, dtype, seed=1)
    same(cache, *one, TABLES, before + count, new_lengths=integers(1, 0, 1))


def check_format(same, kv_dtype, head_dim, dtype):
    """Ragged tokens, then what is hard to store."""
    cache = new(head_dim, dtype, kv_dtype=kv_dtype)
    x = tokens(21, head_dim, dtype, seed=2)
    cache = same(cache, *x, TABLES, integers(14, 0, 3), new_lengths=integers(21, 5, 0))
    assert int(cache.dropped_tokens) == 0
    same(cache, *strange(head_dim, dtype), TABLES, integers(1, 0, 0))


def check_dropped(same, kv_dtype="turbo4"):
    """Pages that are none, positions past the table, negative or beyond int32, promises."""
    cache = new(128, jnp.bfloat16, kv_dtype=kv_dtype)
    tables = jnp.asarray(TABLES).at[0, 1].set(-1).at[1, 0].set(99)
    x = tokens(30, 128, jnp.bfloat16, seed=5)
    for lengths, counts in (((10, 0, 40), (30, 40, 31)), ((60, -5, 2**31 - 9), (30, 30, -1))):
        got = same(cache, *x, tables, integers(*lengths), new_lengths=integers(*counts))
        assert int(got.dropped_tokens) > 0


def as_bits(x):
    """NaN too."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)
