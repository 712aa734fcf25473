"""The linen twin of `TurboAttention`: the nnx module's parameters give the nnx module's results."""

import doctest
import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import ModifyScopeVariableError
from jax.sharding import PartitionSpec as P

import turbojax as tj
from tests.flax.flax_helpers import (
    CHANNELS,
    HEADS,
    KV_HEADS,
    ROUNDING,
    SMALL,
    WIDTH,
    equal,
    module,
    tokens,
)
from turbojax.caches import AttentionOptions
from turbojax.flax import linen
from turbojax.rotary import Rope

VARIANTS = {
    "plain": {},
    "biases and norms, no positions": {
        "qkv_bias": True,
        "output_bias": True,
        "qk_norm_eps": 1e-3,
        "dtype": jnp.bfloat16,
        "cache": "exact",
        "rope": None,
    },
    "options": {
        "cache": "paged",
        "options": AttentionOptions(scale=0.5, local_window_size=5, logits_soft_cap=0.7),
        "rope": Rope(CHANNELS, theta=100.0, rotary_dim=4),
    },
}
CACHE = {"mutable": ["cache"]}


def twin(**options):
    return linen.TurboAttention(WIDTH, HEADS, KV_HEADS, CHANNELS, **options)


def params_of(layer):
    """An nnx module's parameters as linen's."""
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@pytest.mark.fuzz
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_parameters_same_results(variant):
    """Bit for bit, both ways, whole and through a cache."""
    options = {"cache": SMALL, **VARIANTS[variant]}
    ours, other = module(**options), twin(**options)
    x, lengths, new = tokens(20), jnp.array([20, 3]), tokens(2, seed=1)
    made = other.init(jax.random.key(3), x)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, {"params": params_of(ours)})

    variables = {"params": params_of(ours)}
    positions = None if ours.rope is None else jnp.asarray(np.arange(40).reshape(2, 20))
    whole = other.apply(variables, x, positions=positions, lengths=lengths)
    np.testing.assert_array_equal(whole, ours(x, positions=positions, lengths=lengths))
    _, cache = other.apply({}, 2, 48, method="init_cache", **CACHE)
    out, cache = other.apply({**variables, **cache}, x, lengths, method="prefill", **CACHE)
    ours.init_cache(2, 48)
    np.testing.assert_array_equal(out, ours.prefill(x, lengths))
    out, cache = other.apply({**variables, **cache}, new, method="decode", **CACHE)
    np.testing.assert_array_equal(out, ours.decode(new))
    equal(cache["cache"]["kv_cache"], ours.cache)

    # And back: linen's own parameters in the nnx module.
    state = nnx.state(ours, nnx.Param)
    nnx.replace_by_pure_dict(state, made["params"])
    nnx.update(ours, state)
    np.testing.assert_array_equal(ours(x), other.apply(made, x))


@pytest.mark.slow
def test_caches_under_jit():
    ours, other = module(cache="exact"), twin(cache="exact")
    variables = {"params": params_of(ours)}
    step = jax.jit(lambda v, x: other.apply(v, x, method="decode", **CACHE))
    _, cache = other.apply({}, 2, 48, method="init_cache", **CACHE)
    ours.init_cache(2, 48)
    ours_step = nnx.jit(lambda layer, x: layer.decode(x))
    for length in (5, 1, 1):
        x = tokens(length, seed=length)
        out, cache = step({**variables, **cache}, x)
        np.testing.assert_allclose(out, ours_step(ours, x), rtol=0, atol=ROUNDING)
    assert cache["cache"]["kv_cache"].lengths.tolist() == [7, 7]
    # What is too long is reported.
    for _ in range(9):
        _, cache = step({**variables, **cache}, tokens(5))
    assert cache["cache"]["kv_cache"].overflowed.all()


@pytest.mark.slow
def test_initial_parameters():
    """Variance 1 over the inputs; norms and biases begin as they do in nnx."""
    made = twin(qkv_bias=True, qk_norm_eps=1e-3).init(jax.random.key(0), tokens(2))["params"]
    for name in ("q_proj", "o_proj"):
        kernel = made[name]["kernel"]
        assert abs(float(jnp.std(kernel)) * kernel.shape[0] ** 0.5 - 1) < 0.15
    assert not made["q_proj"]["bias"].any()
    assert (made["k_norm"]["scale"] == 1).all()
    assert set(made) == {*(f"{c}_proj" for c in "qkvo"), "q_norm", "k_norm"}


@pytest.mark.slow
def test_gradient():
    ours, other, x = module(cache=SMALL), twin(cache=SMALL), tokens(12)
    want = nnx.grad(lambda layer: jnp.square(layer(x)).sum())(ours)
    got = jax.grad(lambda p: jnp.square(other.apply({"params": p}, x)).sum())(params_of(ours))
    equal(got, nnx.to_pure_dict(want))


@pytest.mark.slow
def test_annotations():
    """`sharding` boxes parameters; boxed ones work like others."""
    other, x = twin(sharding=("embed", "heads"), qkv_bias=True, output_bias=True), tokens(4)
    boxed = other.init(jax.random.key(0), x)
    spec = nn.get_partition_spec(boxed)["params"]
    assert spec["q_proj"] == {"kernel": P("embed", "heads"), "bias": P("heads")}
    assert spec["o_proj"] == {"kernel": P("heads", "embed"), "bias": P("embed")}
    plain = nn.unbox(boxed)
    np.testing.assert_array_equal(other.apply(boxed, x), other.apply(plain, x))


@pytest.mark.slow
def test_layers_in_a_scan():
    """`nn.scan` over layers stacks parameters and caches."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, method):
            attention = twin(cache=SMALL, name="attention")
            if method == "init_cache":
                attention.init_cache(2, 32)
                return x, None
            return x + getattr(attention, method)(x), None

    stack = nn.scan(
        Layer,
        variable_axes={"params": 0, "cache": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=2,
    )()
    x = tokens(12)
    variables = stack.init(jax.random.key(0), x, "__call__")
    _, cache = stack.apply(variables, x, "init_cache", **CACHE)
    (out, _), cache = stack.apply({**variables, **cache}, x, "prefill", **CACHE)
    hidden = x
    for i in range(2):
        own = jax.tree.map(lambda x, i=i: x[i], variables["params"]["attention"])
        hidden = hidden + twin(cache=SMALL).apply({"params": own}, hidden)
    np.testing.assert_allclose(out, hidden, rtol=0, atol=2 * ROUNDING)
    assert cache["cache"]["attention"]["kv_cache"].lengths.tolist() == [[12, 12]] * 2


@pytest.mark.slow
def test_what_is_refused():
    other, x = twin(cache=SMALL), tokens(5)
    variables = other.init(jax.random.key(0), x)
    for method in ("prefill", "decode"):
        with pytest.raises(ValueError, match="there is no cache: make one with apply"):
            other.apply(variables, x, method=method, **CACHE)
    _, cache = other.apply({}, 2, 32, method="init_cache", **CACHE)
    with pytest.raises(ModifyScopeVariableError):
        other.apply({**variables, **cache}, x, method="decode")
    _, cache = other.apply({**variables, **cache}, x, method="prefill", **CACHE)
    with pytest.raises(ValueError, match=r"cache.lengths=\[5, 5\] must be 0 before a prompt"):
        other.apply({**variables, **cache}, x, method="prefill", **CACHE)
    with pytest.raises(ValueError, match="head_dim=8 must equal rope.head_dim=16"):
        twin(rope=Rope(16)).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="cache='5bit' must be"):
        twin(cache="5bit").init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="implementation='bogus' must be None or one of"):
        twin(implementation="bogus").init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="qk_norm_eps=-5.0 must be at least 0"):
        twin(qk_norm_eps=-5.0).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="must be a pair"):
        twin(sharding=("model",)).init(jax.random.key(0), x)


def test_modules_are_static():
    """Equal modules are one key of `jit`."""
    assert twin(cache=SMALL) == twin(cache=SMALL) != twin(cache="exact")
    assert hash(twin(cache=SMALL)) == hash(twin(cache=SMALL))
    assert isinstance(tj.flax.linen.TurboAttention, type)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["attention", "attention_fn", "linen"])
def test_examples(name):
    """The docstrings' examples run and show what they say."""
    result = doctest.testmod(importlib.import_module(f"turbojax.flax.{name}"))
    assert result.attempted
    assert not result.failed
