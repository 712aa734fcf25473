"""Masks that show each query keys in a row, read as bounds: what Flax computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.flax.test_flax_segments import FLOAT, LEFT, LOWER, ROUNDING, T, expected, operands
from turbojax.flax import MaskWarning, TurboAttentionFn

FN = TurboAttentionFn(FLOAT, bounds=True, warn=False)
PLACE = np.arange(T)
IMAGE = (np.array([[0], [9]]) <= PLACE) & (np.array([[6], [17]]) > PLACE)
MASKS = {
    "prefix": LOWER | (np.array([[0], [10]]) > PLACE)[:, None],
    "image": LOWER | (IMAGE[:, :, None] & IMAGE[:, None]),
    "image, padding on the left": LEFT[:, None] & (LOWER | (IMAGE[:, :, None] & IMAGE[:, None])),
    "window": np.broadcast_to(np.abs(PLACE[:, None] - PLACE) < 4, (2, T, T)),
    "of keys alone": (LEFT & (PLACE < 20))[:, None],
}


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize("name", MASKS)
def test_what_flax_computes_and_its_gradient(name):
    mask = jnp.asarray(MASKS[name])[:, None]
    seeing = mask.any(3)[:, 0, :, None, None]
    query = jnp.asarray(np.random.default_rng(1).normal(size=operands()[0].shape), jnp.float32)
    arrays = [query, *operands()[1:]]
    weight = jnp.cos(jnp.arange(8.0))[None, None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, *x):
        def call(*x):
            return jnp.where(seeing, attend(*x, mask=mask), 0)

        out, pull = jax.vjp(call, *x)
        return out, pull(jnp.broadcast_to(weight, out.shape))

    (out, ours), (want, theirs) = run(FN, *arrays), run(expected, *arrays)
    np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)
    for grad, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(grad, other, rtol=0, atol=T * ROUNDING)
    np.testing.assert_array_equal(np.where(seeing, 0, FN(*arrays, mask=mask)), 0)


def test_causality_of_the_call_is_added():
    mask = jnp.asarray(MASKS["window"])[:, None]
    out = FN(*operands(), mask=mask, is_causal=True)
    want = expected(*operands(), mask & LOWER[None, None])
    np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)


def test_packed_images_have_ids_beside_the_mask():
    ids = jnp.repeat(jnp.array([[0, 1]]), T // 2, axis=1).repeat(2, 0)
    mask = jnp.asarray(MASKS["image"])[:, None]
    out = FN(*operands(), mask=mask, query_segment_ids=ids, key_value_segment_ids=ids)
    want = expected(*operands(), mask & (ids[:, None, :, None] == ids[:, None, None]))
    np.testing.assert_allclose(out, want, rtol=0, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a hole", "heads that differ"])
def test_masks_that_are_no_bounds(kind):
    mask = np.broadcast_to(MASKS["prefix"][:, None], (2, 4, T, T)).copy()
    if kind == "a hole":
        mask[1, :, 20, 5] = False
    else:
        mask[1, 2, 20, 20:] = False
    words = r"sequences \[1\] must hide keys before and after some that follow each other"
    with pytest.raises(ValueError, match=words):
        FN(*operands(), mask=jnp.asarray(mask))
    out = jax.jit(FN)(*operands(), mask=jnp.asarray(mask))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    warning = TurboAttentionFn(FLOAT, bounds=True, scale=0.5 if kind == "a hole" else 0.25)

    def run():
        jax.jit(warning)(*operands(), mask=jnp.asarray(mask)).block_until_ready()
        jax.effects_barrier()

    with pytest.warns(MaskWarning, match="follow each other"):
        run()


@pytest.mark.slow
def test_of_a_module_and_in_words():
    mask = jnp.asarray(MASKS["image"])[:, None]
    options = {"num_heads": 4, "in_features": 32, "decode": False}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, 32)), jnp.float32)
    ours = nnx.MultiHeadAttention(**options, attention_fn=FN, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ours(x, mask=mask), theirs(x, mask=mask), rtol=0, atol=ROUNDING)
    plain = TurboAttentionFn(FLOAT)
    with pytest.raises(ValueError, match="prefix-LMs and images TurboAttentionFn with bounds=True"):
        plain(*operands(), mask=mask)
    causal = TurboAttentionFn(FLOAT, is_causal=True, bounds=True)
    with pytest.raises(ValueError, match="must hide the keys after each query"):
        causal(*operands(), mask=mask)
    with pytest.raises(ValueError, match="must not both be True"):
        TurboAttentionFn(segments=True, bounds=True)
    with pytest.raises(TypeError, match="bounds=1 must be a bool"):
        TurboAttentionFn(bounds=1)
    newest = FN(*(a[:, -n:] for a, n in zip(operands(), (1, T, T), strict=True)))
    want = expected(*(a[:, -n:] for a, n in zip(operands(), (1, T, T), strict=True)), None)
    np.testing.assert_allclose(newest, want, rtol=0, atol=ROUNDING)
