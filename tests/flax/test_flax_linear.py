"""`tj.flax.Int4Linear`: the op as an nnx module, frozen, beside what is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import turbojax as tj


def linear(inputs=200, outputs=40, use_bias=True, seed=0):
    layer = nnx.Linear(inputs, outputs, use_bias=use_bias, rngs=nnx.Rngs(seed))
    if use_bias:
        layer.bias.set_value(jnp.linspace(-1, 1, outputs))
    return layer


def tokens(rows=12, inputs=200, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, rows, inputs)), dtype)


def frozen_bytes(module):
    state = nnx.state(module, tj.flax.FrozenParam)
    return {path: np.asarray(x.get_value()).tobytes() for path, x in nnx.to_flat_state(state)}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_is_the_op(scale_dtype, use_bias):
    plain, x = linear(use_bias=use_bias), tokens()
    layer = tj.flax.Int4Linear.from_linear(
        plain, scale_dtype=scale_dtype, group_size=64, activation="silu"
    )
    kernel = plain.kernel.get_value()
    weight = tj.fireq.quantize_weight(kernel.T, scale_dtype=scale_dtype, group_size=64)
    bias = plain.bias.get_value() if use_bias else None
    residual = tokens(inputs=40, seed=1)
    want = tj.fireq.matmul(x, weight, bias=bias, activation="silu", residual=residual)
    np.testing.assert_array_equal(layer(x, residual=residual), want)
    np.testing.assert_array_equal(layer(tj.fireq.quantize_tokens(x), residual=residual), want)
    assert (layer.in_features, layer.out_features) == (200, 40)
    assert layer.weight.shape == (40, 200)
    np.testing.assert_array_equal(tj.fireq.dequantize(layer.weight), tj.fireq.dequantize(weight))
    exact = jax.nn.silu(plain(x)) + residual
    assert jnp.linalg.norm(want - exact) < 0.12 * jnp.linalg.norm(exact)


def test_gated():
    gate, up = linear(seed=1), linear(seed=2)
    weights = [tj.fireq.quantize_weight(part.kernel.get_value().T) for part in (gate, up)]
    bias = jnp.concatenate([part.bias.get_value() for part in (gate, up)])
    layer = tj.flax.Int4Linear(tj.fireq.gate_and_up(*weights), bias=bias, activation="swiglu")
    x = tokens()
    assert layer.out_features == 40
    assert layer.weight.gated
    np.testing.assert_array_equal(tj.fireq.dequantize(layer.weight).shape, (80, 200))
    exact = jax.nn.silu(gate(x)) * up(x)
    assert jnp.linalg.norm(layer(x) - exact) < 0.2 * jnp.linalg.norm(exact)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_jit_and_state(dtype):
    """A module's state goes through `nnx.jit`, and through split and merge, bit for bit."""
    layer, x = tj.flax.Int4Linear.from_linear(linear()), tokens(dtype=dtype)
    want = layer(x)
    assert want.dtype == dtype
    call = nnx.jit(lambda layer, x: layer(x))
    np.testing.assert_array_equal(call(layer, x), want)
    graph, state = nnx.split(layer)
    np.testing.assert_array_equal(nnx.merge(graph, jax.device_get(state))(x), want)
    assert state["codes"].get_value().dtype == jnp.uint8


def test_only_the_bias_is_trained():
    layer, x = tj.flax.Int4Linear.from_linear(linear()), tokens()
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))] == [("bias",)]
    before = frozen_bytes(layer)
    assert len(before) == 3

    def loss(layer, x):
        return jnp.mean(layer(x) ** 2)

    value, grads = nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)
    want = 2 * jnp.mean(layer(x), axis=(0, 1)) / 40
    np.testing.assert_allclose(grads[0]["bias"].get_value(), want, atol=1e-6)
    assert np.asarray(grads[1]).any()
    optimizer = nnx.Optimizer(layer, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(layer, grads[0])
    assert loss(layer, x) < value
    assert frozen_bytes(layer) == before


class _Network(nnx.Module):
    """Two quantized layers with low-rank adapters beside them."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = (
            nnx.LoRA(
                inputs,
                4,
                outputs,
                base_module=tj.flax.Int4Linear.from_linear(linear(inputs, outputs, False, seed)),
                rngs=rngs,
            )
            for seed, (inputs, outputs) in enumerate(((200, 40), (40, 200)))
        )

    def __call__(self, x):
        return self.second(jax.nn.gelu(self.first(x)))


@pytest.mark.slow
def test_low_rank_adapters():
    """They learn a task through both quantized layers, whose bits stay as they are."""
    network, x = _Network(nnx.Rngs(0)), tokens()
    plain = network.second.base_module(jax.nn.gelu(network.first.base_module(x)))
    np.testing.assert_array_equal(network(x), plain)  # adapters begin at zero
    teacher = _Network(nnx.Rngs(1))
    for seed, layer in enumerate((teacher.first, teacher.second)):
        shape = layer.lora_b.get_value().shape
        layer.lora_b.set_value(0.1 * jax.random.normal(jax.random.key(seed), shape))
    target = teacher(x)
    before = frozen_bytes(network)
    assert len(before) == 6
    optimizer = nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.LoRAParam)

    def loss(network):
        return jnp.mean((network(x) - target) ** 2)

    @nnx.jit
    def step(network, optimizer):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(network)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
            optimizer.update(network, grads)
        return value, grads

    first, grads = step(network, optimizer)
    assert len(nnx.to_flat_state(grads)) == 4
    for _ in range(40):
        last, grads = step(network, optimizer)
    assert all(np.asarray(g.get_value()).any() for _, g in nnx.to_flat_state(grads))
    assert last < 0.2 * first
    assert frozen_bytes(network) == before


@pytest.mark.slow
def test_layers_in_a_scan():
    """Stacked layers, as `turbojax.models` holds them."""
    layers = [tj.flax.Int4Linear.from_linear(linear(64, 64, True, seed)) for seed in range(3)]
    graph, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(nnx.state(layer) for layer in layers))
    x = tokens(inputs=64)
    want = layers[2](layers[1](layers[0](x)))

    def run(x, stacked):
        return jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x), None), x, stacked)[0]

    np.testing.assert_array_equal(jax.jit(run)(x, stacked), want)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_precision_is_handed_on(monkeypatch, precision):
    seen = []

    def matmul(x, weight, **options):
        seen.append(options["precision"])
        return tj.fireq.matmul(x, weight, **options)

    monkeypatch.setattr("turbojax.flax.linear.matmul", matmul)
    layer = tj.flax.Int4Linear.from_linear(linear(), precision=precision)
    nnx.jit(lambda layer, x: layer(x))(layer, tokens())
    assert seen == [precision]


def test_bad_input():
    module, weight = tj.flax.Int4Linear, tj.fireq.quantize_weight(jnp.ones((4, 8)))
    with pytest.raises(TypeError, match="weight is a ArrayImpl, must be an Int4Weight"):
        module(jnp.ones((4, 8)))
    with pytest.raises(ValueError, match="for gated weights, and only there"):
        module(weight, activation="swiglu")
    with pytest.raises(ValueError, match=r"bias.shape=\(8,\) must be \(4,\)"):
        module(weight, bias=jnp.ones(8))
    with pytest.raises(ValueError, match="precision='exact' must be None"):
        module(weight, precision="exact")
    with pytest.raises(TypeError, match="linear is a Embed, must be an nnx.Linear"):
        module.from_linear(nnx.Embed(4, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"must be \[..., 8\]"):
        module(weight)(jnp.ones((2, 4)))
    with pytest.raises(AttributeError, match="has no attribute 'linears'"):
        _ = tj.linears


@pytest.mark.slow
def test_flax_is_imported_when_it_is_used():
    import subprocess
    import sys

    code = (
        "import sys, turbojax as tj; assert 'flax' not in sys.modules; "
        "tj.flax.Int4Linear; assert 'flax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_fireq_is_there():
    assert [name for name in tj.fireq.__all__ if not callable(getattr(tj.fireq, name))] == []
    assert tj.fireq.quantize_model is tj.models.quantize_model
    with pytest.raises(AttributeError, match=r"'turbojax.fireq' has no attribute 'quantise'"):
        _ = tj.fireq.quantise
