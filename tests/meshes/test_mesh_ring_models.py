"""The heads mode of attention to split sequences, and models whose tokens are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import turbojax as tj
from tests.contracts.ring_helpers import (
    BLOCK,
    HEADS,
    OF_TOKENS,
    TOKENS,
    assert_close,
    collectives,
    config_of,
    mesh_of,
    operands,
    over,
)
from turbojax import models
from turbojax.levels import LocalWindow, SimilarityCap, TopK
from turbojax.parallel import (
    Axes,
    ContextAttention,
    heads_attention,
    permutation,
    positions,
    ring_attention,
)

pytestmark = pytest.mark.mesh

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_length=TOKENS,
)


@pytest.mark.parametrize("devices", [2, 4])
def test_heads_for_tokens(devices):
    q, k, v, sinks, ids, _ = operands()
    static = {"config": config_of("fp8"), "is_causal": True, "sinks": sinks}
    given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    given["key_bounds"] = (ids, 20 + 30 * ids)
    wanted = tj.turbo_attention(q, k, v, **given, **static)

    def call(q, k, v, ids):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        given["key_bounds"] = (ids, 20 + 30 * ids)
        op = tj.turbo_attention
        return heads_attention(op, q, k, v, axis_name="sequence", **given, **static)

    arrays = jax.device_put((q, k, v, ids), NamedSharding(mesh_of(devices), OF_TOKENS))
    program = jax.jit(over(devices, call, (OF_TOKENS,) * 4)).lower(*arrays).compile()
    np.testing.assert_array_equal(program(*arrays), wanted)
    assert collectives(program) == {"all-to-all"}


def test_heads_of_pooled_attention_have_their_levels():
    q, k, v, *_ = operands()
    blocks = {"block_q": BLOCK, "block_kv": BLOCK, "is_causal": True}
    shape = (1, HEADS, TOKENS // BLOCK, TOKENS // BLOCK)
    levels = jax.random.choice(jax.random.key(1), jnp.array([0, 1, 2, 4, 8], jnp.int8), shape)
    specs = (*(OF_TOKENS,) * 3, P(None, None, "sequence"))
    for given in (levels, levels[:, :1]):
        op = functools.partial(heads_attention, tj.pooled_attention, axis_name="sequence", **blocks)
        got = jax.jit(over(2, op, specs))(q, k, v, given)
        assert_close([got], [tj.pooled_attention(q, k, v, given, **blocks)], 2)


def test_what_does_not_fit_is_named():
    q, k, v, *_ = operands()

    def run(devices, q, k, v, **options):
        call = functools.partial(heads_attention, tj.turbo_attention, axis_name="sequence")
        call = functools.partial(call, **options)
        return jax.eval_shape(over(devices, call, (OF_TOKENS,) * 3), q, k, v)

    with pytest.raises(ValueError, match="4 query heads must be a multiple of 8 devices"):
        run(8, q, k, v)
    wide = jnp.concatenate([q, q], axis=2), *(jnp.concatenate([x] * 3, axis=2) for x in (k, v))
    with pytest.raises(ValueError, match="6 KV heads must be a multiple of 4 devices, or a div"):
        run(4, *wide)
    with pytest.raises(NotImplementedError, match="has no bias"):
        run(2, q, k, v, bias=jnp.zeros((1, 1, TOKENS, TOKENS)))
    axes = Axes(sequence="sequence", mesh=mesh_of(2))
    with pytest.raises(ValueError, match="must have a sequence axis"):
        ContextAttention(Axes(batch="sequence", mesh=mesh_of(2)))
    with pytest.raises(TypeError, match="attention='fast' must be"):
        ContextAttention(axes, "fast")
    with pytest.raises(NotImplementedError, match="compares all keys"):
        ContextAttention(axes, models.PooledAttention(SimilarityCap(TopK()), BLOCK, BLOCK))
    pooled = models.PooledAttention(TopK(), BLOCK, BLOCK)
    with pytest.raises(ValueError, match="pooled attention has one"):
        ContextAttention(axes, pooled, implementation="xla")
    large = ContextAttention(axes, models.PooledAttention(TopK(), TOKENS, TOKENS))
    with pytest.raises(ValueError, match=f"{TOKENS // 2} tokens on each of 2 devices must be"):
        jax.eval_shape(large, q, k, v)


@pytest.mark.slow
def test_a_ring_of_rings_of_heads():
    q, k, v, *_ = operands()
    mesh = mesh_of(4, ("outer", "inner"), (2, 2))
    config = config_of("int8")
    ring = functools.partial(ring_attention, axis_name="outer", attention=config, is_causal=True)
    call = functools.partial(heads_attention, ring, axis_name="inner")
    specs = P(None, ("outer", "inner"))
    got = jax.jit(over(4, call, (specs,) * 3, specs, mesh))(q, k, v)
    wanted = tj.turbo_attention(q, k, v, config=config, is_causal=True)
    assert_close([got], [wanted], 2)
    both = functools.partial(ring, axis_name=("outer", "inner"))
    assert_close([jax.jit(over(4, both, (specs,) * 3, specs, mesh))(q, k, v)], [wanted], 4)


@functools.cache
def _model():
    return models.Transformer(CONFIG, rngs=nnx.Rngs(0))


def _texts():
    tokens = jax.random.randint(jax.random.key(3), (2, TOKENS + 1), 0, CONFIG.vocab_size)
    ids = jnp.cumsum(tokens[:, :-1] < 4, axis=1, dtype=jnp.int32)
    return tokens, ids


def _loss_and_gradients(attend, tokens, ids, order=slice(None)):
    """Of a `Transformer` on packed documents."""
    graph, params = nnx.split(_model(), nnx.Param)

    @jax.jit
    def call(params, tokens, ids):
        places = jnp.broadcast_to(jnp.arange(TOKENS)[None], ids.shape)[:, order]

        def loss(params):
            model = nnx.merge(graph, params)
            inside = functools.partial(attend, segment_ids=ids[:, order])
            logits = model(tokens[:, :-1][:, order], positions=places, attend=inside)
            chosen = jax.nn.one_hot(tokens[:, 1:][:, order], CONFIG.vocab_size)
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1))

        return jax.value_and_grad(loss)(params)

    value, gradients = call(params, tokens, ids)
    return [value, *jax.tree.leaves(gradients)]


def _exactly(query, key, value, cache=None, options=None, sinks=None, segment_ids=None):
    given = {"query_segment_ids": segment_ids, "key_value_segment_ids": segment_ids}
    config = config_of("float")
    return tj.turbo_attention(query, key, value, config=config, is_causal=True, **given), cache


@pytest.mark.slow
def test_a_transformer_trains_on_split_texts():
    tokens, ids = _texts()
    mesh = mesh_of(4, ("data", "sequence"), (2, 2))
    split = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    got = _loss_and_gradients(ContextAttention(Axes.of(mesh)), split, ids)
    wanted = _loss_and_gradients(_exactly, tokens, ids)
    # Two layers and the projections around them.
    assert_close(got, wanted, 4)


@pytest.mark.fuzz
@pytest.mark.parametrize("policy", [TopK(), LocalWindow(16)], ids=["topk", "window"])
def test_a_transformer_with_pooled_attention_in_zigzag_order(policy):
    tokens, ids = _texts()
    pooled = models.PooledAttention(policy, BLOCK, BLOCK)
    attend = ContextAttention(Axes.of(mesh_of(2)), pooled, order="zigzag")
    got = _loss_and_gradients(attend, tokens, ids, permutation(TOKENS, 2))
    assert_close(got, _loss_and_gradients(pooled, tokens, ids), 2)


@pytest.mark.slow
def test_a_transformer_inside_shard_map():
    tokens, _ = _texts()
    graph, params = nnx.split(_model(), nnx.Param)
    attend = ContextAttention(Axes.of(mesh_of(2)), order="zigzag")
    order = permutation(TOKENS, 2)

    def call(params, tokens):
        places = jnp.broadcast_to(positions(tokens.shape[1], "sequence")[None], tokens.shape)
        return nnx.merge(graph, params)(tokens, positions=places, attend=attend)

    got = jax.jit(over(2, call, (P(), OF_TOKENS)))(params, tokens[:, :-1][:, order])
    assert_close([got], [_model()(tokens[:, :-1])[:, order]], 2)
