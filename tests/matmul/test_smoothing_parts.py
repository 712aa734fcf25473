"""Smoothing of layers that are not Llama's: RoPE on a part of a head, norms of heads, biases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.matmul.test_smoothing_folding import random_layer
from turbojax import smoothing as sm
from turbojax.rotary import Rope
from turbojax.smoothing.attention import of_channels, split_pairs

HEADS, SIZE, ROTARY = 2, 20, 12


def pair_of(channel: int) -> int:
    """The channel's pair, counted as `split_pairs` does: those that turn first."""
    half = ROTARY // 2
    if channel < ROTARY:
        return channel % half
    return half + (channel - ROTARY) % ((SIZE - ROTARY) // 2)


def keys(seed: int = 0) -> np.ndarray:
    """Float64 ``[1, 9, K, H]``, with outliers among channels that turn, and among others."""
    x = np.random.default_rng(seed).standard_normal((1, 9, HEADS, SIZE))
    x[..., 3] *= 20
    x[..., SIZE - 1] *= 50
    return x


def test_pairs_are_what_rope_turns():
    first, second = split_pairs(jnp.arange(SIZE), ROTARY)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(SIZE))
    for i, (a, b) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        assert pair_of(a) == pair_of(b) == i
    np.testing.assert_array_equal(
        of_channels(jnp.arange(SIZE // 2), ROTARY), [pair_of(c) for c in range(SIZE)]
    )
    # A vector in the plane of a pair stays there.
    rope = Rope(SIZE, 10000.0, ROTARY)
    angles = rope.angles(jnp.arange(9)[None])
    for channel in range(SIZE):
        x = jnp.zeros((1, 9, 1, SIZE)).at[..., channel].set(1.0)
        turned = np.asarray(rope.rotate(x, angles))[0, :, 0]
        moved = np.flatnonzero(np.abs(turned).max(0))
        assert {pair_of(c) for c in moved} == {pair_of(channel)}
        np.testing.assert_allclose(np.linalg.norm(turned, axis=1), 1, rtol=1e-6)


def test_all_channels_are_one_case():
    x = jnp.arange(24.0).reshape(2, 12)
    for rotary_dim in (None, 12):
        for a, b in zip(split_pairs(x, rotary_dim), jnp.split(x, 2, axis=-1), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(of_channels(x), of_channels(x, 24))


def test_statistics_and_scales_of_a_part():
    key = keys()
    rope = Rope(SIZE, 10000.0, ROTARY)
    rotated = rope.rotate(jnp.asarray(key, jnp.float32), rope.angles(jnp.arange(9)[None]))
    seen = sm.KeyStatistics.init(HEADS, SIZE, ROTARY).update(jnp.asarray(key, jnp.float32), rotated)
    norms = np.zeros((HEADS, SIZE // 2))
    for pair in range(SIZE // 2):
        channels = [c for c in range(SIZE) if pair_of(c) == pair]
        norms[:, pair] = np.linalg.norm(key[..., channels], axis=-1).max((0, 1))
    np.testing.assert_allclose(seen.pair_norm, norms, rtol=1e-6)
    assert seen.merge(seen).rotary_dim == ROTARY
    scale, chosen = sm.channel_rope_scale(seen.absmax, num_pairs=2, beta=8.0, rotary_dim=ROTARY)
    np.testing.assert_array_equal(
        np.flatnonzero(np.asarray(chosen).all(0)), sorted({pair_of(3), pair_of(SIZE - 1)})
    )
    absmax = np.asarray(seen.absmax)
    expected = np.ones_like(absmax)
    for channel in range(SIZE):
        if pair_of(channel) in (pair_of(3), pair_of(SIZE - 1)):
            expected[:, channel] = 8 * absmax[:, channel]
    np.testing.assert_allclose(scale, expected, rtol=1e-6)


def test_head_norms_take_what_rows_would():
    """RPN in the norms' factors; the weights, and what is planted in them, stay."""
    layer = random_layer()
    rng = np.random.default_rng(4)
    heads = (layer.num_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim)
    norms = [jnp.asarray(rng.uniform(0.5, 2, shape)) for shape in heads]
    normed = dataclasses.replace(layer, q_norm=norms[0], k_norm=norms[1])
    scale = jnp.asarray(rng.uniform(0.5, 2, (layer.num_kv_heads, layer.head_dim // 2)))
    folded = sm.fold_query_key(normed, scale)
    for name in ("q", "k"):
        assert getattr(folded, name) is getattr(normed, name)
    group = layer.num_heads // layer.num_kv_heads
    both = np.tile(np.asarray(scale), (1, 2))
    np.testing.assert_allclose(folded.k_norm, norms[1] / both, rtol=1e-6)
    np.testing.assert_allclose(folded.q_norm, norms[0] * np.repeat(both, group, 0), rtol=1e-6)
    planted = sm.plant_outliers(normed, seed=1)
    changed = np.asarray(planted.k_norm) / np.asarray(normed.k_norm, np.float64)
    assert set(np.round(np.log2(changed), 5).ravel()) == {0.0, 3.0, 4.0}


def test_what_does_not_fit_is_refused():
    layer = random_layer()
    with pytest.raises(ValueError, match="q_norm and k_norm must be given together"):
        dataclasses.replace(layer, q_norm=jnp.ones((1, 1))).validate()
    norms = {"q_norm": jnp.ones(layer.head_dim), "k_norm": jnp.ones(layer.head_dim)}
    with pytest.raises(ValueError, match=r"k_norm.shape=.* must be \("):
        dataclasses.replace(layer, **norms).validate()
    bad = jnp.full(layer.o.weight.shape[0], jnp.nan)
    with pytest.raises(ValueError, match="mlp_post_norm must be finite"):
        dataclasses.replace(layer, mlp_post_norm=bad).validate()
    for rotary_dim in (3, layer.head_dim + 2, 0):
        with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim} must be even"):
            dataclasses.replace(layer, rotary_dim=rotary_dim).validate()
        with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim} must be even"):
            split_pairs(jnp.ones((1, layer.head_dim)), rotary_dim)
    seen = sm.KeyStatistics.init(layer.num_kv_heads, layer.head_dim, 2)
    key = jnp.ones((1, layer.num_kv_heads, layer.head_dim))
    with pytest.raises(ValueError, match="statistics.rotary_dim=2 must be the layer's, None"):
        sm.smooth_layer(layer, jax.jit(seen.update)(key, key), sm.Smoothing(num_pairs=2))
