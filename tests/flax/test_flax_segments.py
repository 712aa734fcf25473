"""Masks of packed sequences, and of padding anywhere, read as segments: what Flax computes."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.flax import flax_helpers
from tests.flax.flax_helpers import FLOAT
from tests.flax.flax_helpers import MASK_ROUNDING as ROUNDING
from turbojax.flax import MaskWarning, PooledAttentionFn, TurboAttentionFn

T, S = 24, 31
CAUSAL = TurboAttentionFn(FLOAT, is_causal=True, segments=True, warn=False)
# Every key by itself: what has segments is exact then, too.
POOLED = PooledAttentionFn(
    tj.levels.Strided(level=1, others=1), 8, 8, is_causal=True, segments=True, warn=False
)
PLACE = np.arange(T)
LOWER = PLACE[None] <= PLACE[:, None]
LEFT = np.array([[0], [5]]) <= PLACE
RIGHT = np.array([[T], [7]]) > PLACE
IDS = np.stack([np.repeat([3, 1, 2], [7, 9, 8]), np.repeat([0, 5, 9], [4, 4, 16])])
TORN = np.stack([PLACE % 2, np.repeat([4, 1, 4, 1], [3, 8, 6, 7])])


def alike(queries, keys):
    return queries[:, :, None] == keys[:, None]


MASKS = {
    "packed": LOWER & alike(IDS, IDS),
    "packed, padding on the right": LOWER & alike(IDS, IDS) & RIGHT[:, None],
    "packed, padding of queries too": LOWER & alike(IDS, IDS) & RIGHT[:, None] & RIGHT[..., None],
    "padding on the left": LOWER & LEFT[:, None],
    "padding on either side": LOWER & (LEFT & (PLACE < 20))[:, None],
    "segments apart": LOWER & alike(TORN, TORN),
    "queries between see nothing": LOWER & alike(IDS, IDS) & (PLACE % 3 != 1)[:, None],
    "keys between are hidden": LOWER & (PLACE % 5 != 3)[None, None] & np.ones((2, 1, 1), bool),
    "causal": np.broadcast_to(LOWER, (2, T, T)),
    "nothing": np.zeros((2, T, T), bool),
}


def operands(tokens=T, keys=T):
    return flax_helpers.operands(tokens=tokens, keys=keys, kv_heads=2)


def expected(query, key, value, mask):
    """Flax's attention, with each KV head once for every query head of its group."""
    return nn.dot_product_attention(
        query, *(jnp.repeat(x, 2, axis=2) for x in (key, value)), mask=mask
    )


@pytest.mark.quick(slow=1)
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


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("name", MASKS)
def test_pooled_attention(name):
    mask = jnp.asarray(MASKS[name])[:, None]
    seeing = mask.any(3)[:, 0, :, None, None]
    want = jnp.where(seeing, expected(*operands(), mask), 0)
    out = jax.jit(POOLED)(*operands(), mask=mask)
    np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shown", ["within the window", "all"])
@pytest.mark.parametrize("window", [(3, 0), (2, 1)])
def test_a_window_beside_segments(shown, window):
    left, right = window
    fn = dataclasses.replace(CAUSAL, local_window_size=window, is_causal=not right)
    distance = PLACE[:, None] - PLACE
    near = (distance <= left) & (distance >= -right)
    for name in MASKS:
        mask = MASKS[name]
        if right and name in ("packed", "segments apart"):
            ids = IDS if name == "packed" else TORN
            mask = alike(ids, ids)
        elif right:
            continue
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


@pytest.mark.slow
def test_other_masks_are_refused():
    hole = (LOWER & alike(IDS, IDS)).copy()
    hole[1, 12, 9] = False
    wrong = {
        "later keys": np.ones((2, T, T), bool),
        "a pair of a segment": hole,
        "heads that differ": np.stack([LOWER, LOWER & (PLACE > 3)[None]] * 2)[None],
    }
    for name, mask in wrong.items():
        mask = jnp.asarray(mask if mask.ndim == 4 else mask[:, None])
        for fn in (CAUSAL, POOLED):
            with pytest.raises(ValueError, match=r"must hide keys of other segments than the que"):
                fn(*operands(), mask=mask)
            nan = jnp.isnan(jax.jit(fn)(*operands(), mask=mask)).all((1, 2, 3))
            assert nan.tolist() == [name != "a pair of a segment", True]


def test_under_jit_a_warning_says_what_is_hidden():
    fn = dataclasses.replace(CAUSAL, warn=True)
    mask = jnp.ones((2, 1, T, T), bool)

    def run():
        jax.jit(fn)(*operands(), mask=mask)
        jax.effects_barrier()

    with pytest.warns(MaskWarning, match="2 of 2 sequences.*must hide keys of other segments"):
        run()


@pytest.mark.fuzz
@pytest.mark.parametrize("fn", [CAUSAL, POOLED], ids=["turbo", "pooled"])
def test_ids_as_arguments(fn):
    arrays, ids = operands(), jnp.asarray(IDS)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    out = fn(*arrays, **segments)
    want = expected(*arrays, jnp.asarray(MASKS["packed"])[:, None])
    np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)
    # The mask hides padding besides.
    valid = jnp.asarray(LOWER & RIGHT[:, None])[:, None]
    out = fn(*arrays, mask=valid, **segments)
    mask = jnp.asarray(MASKS["packed, padding on the right"])[:, None]
    want = jnp.where(mask.any(3)[:, 0, :, None, None], expected(*arrays, mask), 0)
    np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)
    with pytest.raises(ValueError, match="batch axes"):
        fn(*arrays, query_segment_ids=ids[0], key_value_segment_ids=ids)
    with pytest.raises(ValueError, match="segment_ids"):
        fn(*arrays, mask=valid, key_value_segment_ids=ids)
    # Ids of 64 bits must not become equal by losing half of them.
    wide = IDS + 2**32 * (PLACE > 5)
    with pytest.raises(ValueError, match="query_segment_ids holds 4294967299, must be within"):
        fn(*arrays, query_segment_ids=wide, key_value_segment_ids=wide)
    one = {"query_segment_ids": ids[:, :1], "key_value_segment_ids": ids}
    with pytest.raises(NotImplementedError, match="single query"):
        fn(arrays[0][:, :1], *arrays[1:], mask=jnp.ones((2, 1, 1, T), bool), **one)


def test_without_the_option_the_message_names_it():
    for fn in (CAUSAL, POOLED):
        plain = dataclasses.replace(fn, segments=False)
        with pytest.raises(ValueError, match=r"take one with segments=True"):
            plain(*operands(), mask=jnp.asarray(MASKS["packed"])[:, None])
        with pytest.raises(TypeError, match="segments=1 must be a bool"):
            dataclasses.replace(fn, segments=1)


def test_scale():
    fn = dataclasses.replace(CAUSAL, scale=0.5)
    query, key, value = operands()
    out = fn(query, key, value)
    want = expected(query * 0.5 * 8**0.5, key, value, jnp.asarray(LOWER)[None, None])
    np.testing.assert_allclose(out, want, rtol=0, atol=2 * ROUNDING)
    with pytest.raises(TypeError, match="scale is a str"):
        TurboAttentionFn(scale="1")


@pytest.mark.slow
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
