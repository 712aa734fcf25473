"""Sinks of a layer, on their way from its parameters to every kind of cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from turbojax import flax as tj_flax
from turbojax import models
from turbojax.kv import (
    AttentionOptions,
    PooledAttention,
    attend_new_tokens,
    attend_prompt,
    causal_attention,
    init_layer_cache,
    padded_attention,
)
from turbojax.levels import LocalWindow

HEADS, KV_HEADS, HEAD_DIM, TOKENS, PROMPT = 4, 2, 16, 40, 30
LENGTHS = (40, 23)
SINKS = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)
CONFIG = tj.TurboConfig(softmax="exact", block_kv=32, buffer_size=32)
KINDS = {
    "exact": ("exact", 3e-6),
    "paged": ("paged", 3e-6),
    "kv4": ("kv4", 0.6),
    "4bit": (CONFIG, 0.3),
    "turbo4": ("turbo4", 0.6),
}
OPTIONS = {
    "plain": AttentionOptions(),
    "window and cap": AttentionOptions(local_window_size=9, logits_soft_cap=3.0),
}


def operands(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, TOKENS, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def oracle(query, key, value, options=OPTIONS["plain"], sinks=SINKS):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out, window, cap = np.zeros(query.shape), options.local_window_size, options.logits_soft_cap
    for b, t, n in np.ndindex(query.shape[:3]):
        first, h = 0 if window is None else max(0, t - window + 1), n // (HEADS // KV_HEADS)
        scores = key[b, first : t + 1, h] @ query[b, t, n] * HEAD_DIM**-0.5
        scores = np.exp(scores if cap is None else cap * np.tanh(scores / cap))
        out[b, t, n] = scores @ value[b, first : t + 1, h] / (scores.sum() + np.exp(sinks[n]))
    return out


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_attends_with_sinks(kind, options):
    kind, limit = kind
    query, key, value = operands()
    want, lengths = oracle(query, key, value, options), jnp.minimum(jnp.array(LENGTHS), PROMPT)
    cache = init_layer_cache(2, 64, KV_HEADS, HEAD_DIM, kind=kind, dtype=jnp.float32)
    part = [x[:, :PROMPT] for x in (query, key, value)]
    out, cache = attend_prompt(lengths)(*part, cache, options, SINKS)
    for b, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(out[b, :length], want[b, :length], atol=limit, rtol=0)
    rest = [x[:, PROMPT:] for x in (query, key, value)]
    out, _ = attend_new_tokens()(*rest, cache, options, SINKS)
    np.testing.assert_allclose(out[0], want[0, PROMPT:], atol=limit, rtol=0)


@pytest.mark.slow
def test_attention_within_whole_sequences_takes_sinks():
    query, key, value = operands()
    want = oracle(query, key, value)
    attends = {
        "causal": causal_attention,
        "padded": padded_attention(jnp.ones((2, TOKENS), jnp.bool_)),
        "pooled": PooledAttention(LocalWindow(TOKENS), 8, 8),
    }
    for name, attend in attends.items():
        out, _ = attend(query, key, value, None, OPTIONS["plain"], SINKS)
        np.testing.assert_allclose(out, want, atol=5e-6, rtol=0, err_msg=name)


MODEL = models.TransformerConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_length=64,
    attention_sinks=True,
)


def model():
    made = models.Transformer(MODEL, rngs=nnx.Rngs(0))
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal((2, HEADS)), jnp.float32)
    made.blocks.attention.sinks = nnx.Param(sinks)
    return made


@pytest.mark.slow
def test_a_models_sinks_are_parameters_that_learn():
    made = model()
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(made)))
    assert MODEL.num_parameters == sum(x.size for x in leaves)
    tokens = jnp.arange(24)[None] % 32
    graph, state = nnx.split(made)

    def loss(state):
        return jnp.mean(jax.nn.logsumexp(nnx.merge(graph, state)(tokens), axis=-1))

    gradient = jax.jit(jax.grad(loss))(state)["blocks"]["attention"]["sinks"].get_value()
    assert gradient.shape == (2, HEADS)
    step, sinks = 1e-2, made.blocks.attention.sinks.get_value()
    values = []
    for sign in (1, -1):
        made.blocks.attention.sinks = nnx.Param(sinks.at[1, 2].add(sign * step))
        values.append(jax.jit(loss)(nnx.state(made)))
    slope = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(gradient[1, 2], slope, rtol=0.05, atol=2e-6)


@pytest.mark.slow
def test_generation_through_a_cache_and_the_engine_say_what_the_model_says():
    made = model()
    prompt, count = [3, 1, 4, 1, 5], 6
    text = list(prompt)
    for _ in range(count):
        text.append(int(jnp.argmax(made(jnp.array([text]))[0, -1])))
    decoder = models.unstack(made)
    assert decoder.layers[0]["attention"]["sinks"].shape == (HEADS,)
    for cache in ("exact", "paged"):
        got = models.generate(decoder, [prompt], max_new_tokens=count, cache=cache)
        assert np.asarray(got)[0].tolist()[-count:] == text[-count:]
    engine = models.Engine(decoder, num_pages=4, page_size=16, max_sequences=2, step_tokens=16)
    number = engine.add(models.Request(prompt, max_new_tokens=count))
    assert list(engine.run()[number].tokens) == text[-count:]


@pytest.mark.fuzz
@pytest.mark.parametrize("cache", ["exact", CONFIG], ids=["exact", "4bit"])
def test_flax_modules_have_sinks(cache):
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    options = {"use_sinks": True, "cache": cache, "attention": "exact"}
    module = tj_flax.TurboAttention(32, **sizes, **options, rngs=nnx.Rngs(0))
    module.sinks.set_value(jnp.asarray(SINKS).at[3].set(1.0))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 12, 32)), jnp.float32)
    whole = module(x)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    twin = tj_flax.linen.TurboAttention(32, **sizes, **options)
    assert twin.init(jax.random.key(0), x)["params"]["sinks"].shape == (HEADS,)
    np.testing.assert_allclose(twin.apply({"params": params}, x), whole, atol=1e-6)
    without = tj_flax.TurboAttention(32, **sizes, cache=cache, rngs=nnx.Rngs(0))
    assert without.sinks is None
    module.init_cache(2, 32)
    prompt = module.prefill(x[:, :8])
    np.testing.assert_allclose(prompt, whole[:, :8], atol=1e-5)
    more = module.decode(x[:, 8:])
    np.testing.assert_allclose(more, whole[:, 8:], atol=1e-5 if cache == "exact" else 0.2)
    gradient = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(module)["sinks"].get_value()
    assert np.all(np.abs(gradient) > 0)
