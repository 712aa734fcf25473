"""Masks of packed sequences, and of padding anywhere, read as segments: what Flax computes."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from turbojax.flax import PooledAttentionFn, TurboAttentionFn

T, S = 24, 31
FLOAT = tj.TurboConfig(mode="float", softmax="exact", block_q=16, block_kv=16, buffer_size=16)
CAUSAL = TurboAttentionFn(FLOAT, is_causal=True, segments=True, warn=False)
# Sums of up to 31 products of order 1, weights that add up to 1, in either computation; gradients
# are sums of as many of these.
ROUNDING = 64 * 2.0**-24
PLACE = np.arange(T)
LOWER = PLACE[None] <= PLACE[:, None]
LEFT = np.array([[0], [5]]) <= PLACE
RIGHT = np.array([[T], [7]]) > PLACE
IDS = np.stack([np.repeat([3, 1, 2], [7, 9, 8]), np.repeat([0, 5, 9], [4, 4, 16])])


def alike(queries, keys):
    return queries[:, :, None] == keys[:, None]


MASKS = {
    "packed": LOWER & alike(IDS, IDS),
    "packed, padding on the right": LOWER & alike(IDS, IDS) & RIGHT[:, None],
    "packed, padding of queries too": LOWER & alike(IDS, IDS) & RIGHT[:, None] & RIGHT[..., None],
    "padding on the left": LOWER & LEFT[:, None],
    "padding on either side": LOWER & (LEFT & (PLACE < 20))[:, None],
    "keys between are hidden": LOWER & (PLACE % 5 != 3)[None, None] & np.ones((2, 1, 1), bool),
    "causal": np.broadcast_to(LOWER, (2, T, T)),
    "nothing": np.zeros((2, T, T), bool),
}


def operands(tokens=T, keys=T, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, tokens, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def expected(query, key, value, mask):
    """Flax's attention, with each KV head once for every query head of its group."""
    return nn.dot_product_attention(
        query, *(jnp.repeat(x, 2, axis=2) for x in (key, value)), mask=mask
    )


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", MASKS)
def test_what_flax_computes_and_its_gradient(name):
    mask = jnp.asarray(MASKS[name])[:, None]
    seeing = mask.any(3)[:, 0, :, None, None]
    fn = jax.jit(lambda *x: CAUSAL(*x, mask=mask))
    for call in (fn, lambda *x: CAUSAL(*x, mask=mask)):
        out = call(*operands())
        want = jnp.where(seeing, expected(*operands(), mask), 0)
        np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)

    def loss(attend):
        return lambda *x: (
            jnp.where(seeing, attend(*x), 0) * jnp.cos(jnp.arange(8.0))[None, None, None]
        ).sum()

    ours = jax.grad(loss(fn), argnums=(0, 1, 2))(*operands())
    theirs = jax.grad(loss(lambda *x: expected(*x, mask)), argnums=(0, 1, 2))(*operands())
    for grad, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(grad, want, rtol=0, atol=T * ROUNDING)


@pytest.mark.parametrize("shown", ["within the window", "all"])
def test_a_window_beside_segments(shown):
    fn = dataclasses.replace(CAUSAL, local_window_size=(3, 0))
    near = PLACE[:, None] - PLACE <= 3
    for name in ("packed", "padding on the left", "padding on either side"):
        mask = MASKS[name]
        want = expected(*operands(), jnp.asarray(mask & near)[:, None])
        seen = (mask & near).any(2)[:, :, None, None]
        out = fn(*operands(), mask=jnp.asarray(mask & near if shown != "all" else mask)[:, None])
        np.testing.assert_allclose(out, np.where(seen, want, 0), rtol=0, atol=ROUNDING)


def test_encoders_and_cross_attention():
    fn = dataclasses.replace(CAUSAL, is_causal=False)
    keys = np.stack([np.repeat([3, 1, 2], [10, 1, 20]), np.repeat([0, 5, 9], [4, 20, 7])])
    for tokens, mask in ((T, alike(IDS, IDS)), (S, alike(IDS, keys))):
        arrays = operands(T, tokens)
        mask = jnp.asarray(mask)[:, None]
        out = fn(*arrays, mask=mask)
        np.testing.assert_allclose(out, expected(*arrays, mask), rtol=0, atol=ROUNDING)
    keys_alone = jnp.asarray(LEFT)[:, None, None]
    out = fn(*operands(), mask=keys_alone)
    np.testing.assert_allclose(out, expected(*operands(), keys_alone), rtol=0, atol=ROUNDING)


def test_other_masks_are_refused():
    torn = np.array([0, 1] * (T // 2))[None]
    wrong = {
        "later keys": np.ones((1, T, T), bool),
        "tokens of a segment apart": LOWER & alike(torn, torn),
        "heads that differ": np.stack([LOWER, LOWER & (PLACE > 3)[None]])[None],
    }
    for mask in wrong.values():
        mask = jnp.asarray(mask if mask.ndim == 4 else mask[:, None])
        heads = [jnp.repeat(x, 1, axis=2) for x in operands()]
        if mask.shape[1] == 2:
            heads[0] = heads[0][:, :, :2]
        with pytest.raises(ValueError, match=r"must hide keys, and pairs of unlike segments"):
            CAUSAL(*heads, mask=mask)
        assert jnp.isnan(jax.jit(CAUSAL)(*heads, mask=mask)).any()


def test_without_the_option_the_message_names_it():
    plain = dataclasses.replace(CAUSAL, segments=False)
    for fn in (plain, PooledAttentionFn(tj.levels.LocalWindow(8), 8, 8, is_causal=True)):
        with pytest.raises(ValueError, match=r"need TurboAttentionFn\(segments=True\)"):
            fn(*operands(), mask=jnp.asarray(MASKS["packed"])[:, None])
    with pytest.raises(TypeError, match="segments=1 must be a bool"):
        TurboAttentionFn(segments=1)


def test_scale():
    fn = dataclasses.replace(CAUSAL, scale=0.5)
    query, key, value = operands()
    out = fn(query, key, value)
    want = expected(query * 0.5 * 8**0.5, key, value, jnp.asarray(LOWER)[None, None])
    np.testing.assert_allclose(out, want, rtol=0, atol=2 * ROUNDING)
    with pytest.raises(TypeError, match="scale is a str"):
        TurboAttentionFn(scale="1")


def test_in_modules_of_flax():
    """A packed batch through nnx and linen, as their examples train it."""
    x = jax.random.normal(jax.random.key(0), (2, T, 16))
    mask = nn.combine_masks(
        nn.make_causal_mask(jnp.asarray(IDS)),
        nn.make_attention_mask(jnp.asarray(IDS), jnp.asarray(IDS), jnp.equal),
    )
    outs = []
    for fn in (nnx.dot_product_attention, CAUSAL):
        layer = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=fn, rngs=nnx.Rngs(0))
        outs.append(layer(x, mask=mask))
    for fn in (nn.dot_product_attention, CAUSAL):
        twin = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=fn)
        variables = nn.MultiHeadDotProductAttention(num_heads=2).init(jax.random.key(0), x)
        outs.append(twin.apply(variables, x, mask=mask))
    for ours, theirs in ((outs[1], outs[0]), (outs[3], outs[2])):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=4 * ROUNDING)
