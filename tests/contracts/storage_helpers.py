"""What tests of stored caches share: kinds, filled caches, and what "the same" means."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import turbojax as tj
from turbojax.caches import init_layer_cache
from turbojax.caches import stored_file as files
from turbojax.caches.exact import cache as exact
from turbojax.caches.paged import kind as paged
from turbojax.caches.token_scaled import cache as kv4

MIXED = tj.TurboConfig(
    num_low_bit_key_heads=1,
    num_low_bit_value_heads=2,
    block_q=16,
    block_kv=16,
    buffer_size=32,
    softmax=tj.SAS(-5.0, "2"),
)
KINDS = {
    "exact": "exact",
    "kv4": "kv4",
    "k8v4": "k8v4",
    "4-bit": tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16, softmax="exact"),
    "mixed": MIXED,
    **{
        kind: kind
        for kind in ("paged", "fp8_e4m3", "fp8_e5m2", "paged_int8", "turbo4", "turbo_k3v2")
    },
    "paged_k8v4": "paged_k8v4",
}
SOME = {name: KINDS[name] for name in ("exact", "kv4", "mixed", "turbo4")}
HEADS, HEAD_DIM = 4, 16
LENGTHS = (40, 0, 21)


def tokens(count, seed=0, dtype=jnp.bfloat16, batch=3):
    shape = (batch, count, HEADS, HEAD_DIM)
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))


_APPEND = {
    cache: jax.jit(module.append)
    for cache, module in (
        (tj.ProgressiveCache, tj),
        (exact.ExactCache, exact),
        (kv4.Kv4Cache, kv4),
        (kv4.K8v4Cache, kv4),
        (paged.PagedLayer, paged),
    )
}


def append(cache, key, value, lengths=None):
    lengths = None if lengths is None else np.asarray(lengths, np.int32)
    return _APPEND[type(cache)](cache, key, value, lengths=lengths)


def filled(kind, max_length=70, dtype=jnp.bfloat16):
    """A cache of ragged sequences, one of them empty, with a buffer in use."""
    cache = init_layer_cache(len(LENGTHS), max_length, HEADS, HEAD_DIM, kind=kind, dtype=dtype)
    cache = append(cache, *tokens(40, 1, dtype), lengths=LENGTHS)
    return append(cache, *tokens(3, 2, dtype), lengths=(3, 0, 2))


def contents(cache):
    """Float32 keys and values [B, S, K, H], read without the code under test."""
    if isinstance(cache, exact.ExactCache):
        return [np.asarray(x, np.float32) for x in (cache.key, cache.value)]
    if isinstance(cache, kv4.TokenScaledCache):
        key, value = kv4.dequantize(cache, dtype=jnp.float32)
    elif isinstance(cache, paged.PagedLayer):
        key, value = tj.paged.gather(
            cache.pages, cache.block_tables, cache.lengths, dtype=jnp.float32
        )
    else:
        key, value = tj.dequantize(cache, dtype=jnp.float32)
    return [np.asarray(key), np.asarray(value)]


def assert_same_contents(one, other):
    np.testing.assert_array_equal(one.lengths, other.lengths)
    np.testing.assert_array_equal(one.overflowed, other.overflowed)
    for left, right in zip(contents(one), contents(other), strict=True):
        size = int(np.max(np.asarray(one.lengths)))
        assert np.any(left[:, :size] != 0)
        np.testing.assert_array_equal(left[:, :size], right[:, :size])


def assert_same_leaves(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def rewrite(source, target, *, change=lambda content: None, arrays=lambda x: None, **header):
    """A copy of a file with other metadata and arrays, whose fingerprint is right."""
    with safe_open(source, framework="np") as file:
        metadata = {**file.metadata(), **header}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    content = json.loads(metadata["content"])
    arrays(tensors)
    change(content)
    for name, x in tensors.items():
        if name in content["arrays"]:
            content["arrays"][name] = files._summary(x)
    metadata["content"] = json.dumps(content)
    metadata["fingerprint"] = hashlib.sha256(metadata["content"].encode()).hexdigest()
    save_file(tensors, target, metadata=metadata)
    return target
