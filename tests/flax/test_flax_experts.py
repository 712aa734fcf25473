"""`tj.flax.Int4Experts`: routing and INT4 experts as an nnx module, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj

SIZE, INNER, EXPERTS = 130, 40, 6


def kernels(seed=0, dtype=jnp.float32):
    """Router, gate, up and down."""
    rng = np.random.default_rng(seed)
    shapes = [(SIZE, EXPERTS), *[(EXPERTS, SIZE, INNER)] * 2, (EXPERTS, INNER, SIZE)]
    return [jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, dtype) for s in shapes]


def tokens(shape=(2, 7, SIZE), seed=1, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def make(**options):
    return tj.flax.Int4Experts.from_kernels(*kernels(), top_k=2, **options)


def exact(layer, x, routing):
    """Token by token, expert by expert, from the dequantized weights."""
    gate_up, down = layer.gate_up.get_value(), layer.down.get_value()
    out = np.zeros(x.shape)
    for t, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(routing.experts[t], routing.weights[t], strict=True):
            w, d = (
                np.asarray(tj.fireq.dequantize(tj.fireq.expert_of(x, int(expert))), np.float64)
                for x in (gate_up, down)
            )
            gate, up = np.split(w @ row, 2)
            out[t] += float(weight) * (d @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("order", "normalize"), [("before", True), ("before", False), ("after", False)]
)
def test_is_the_sum_over_experts(order, normalize):
    layer, x = make(softmax=order, normalize=normalize), tokens()
    got = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    flat = x.reshape(-1, SIZE)
    logits = flat @ layer.router.get_value()
    routing = tj.fireq.route(logits, 2, softmax=order, normalize=normalize)
    want = exact(layer, flat, routing)
    # Two roundings of activations to e4m3, 2.6 % each.
    error = np.linalg.norm(np.asarray(got).reshape(want.shape) - want) / np.linalg.norm(want)
    assert error < 0.06
    np.testing.assert_array_equal(layer(x), got)


@pytest.mark.fuzz
def test_a_token_does_not_depend_on_others():
    layer, x = make(), tokens((5, SIZE), dtype=jnp.bfloat16)
    got = layer(x)
    assert got.dtype == jnp.bfloat16
    bad = x.at[3, 0].set(jnp.nan)
    is_nan = np.isnan(np.asarray(layer(bad).astype(jnp.float32)))
    assert is_nan[3].all()
    assert not is_nan[[0, 1, 2, 4]].any()
    one = np.asarray(layer(x[1]).astype(jnp.float32))
    np.testing.assert_allclose(one, np.asarray(got[1].astype(jnp.float32)), rtol=2**-7, atol=1e-3)


@pytest.mark.fuzz
def test_what_is_trained():
    """The router, and nothing of the experts; the gradient reaches the tokens, too."""
    layer, x = make(normalize=True), tokens((9, SIZE))
    params = nnx.state(layer, nnx.Param)
    assert [path for path, _ in nnx.to_flat_state(params)] == [("router",)]

    def total(layer, x):
        return jnp.sum(layer(x) ** 2)

    grads = nnx.grad(total)(layer, x)
    assert float(jnp.abs(grads["router"].get_value()).max()) > 0
    d_x = nnx.grad(total, argnums=1)(layer, x)
    assert bool(jnp.isfinite(d_x).all())
    assert (jnp.abs(d_x).max(axis=1) > 0).all()


@pytest.mark.slow
def test_bad_input():
    router, gate, up, down = kernels()
    make = tj.flax.Int4Experts.from_kernels
    with pytest.raises(ValueError, match=r"gate.shape=\(130, 40\) must be \[experts, inputs"):
        make(router, gate[0], up, down, top_k=2)
    with pytest.raises(ValueError, match=r"router.shape=\(130, 5\) must be \(130, 6\)"):
        make(router[:, :5], gate, up, down, top_k=2)
    with pytest.raises(ValueError, match="top_k=7 must be at most"):
        make(router, gate, up, down, top_k=7)
    with pytest.raises(ValueError, match=r"down has \(5,\) experts"):
        make(router, gate, up, down[:5], top_k=2)
    weights = [tj.fireq.quantize_experts(jnp.swapaxes(w, 1, 2)) for w in (gate, down)]
    with pytest.raises(ValueError, match="gate_up.gated=False and down.gated=False must be True"):
        tj.flax.Int4Experts(router, *weights, top_k=2)
