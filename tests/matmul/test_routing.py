"""`tj.fireq.route`, `dispatch` and `combine` against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj


def logits(tokens=9, experts=13, seed=0):
    return np.random.default_rng(seed).normal(size=(tokens, experts)) * 2


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("order", "normalize"), [("before", False), ("before", True), ("after", False)]
)
def test_route(order, normalize, dtype):
    x = jnp.asarray(logits(), dtype)
    got = tj.fireq.route(x, 3, softmax=order, normalize=normalize)
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    chosen = np.argsort(-wide, axis=-1, kind="stable")[:, :3]
    weights = np.take_along_axis(softmax(wide), chosen, -1)
    if normalize or order == "after":
        weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_array_equal(got.experts, chosen)
    assert got.weights.dtype == jnp.float32
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5)


def test_equal_and_bad_logits():
    x = jnp.zeros((4, 6)).at[1, 5].set(jnp.nan).at[2, 0].set(jnp.inf).at[3, 2].set(-jnp.inf)
    experts, weights = tj.fireq.route(x, 2)
    assert experts[0].tolist() == [0, 1]
    assert np.isnan(weights).all(1).tolist() == [False, True, True, False]
    assert ((experts >= 0) & (experts < 6)).all()


def test_dispatch_and_combine():
    """There and back: each token's copies are with their experts, in order."""
    experts = jnp.array([[2, 0], [0, 3], [2, 3], [3, 2]], jnp.int32)
    tokens, places, sizes = jax.jit(tj.fireq.dispatch, static_argnums=1)(experts, 5)
    assert sizes.tolist() == [2, 0, 3, 3, 0]
    assert tokens.tolist() == [0, 1, 0, 2, 3, 1, 2, 3]
    owners = np.repeat(np.arange(5), sizes)
    np.testing.assert_array_equal(owners[places], experts)
    np.testing.assert_array_equal(tokens[places], np.arange(4)[:, None].repeat(2, 1))
    y = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(1).uniform(size=(4, 2)), jnp.float32)
    got = tj.fireq.combine(y, places, weights)
    want = (np.asarray(y, np.float64)[places] * np.asarray(weights)[..., None]).sum(1)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


def test_bad_input():
    x = jnp.asarray(logits())
    for top_k, error in ((0, ValueError), (14, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="top_k"):
            tj.fireq.route(x, top_k)
    with pytest.raises(ValueError, match="softmax='never' must be one of"):
        tj.fireq.route(x, 2, softmax="never")
    with pytest.raises(TypeError, match="logits.dtype=int32"):
        tj.fireq.route(x.astype(jnp.int32), 2)
    with pytest.raises(ValueError, match=r"experts.shape=\(3,\) must be \[tokens, top_k\]"):
        tj.fireq.dispatch(jnp.zeros(3, jnp.int32), 4)


def grouped(x, top_k, groups, top_groups, scores, correction=0.0):
    """Experts and weights token by token, in float64: DeepSeek's choice by groups."""
    found = 1 / (1 + np.exp(-x)) if scores == "sigmoid" else softmax(x)
    experts, weights = [], []
    for token in found:
        by = (token + correction).reshape(groups, -1)
        best = np.sort(by, axis=1)[:, ::-1][:, : 2 if scores == "sigmoid" else 1].sum(1)
        hidden = np.argsort(-best, kind="stable")[top_groups:]
        by[hidden] = -np.inf
        experts.append(np.argsort(-by.reshape(-1), kind="stable")[:top_k])
        weights.append(token[experts[-1]])
    return np.array(experts), np.array(weights)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(4, 2, 3), (3, 3, 5), (1, 1, 4)])
def test_route_by_groups(scores, groups, top_groups, top_k):
    x = logits(tokens=20, experts=12, seed=3).astype(np.float32)
    options = {"scores": scores, "groups": groups, "top_groups": top_groups, "scaling": 2.5}
    correction = 0.0
    if scores == "sigmoid":
        correction = np.random.default_rng(4).normal(size=12).astype(np.float32)
        options |= {"correction": jnp.asarray(correction), "normalize": True}
    got = tj.fireq.route(jnp.asarray(x), top_k, **options)
    wide = x.astype(np.float64)
    experts, weights = grouped(wide, top_k, groups, top_groups, scores, correction)
    np.testing.assert_array_equal(got.experts, experts)
    if scores == "sigmoid":
        weights = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got.weights, 2.5 * weights, rtol=1e-5)


def test_bad_logits_by_groups():
    x = jnp.zeros((3, 8)).at[1, 7].set(jnp.nan).at[2, 0].set(jnp.inf)
    for scores, bad in (("softmax", [False, True, True]), ("sigmoid", [False, True, False])):
        experts, weights = tj.fireq.route(x, 2, scores=scores, groups=4, top_groups=2)
        assert np.isnan(weights).any(1).tolist() == bad
        assert ((experts >= 0) & (experts < 8)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": "tanh"}, "scores='tanh' must be one of"),
        ({"scores": "sigmoid", "softmax": "after"}, "softmax='after' must be 'before' with"),
        ({"correction": jnp.zeros(12)}, "correction must be None with scores='softmax'"),
        ({"scores": "sigmoid", "correction": jnp.zeros(5)}, r"correction.shape=\(5,\) must be"),
        ({"groups": 5}, "groups=5 must share 12 experts evenly"),
        ({"groups": 12, "top_groups": 4, "scores": "sigmoid"}, "at least 2 in each"),
        ({"groups": 4, "top_groups": 5}, "top_groups=5 must be at most groups=4"),
        ({"groups": 6, "top_groups": 1}, "top_groups=1 .* top_k=3 experts are in them"),
        ({"scaling": float("nan")}, "scaling=nan must be finite"),
    ],
)
def test_wrong_groups_and_scores(options, message):
    with pytest.raises(ValueError, match=message):
        tj.fireq.route(jnp.zeros((2, 12)), 3, **options)
