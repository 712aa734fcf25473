"""`tj.fireq.grouped_matmul`: each expert's tokens against the oracle, and what it refuses."""

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
    lost = np.zeros((20, 40), bool)
    lost[5] = lost[4:17, 7] = True  # row 18 belongs to nobody
    np.testing.assert_array_equal(np.isnan(got), lost)
    np.testing.assert_array_equal(got[~lost], clean[~lost])


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
