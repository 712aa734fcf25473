"""Masks of packed sequences in Flax's modules: read as segments, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import turbojax as tj
from turbojax import TurboConfig
from turbojax.flax import PooledAttentionFn, TurboAttentionFn

EXACT = TurboConfig(mode="float")
IDS = np.stack([np.repeat([1, 2, 3, 0], [9, 4, 5, 3]), np.repeat([7, 1, 0], [2, 12, 7])])
FUNCTIONS = {
    "turbo": TurboAttentionFn(EXACT, is_causal=True, packed=True),
    "not causal": TurboAttentionFn(EXACT, packed=True),
    "window": TurboAttentionFn(EXACT, is_causal=True, packed=True, local_window_size=(3, 0)),
    "pooled": PooledAttentionFn(
        tj.levels.Strided(level=1, others=1), 8, 8, is_causal=True, packed=True
    ),
}


def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, 21, n, 8)), jnp.float32) for n in (4, 2, 2)]


def mask_of(is_causal, ids=IDS):
    """As a user of Flax makes it: padding has id 0."""
    ids = jnp.asarray(ids)
    real = nn.make_attention_mask(ids > 0, ids > 0, jnp.logical_and, dtype=bool)
    masks = [nn.make_attention_mask(ids, ids, jnp.equal, dtype=bool), real]
    if is_causal:
        masks.append(nn.make_causal_mask(ids, dtype=bool))
    return nn.combine_masks(*masks, dtype=bool)


def dense(query, key, value, mask):
    key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(8)
    weights = jnp.where(mask, jnp.exp(scores), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_of_packed_sequences(name, jitted):
    fn = FUNCTIONS[name]
    mask, arrays = mask_of(fn.is_causal), operands()
    call = jax.jit(fn) if jitted else fn
    seen = np.asarray(mask) != 0
    if getattr(fn, "local_window_size", None):
        place = np.arange(21)
        seen = seen & (place[None] >= place[:, None] - 3)
    want = dense(*arrays, seen)
    np.testing.assert_allclose(call(*arrays, mask=mask), want, atol=2e-6)


def test_gradients_and_lengths_alone():
    fn, arrays = FUNCTIONS["turbo"], operands()
    for mask in (mask_of(True), mask_of(True, (IDS > 0).astype(int))):

        def loss(fn, mask, *arrays):
            return jnp.square(fn(*arrays, mask=mask)).sum()

        got = jax.jit(jax.grad(functools.partial(loss, fn, mask), (0, 1, 2)))(*arrays)
        exact = dense
        want = jax.grad(functools.partial(loss, exact, mask), (0, 1, 2))(*arrays)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("name", ["turbo", "pooled"])
def test_segments_as_arguments(name):
    fn = dataclasses.replace(FUNCTIONS[name], packed=False)
    arrays, ids = operands(), jnp.asarray(IDS)
    want = dense(*arrays, np.asarray(mask_of(True)) != 0)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    real = (IDS > 0)[:, :, None, None]
    got = fn(*arrays, **segments)
    np.testing.assert_allclose(np.where(real, got, 0), want, atol=2e-6)
    # The mask hides padding besides.
    valid = mask_of(True, (IDS > 0).astype(int))
    np.testing.assert_allclose(fn(*arrays, mask=valid, **segments), want, atol=2e-6)
    with pytest.raises(ValueError, match="batch axes"):
        fn(*arrays, query_segment_ids=ids[0], key_value_segment_ids=ids)


def test_other_masks_raise_or_are_nan():
    fn, arrays = dataclasses.replace(FUNCTIONS["turbo"], warn=False), operands()
    mask = mask_of(True).at[1, 0, 8, 5].set(False)
    with pytest.raises(ValueError, match=r"mask of sequences \[1\] must hide keys of other seg"):
        fn(*arrays, mask=mask)
    out = jax.jit(fn)(*arrays, mask=mask)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    later = dataclasses.replace(fn, is_causal=True)
    with pytest.raises(ValueError, match="must hide the keys after each query"):
        later(*arrays, mask=mask_of(False))


def test_a_function_that_is_not_packed_says_what_to_take():
    fn = dataclasses.replace(FUNCTIONS["turbo"], packed=False)
    with pytest.raises(ValueError, match="packed=True"):
        fn(*operands(), mask=mask_of(True))
    with pytest.raises(TypeError, match="packed=1 must be a bool"):
        TurboAttentionFn(packed=1)


def test_in_a_module():
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=FUNCTIONS["turbo"])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 21, 32)), jnp.float32)
    variables = layer.init(jax.random.key(0), x)
    exact = nn.MultiHeadDotProductAttention(num_heads=4).apply(variables, x, mask=mask_of(True))
    found = jax.jit(layer.apply)(variables, x, mask=mask_of(True))
    real = IDS > 0
    np.testing.assert_allclose(found[real], exact[real], atol=2e-5)
