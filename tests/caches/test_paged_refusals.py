"""What a paged cache refuses: broken states, and wrong calls by what is wrong with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.caches.test_paged_cache import BATCH, HEAD_DIM, HEADS, TABLES, new
from turbojax.caches.paged import pool as paged

BROKEN = {
    "norm": ("turbo4", {"key_norm": None}, "cache.key_norm is None, must be float16"),
    "scale": ("turbo4", {"key_scale": jnp.ones(())}, r"key_scale is float32\[\], must be None"),
    "dtype": ("fp8_e4m3", {"value": jnp.zeros((12, 2, 16, 32))}, "value is float32.*float8_e4m3fn"),
    "shape": ("auto", {"value": jnp.zeros((12, 2, 16, 16))}, r"value is .*16\], must be .*32\]"),
    "negative": ("fp8_e5m2", {"value_scale": jnp.float32(-1)}, "value_scale=-1.0 must be positive"),
    "side": ("k8v4", {"value_scale": jnp.ones(())}, "value_scale is float32.*must be None"),
    "key's norm": ("k8v4", {"value_norm": None}, "value_norm is None, must be float16"),
    "int8's scale": ("int8", {"key_norm": None}, "key_norm is None, must be float16"),
    "integers": ("int8_v4", {"key": jnp.zeros((12, 2, 16, 32))}, "key is float32.*must be int8"),
    "packed": ("turbo_k3v2", {"key": jnp.zeros((12, 2, 16, 16), jnp.uint8)}, r"16, 12\]"),
    "lost": ("auto", {"lost": jnp.int32(-1)}, "cache.lost=-1 must not be negative"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_validate_names_what_is_broken(name):
    kind, changes, message = BROKEN[name]
    new(kind).validate()
    jax.jit(lambda c: c.validate())(new(kind))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(new(kind), **changes).validate()


KEY = jnp.zeros((BATCH, 2, HEADS, HEAD_DIM))
ZERO = np.zeros(BATCH, np.int32)
init = functools.partial(paged.init_paged_cache, 4, 16, 1, 32)


def add(cache=None, key=KEY, value=KEY, tables=TABLES, lengths=ZERO, **options):
    return paged.append(
        new("auto") if cache is None else cache, key, value, tables, lengths, **options
    )


WRONG = {
    "page size": (
        ValueError,
        lambda: paged.init_paged_cache(4, 48, 1, 32),
        "page_size=48 must be one of 16, 32, 64, 128",
    ),
    "pages": (ValueError, lambda: paged.init_paged_cache(0, 16, 1, 32), "num_pages=0.*at least 1"),
    "fraction": (TypeError, lambda: paged.init_paged_cache(4.0, 16, 1, 32), "num_pages=4.0"),
    "head dim": (ValueError, lambda: paged.init_paged_cache(4, 16, 1, 36), "head_dim=36"),
    "kind": (ValueError, lambda: init(kv_dtype="int7"), "kv_dtype='int7' must be one of auto"),
    "dtype": (TypeError, lambda: init(dtype=jnp.int8), "int8 must be bfloat16"),
    "scale": (ValueError, lambda: init(kv_dtype="fp8_e4m3", key_scale=0.0), "key_scale=0.0.*posit"),
    "no scale": (TypeError, lambda: init(kv_dtype="fp8_e4m3", key_scale=None), "key_scale is None"),
    "scale of turbo4": (ValueError, lambda: init(value_scale=2.0), "value_scale=2.0 has no use"),
    "scale of int8": (
        ValueError,
        lambda: init(kv_dtype="int8", key_scale=2.0),
        "key_scale=2.0 has no use with kv_dtype='int8': only fp8 has one scale",
    ),
    "seed of int8": (ValueError, lambda: init(kv_dtype="int8", seed=1), "seed=1 has no use"),
    "seed of auto": (ValueError, lambda: init(kv_dtype="auto", seed=1), "seed=1 has no use"),
    "scale of values": (
        ValueError,
        lambda: init(kv_dtype="k8v4", key_scale=2.0, value_scale=3.0),
        "value_scale=3.0 has no use with kv_dtype='k8v4'",
    ),
    "head dim of 3 bits": (
        ValueError,
        lambda: paged.init_paged_cache(4, 16, 1, 12, kv_dtype="turbo_k4v3"),
        "head_dim=12 must be a multiple of 8 for codes of 3 bits",
    ),
    "head dim of values": (
        ValueError,
        lambda: paged.init_paged_cache(4, 16, 1, 36, kv_dtype="k8v4"),
        "head_dim=36 must be a power of two",
    ),
    "seed": (TypeError, lambda: init(seed=0.5), "seed=0.5 must be an integer"),
    "cache": (TypeError, lambda: add(KEY), "must be a PagedCache"),
    "key's dtype": (TypeError, lambda: add(new("auto", jnp.bfloat16)), "float32.*bfloat16"),
    "key's heads": (ValueError, lambda: add(key=KEY[:, :, :1], value=KEY[:, :, :1]), r"T, 2, 32\]"),
    "value": (ValueError, lambda: add(value=KEY[:, :1]), "value.shape.*must equal"),
    "tables": (ValueError, lambda: add(tables=TABLES[:2]), r"\(2, 3\) must be \[3, max_pages\]"),
    "flat tables": (ValueError, lambda: add(tables=TABLES[0]), r"must be \[3, max_pages\]"),
    "no pages": (ValueError, lambda: add(tables=TABLES[:, :0]), "no axis empty"),
    "tables' dtype": (TypeError, lambda: add(tables=TABLES * 1.0), "block_tables.dtype=float32"),
    "lengths": (ValueError, lambda: add(lengths=ZERO[:2]), r"lengths.shape=\(2,\) must be \(3,\)"),
    "lengths' dtype": (TypeError, lambda: add(lengths=ZERO * 1.0), "lengths.dtype=float32"),
    # jnp.asarray makes 0 of 2**32.
    "wide lengths": (
        ValueError,
        lambda: add(lengths=ZERO + np.int64(2**32)),
        "lengths holds 4294967296",
    ),
    "wide new": (
        ValueError,
        lambda: add(new_lengths=ZERO + np.int64(2**32)),
        "new_lengths holds 4294967296",
    ),
    "wide tables": (
        ValueError,
        lambda: add(tables=TABLES.astype(np.int64) + 2**32),
        r"block_tables\[0, 0\]=2147483647 is needed",
    ),
    "new": (ValueError, lambda: add(new_lengths=ZERO + 3), r"new_lengths=\[3, 3, 3\].*0 and 2"),
    "read": (TypeError, lambda: paged.gather(KEY, TABLES, ZERO), "must be a PagedCache"),
    "read dtype": (
        TypeError,
        lambda: paged.gather(new("auto"), TABLES, ZERO, dtype=jnp.int32),
        "dtype=int32 must be floating",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
