"""`turbojax.remat`: what a policy of `jax.checkpoint` saves is not made anew."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.contracts.ring_helpers import mesh_of
from tests.training.finetune_helpers import SETTINGS, TINY, corpus, tiny_model
from turbojax import finetune, models, parallel, remat

BLOCKS = {"block_q": 16, "block_kv": 16, "is_causal": True}
CONFIG = tj.TurboConfig(block_q=16, block_kv=16)


def turbo(query, key, value, sinks):
    out, lse = tj.turbo_attention(
        query, key, value, config=CONFIG, is_causal=True, sinks=sinks, return_residual=True
    )
    return out + lse[..., None]


def pooled(query, key, value, sinks):
    levels = tj.select_levels(query, key, tj.levels.TopK(0.4, 0.7, 0.9, 1.0), **BLOCKS)
    out, lse = tj.pooled_attention(
        query, key, value, levels, sinks=sinks, **BLOCKS, return_residual=True
    )
    return out + lse[..., None]


def ring(query, key, value, sinks):
    """Over one device: the rule is that of many."""
    axes = parallel.Axes(sequence="sequence", mesh=mesh_of(1))
    return parallel.ContextAttention(axes, CONFIG)(query, key, value, sinks=sinks)[0]


def counts(function, *arguments):
    """How often each primitive stands in a function's program, at any depth."""
    found = collections.Counter()

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] += 1
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count(inner)

    count(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def operands():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 48, heads, 16)) for heads in (2, 1, 1)]
    return [jnp.asarray(x, jnp.float32) for x in (*arrays, rng.normal(size=2))]


def gradient(attend, policy):
    """Of a layer whose queries, keys and values are made inside it."""

    def loss(query, key, value, sinks):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(*x):
            return attend(*map(jnp.flip, x), sinks)

        return jnp.sum(jnp.cos(layer(query, key, value)))

    return jax.grad(loss, argnums=(0, 1, 2, 3))


@pytest.mark.parametrize("attend", [turbo, pooled, ring])
def test_attention_is_not_computed_again(attend):
    """Its rule stands in the forward pass alone; queries, keys and values are made twice."""
    every, saved = (gradient(attend, x) for x in (None, remat.save_attention))
    plain = gradient(attend, jax.checkpoint_policies.everything_saveable)
    all_of, few, least = (counts(x, *operands()) for x in (every, saved, plain))
    assert all_of["custom_vjp_call"] == few["custom_vjp_call"] + 1
    assert few["custom_vjp_call"] == least["custom_vjp_call"]
    assert few["rev"] == least["rev"] + 3
    assert few["sort"] == all_of["sort"] // 2 == (attend is pooled)  # levels are kept, too


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize("attend", [turbo, pooled, ring])
def test_gradients_are_the_same_bits(attend):
    """As where everything is kept; XLA may round otherwise what it computes twice."""
    kept = jax.checkpoint_policies.everything_saveable
    every, saved = (gradient(attend, x) for x in (kept, remat.save_attention))
    for one, other in zip(*(jax.jit(x)(*operands()) for x in (every, saved)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(one)


def model_gradient(remat):
    """Of a model with pooled attention, and its parameters."""
    attend = models.PooledAttention(tj.levels.TopK(0.4, 0.7, 0.9, 1.0), block_q=16, block_kv=16)
    tokens = jnp.asarray(np.random.default_rng(1).integers(256, size=(1, 48)))
    graph, params = nnx.split(models.Transformer(TINY, remat=remat, rngs=nnx.Rngs(1)))

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(tokens, attend=attend)))

    return jax.grad(loss), params


def test_models_keep_what_attention_keeps():
    every, few = (counts(*model_gradient(x)) for x in (True, "attention"))
    assert every["custom_vjp_call"] == few["custom_vjp_call"] + 1
    assert every["sort"] == 2 * few["sort"] == 2


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="remat='all' must be True, False or 'attention'"):
        models.Transformer(TINY, remat="all", rngs=nnx.Rngs(0))
    settings = dataclasses.replace(SETTINGS, remat="attention")
    with pytest.raises(ValueError, match="remat='attention' must be 'none' or 'full' without poo"):
        finetune.Trainer(tiny_model(), settings, corpus().stream)
    with pytest.raises(ValueError, match="remat='layers' must be one of none, full, attention"):
        dataclasses.replace(SETTINGS, remat="layers")
