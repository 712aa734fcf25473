"""`tj.fireq.grouped_matmul`: each expert's tokens against the oracle, refusals; routing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.contracts.implementations import interpreted
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.experts_helpers import assert_equals_experts, operands, random_experts
from turbojax.matmul.grouped import triton
from turbojax.matmul.grouped.api import GROUPED_MATMUL
from turbojax.matmul.grouped.tiles import cut, most_tiles
from turbojax.quantizers import Fp8Tokens

jitted_cut = jax.jit(cut, static_argnums=(1, 2))

grouped_matmul = tj.fireq.grouped_matmul

# Rows, sizes of groups; outputs, inputs; what else.
CASES = {
    "ragged, some empty": ((23, [3, 0, 11, 1, 2]), (72, 200), {}),
    "one token": ((1, [0, 1, 0]), (20, 128), {"scale_dtype": "bf16"}),
    "all to one": ((40, [0, 40, 0]), (64, 256), {"dtype": jnp.float32}),
    "nobody": ((5, [0, 0]), (20, 128), {}),
    "gated": ((60, [7, 0, 33, 20]), (40, 300), {"gated": True}),
    "gated, bf16": ((19, [16, 1]), (75, 130), {"gated": True, "scale_dtype": "bf16"}),
    "one expert": ((9, [9]), (70, 130), {"dtype": jnp.float16}),
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_each_expert_is_as_the_oracle(implementation, name):
    (rows, sizes), shape, options = CASES[name]
    tokens, weight, sizes, bias = operands(rows, sizes, *shape, **options)
    activation = "swiglu" if weight.gated else "gelu"
    with interpreted(implementation):
        got = grouped_matmul(
            tokens, weight, sizes, bias=bias, activation=activation, implementation=implementation
        )
    assert_equals_experts(got, tokens, weight, sizes, bias, activation)


def test_one_expert_is_matmul():
    tokens, weight, _, bias = operands(9, [9], 70, 130)
    one = tj.fireq.expert_of(weight, 0)
    got = grouped_matmul(tokens, weight, jnp.array([9]), bias=bias, activation="silu")
    want = tj.fireq.matmul(tokens, one, bias=bias[0], activation="silu")
    np.testing.assert_array_equal(got, want)


def test_activations_that_are_not_quantized():
    _, weight, sizes, _ = operands(20, [4, 0, 13], 40, 200)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 200)), jnp.bfloat16)
    want = grouped_matmul(tj.fireq.quantize_tokens(x), weight, sizes)
    np.testing.assert_array_equal(grouped_matmul(x, weight, sizes), want)
    np.testing.assert_array_equal(jax.jit(grouped_matmul)(x, weight, sizes), want)


def test_what_is_not_finite_stays_with_its_token_and_its_output():
    tokens, weight, sizes, _ = operands(20, [4, 0, 13], 40, 200)
    clean = np.asarray(grouped_matmul(tokens, weight, sizes).astype(jnp.float32))
    bad = dataclasses.replace(tokens, scale=tokens.scale.at[5].set(jnp.nan).at[18].set(jnp.nan))
    scales = weight.scales.at[2, 0, 1, 7].set(jnp.nan)
    weight = dataclasses.replace(weight, scales=scales)
    got = np.asarray(grouped_matmul(bad, weight, sizes).astype(jnp.float32))
    is_nan = np.zeros((20, 40), bool)
    is_nan[5] = is_nan[4:17, 7] = True  # row 18 belongs to nobody
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    np.testing.assert_array_equal(got[~is_nan], clean[~is_nan])


@pytest.mark.parametrize("sizes", [[3, -1, 4], [3, 10, 14], [2**31 - 1] * 3, [-(2**31)] * 3])
@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.slow)])
def test_sizes_that_are_not_valid(implementation, sizes):
    """Refused where they are known; elsewhere every row is NaN."""
    tokens, weight, _, bias = operands(20, [0, 0, 0], 20, 128)
    sizes = np.asarray(sizes, np.int32)
    with pytest.raises(ValueError, match="must not be negative, and at most 20 together"):
        grouped_matmul(tokens, weight, sizes)
    with interpreted(implementation):
        call = functools.partial(grouped_matmul, tokens, weight, bias=bias)
        got = jax.jit(functools.partial(call, implementation=implementation))(sizes)
    assert jnp.isnan(got).all()


def plain(x, weight, sizes, bias, activation):
    """What the gradient is that of, in float32."""
    values = jax.vmap(tj.fireq.dequantize)(weight)
    out, first = jnp.zeros((x.shape[0], weight.result_size)), 0
    for expert, size in enumerate(np.asarray(sizes)):
        y = x[first : first + size] @ values[expert].T + bias[expert][None]
        if activation == "swiglu":
            gate, up = jnp.split(y, 2, axis=1)
            y = jax.nn.silu(gate) * up
        out = out.at[first : first + size].set(y)
        first += size
    return out


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("gated", [True, False])
def test_the_gradient_is_straight_through(gated):
    rng = np.random.default_rng(2)
    weight = random_experts(rng, 4, 24, 150, gated=gated)
    weight = dataclasses.replace(weight, output_scale=jnp.ones_like(weight.output_scale))
    sizes = jnp.array([5, 0, 12, 1])
    x = jnp.asarray(rng.normal(size=(21, 150)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(4, weight.out_size)), jnp.float32)
    factor = jnp.asarray(rng.normal(size=(21, weight.result_size)), jnp.float32)
    activation = "swiglu" if gated else None

    def ours(x, bias):
        return jnp.sum(factor * grouped_matmul(x, weight, sizes, bias=bias, activation=activation))

    def exact(x, bias):
        return jnp.sum(factor * plain(x, weight, sizes, bias, activation))

    got = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, bias)
    want = jax.grad(exact, argnums=(0, 1))(x, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))
    assert not got[0][18:].any()
    assert not got[1][1].any()
    with pytest.raises(NotImplementedError, match="grouped_matmul has no gradient: only first"):
        jax.grad(lambda x: jnp.sum(jax.grad(ours)(x, bias)))(x)


def test_no_gradient_of_quantized_tokens():
    tokens, weight, sizes, _ = operands(5, [2, 3], 20, 128)

    def total(scale):
        some = Fp8Tokens(tokens.codes, scale, tokens.dtype)
        return jnp.sum(grouped_matmul(some, weight, sizes).astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="grouped_matmul of quantized tokens has no"):
        jax.grad(total)(tokens.scale)


@pytest.mark.parametrize(("experts", "tile"), [(1, 1), (5, 4), (8, 16)])
def test_tiles(experts, tile):
    """Of random groups: every row once, in order, and no more tiles than `most_tiles` says."""
    rng = np.random.default_rng(experts)
    rows = 19 * experts + 2
    for _ in range(10):
        sizes = rng.integers(0, 20, experts) * rng.integers(0, 2, experts)
        tiles = jitted_cut(jnp.asarray(sizes, jnp.int32), rows, tile)
        count = int(tiles.total)
        assert count == (-(-sizes // tile)).sum() <= most_tiles(rows, experts, tile)
        assert int(tiles.rows) == sizes.sum()
        seen, fields = [], [np.asarray(x) for x in tiles[:5]]
        for number in range(count):
            expert, first, end, start, of_expert = (int(x[number]) for x in fields)
            assert end - first == sizes[expert]
            assert start <= number < start + of_expert
            begin = first + (number - start) * tile
            seen += [(expert, row) for row in range(begin, min(begin + tile, end))]
        owners = np.repeat(np.arange(experts), sizes)
        assert seen == [(int(e), row) for row, e in enumerate(owners)]


@pytest.mark.slow
def test_stacks_of_experts():
    rng = np.random.default_rng(0)
    w, up = (jnp.asarray(rng.normal(size=(3, 40, 200)), jnp.float32) for _ in range(2))
    for got, one in (
        (tj.fireq.quantize_experts(w, scale_dtype="bf16"), None),
        (tj.fireq.quantize_experts(w, up, scale_dtype="bf16"), up),
    ):
        each = [tj.fireq.quantize_weight(x, scale_dtype="bf16") for x in w]
        if one is not None:
            others = [tj.fireq.quantize_weight(x, scale_dtype="bf16") for x in up]
            each = [tj.fireq.gate_and_up(*pair) for pair in zip(each, others, strict=True)]
        want = tj.fireq.stack_experts(each)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        jax.tree.map(np.testing.assert_array_equal, tj.fireq.expert_of(got, 2), each[2])
    with pytest.raises(ValueError, match="must hold at least one weight"):
        tj.fireq.stack_experts([])
    with pytest.raises(ValueError, match="those of expert 1 are"):
        tj.fireq.stack_experts([each[0], tj.fireq.quantize_weight(w[0])])
    with pytest.raises(ValueError, match=r"w.shape=\(40, 200\) must be \[experts, out, in\]"):
        tj.fireq.quantize_experts(w[0])
    with pytest.raises(ValueError, match=r"up.shape=\(2, 40, 200\) must be \(3, 40, 200\)"):
        tj.fireq.quantize_experts(w, up[:2])


def test_bad_input():
    tokens, weight, sizes, bias = operands(20, [4, 0, 13], 40, 200)
    one = tj.fireq.expert_of(weight, 0)
    with pytest.raises(TypeError, match="weight is a ArrayImpl, must be an Int4Weight"):
        grouped_matmul(tokens, bias, sizes)
    with pytest.raises(ValueError, match=r"weight.stack=\(\) must be one axis of experts"):
        grouped_matmul(tokens, one, sizes)
    with pytest.raises(ValueError, match=r"group_sizes.shape=\(2,\) must be \(3,\)"):
        grouped_matmul(tokens, weight, sizes[:2])
    with pytest.raises(TypeError, match="group_sizes.dtype=float32 must be an integer type"):
        grouped_matmul(tokens, weight, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"bias.shape=\(40,\) must be \(3, 40\)"):
        grouped_matmul(tokens, weight, sizes, bias=bias[0])
    with pytest.raises(ValueError, match=r"must be \[M, 200\], tokens sorted by expert"):
        grouped_matmul(jnp.ones((2, 3, 200)), weight, sizes)
    with pytest.raises(ValueError, match="for gated weights, and only there"):
        grouped_matmul(tokens, weight, sizes, activation="swiglu")
    with pytest.raises(NotImplementedError, match="grouped_matmul has no implementation="):
        grouped_matmul(tokens, weight, sizes, implementation="jax_triton")


def test_implementations():
    names = [i.name for i in GROUPED_MATMUL.implementations]
    assert names == ["mosaic_gpu", "triton", "xla"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("gated", [True, False])
def test_the_triton_kernel_lowers(gated, monkeypatch):
    tokens, weight, sizes, bias = operands(70, [40, 0, 13], 40, 200, gated=gated)
    monkeypatch.setattr("turbojax._device.gpu_compute_capability", lambda: 8.0)
    monkeypatch.setattr("turbojax.matmul.int4.triton.needs_gpu", lambda _: None)
    call = functools.partial(
        grouped_matmul, activation="swiglu" if gated else None, implementation="triton"
    )
    text = lower_for_cuda(lambda *x: call(*x[:3], bias=x[3]), tokens, weight, sizes, bias)
    assert "turbojax_grouped_matmul" in text


@pytest.mark.parametrize(("gated", "most"), [(True, 64), (False, 128)])
def test_tiles_of_triton_fit_registers(gated, most, monkeypatch):
    """Two sums of 128 tokens do not: 512 tokens took 34 times as long as 256."""
    monkeypatch.setattr("turbojax.matmul.grouped.triton.gpu_compute_capability", lambda: 9.0)
    _, weight, *_ = operands(70, [40, 0, 13], 40, 200, gated=gated)
    for rows, tokens in ((3 * 16, 16), (3 * 64, 64), (3 * 128, most), (3 * 5000, most)):
        assert triton._launch(rows, weight, None).tokens == tokens


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


def test_bad_input_of_routing():
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
