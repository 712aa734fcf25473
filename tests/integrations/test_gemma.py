"""turbojax in Google DeepMind's gemma: the training step, and caches in its sampler."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from tests.integrations.helpers import (
    CLOSE_TO_CODES,
    CLOSE_TO_EXACT,
    FLOAT,
    assert_trains_alike,
    random_like,
    relative_error,
)
from turbojax.flax import TurboAttentionFn
from turbojax.integrations.gemma import with_turbojax

pytestmark = pytest.mark.integrations

B, T = 2, 20
PROMPTS = ["Hello", "My name is", "hello world ! My name is Morgane"]


@pytest.fixture(scope="module")
def gm():
    """gemma 3.3.0 names a class that kauldron has renamed since its last one without jax 0.10."""
    from kauldron import kd

    if not hasattr(kd.ckpts, "AbstractPartialLoader"):
        kd.ckpts.AbstractPartialLoader = kd.ckpts.InitTransform
    from gemma import gm

    return gm


def make_model(gm, **changes):
    """Two layers of Gemma 3, the first one with a window, or with the caps of Gemma 2."""
    kinds = gm.nn.AttentionType
    config = dataclasses.replace(
        gm.testing.DummyGemma.config,
        num_embed=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        hidden_dim=64,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=5,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
    )
    config = dataclasses.replace(config, **changes)
    return gm.testing.DummyGemma(config=config, tokens="tokens", dtype=jnp.float32)


def make_params(model, seed=1):
    tokens = jnp.zeros((1, 4), jnp.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
    return random_like(shapes["params"], seed)


CHANGES = {
    "Gemma 3": {},
    "Gemma 2": {"use_qk_norm": False, "attn_logits_soft_cap": 20.0, "final_logit_softcap": 30.0},
    "one KV head": {"num_kv_heads": 1},
}


def step(model, params, tokens):
    """The loss of the next tokens, as kauldron's trainer takes it, and its gradient."""

    def loss(params):
        logits = model.apply({"params": params}, tokens).logits
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
        weight = (tokens[:, 1:] != 0).astype(jnp.float32)
        return -(picked * weight).sum() / weight.sum()

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("name", CHANGES)
def test_training_step(gm, name):
    model = make_model(gm, **CHANGES[name])
    params = make_params(model)
    tokens = jax.random.randint(jax.random.key(0), (B, T), 3, 14)
    tokens = jnp.where(jnp.arange(T) < jnp.array([[T], [13]]), tokens, 0)
    given = {"is_causal": True, "segments": True, "warn": False}
    exact, eight = TurboAttentionFn(FLOAT, **given), TurboAttentionFn(**given)
    assert_trains_alike(
        step(model, params, tokens),
        *(step(with_turbojax(model, attention=x), params, tokens) for x in (exact, eight)),
    )


def sample(gm, model, params, prompt, **options):
    sampler = gm.text.Sampler(
        model=model,
        params=params,
        tokenizer=gm.testing.DummyTokenizer(),
        cache_length=64,
        max_out_length=24,
        pad_length=16,
        forbidden_tokens=[14, 15],
    )
    return sampler.sample(prompt, max_new_tokens=20, return_state=True, **options)


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_text_of_an_exact_cache(gm, name):
    """Prompts of unlike lengths, padded on the right."""
    model = make_model(gm, **CHANGES[name])
    params = make_params(model)
    theirs = sample(gm, model, params, PROMPTS)
    ours = sample(gm, with_turbojax(model), params, PROMPTS)
    assert ours.text == theirs.text
    assert len({int(x) for x in theirs.state.predicted_tokens.ravel()}) > 3, theirs.text
    held = ours.state.cache["layer_1"]["k"].cache
    # The prompts with what begins them, and all new tokens but the last.
    assert held.lengths.tolist() == [2 + 19, 4 + 19, 8 + 19]


def first_logits(gm, model, params):
    """Of a prompt, and of the token after it, through a cache as the sampler uses it."""
    tokens = jax.random.randint(jax.random.key(0), (B, 9), 3, 14)
    lower = jnp.tril(jnp.ones((8, 8), bool))
    mask = jnp.broadcast_to(jnp.pad(lower, ((0, 0), (0, 24))), (B, 8, 32))
    place = jnp.broadcast_to(jnp.arange(9), (B, 9))
    cache = model.init_cache(batch_size=B, dtype=jnp.float32, cache_length=32)
    rest = {"attention_mask": mask, "positions": place[:, :8]}
    prompt = model.apply({"params": params}, tokens[:, :8], cache=cache, **rest)
    seen = jnp.broadcast_to(jnp.arange(32) < 9, (B, 1, 32))
    rest = {"attention_mask": seen, "positions": place[:, 8:]}
    return model.apply({"params": params}, tokens[:, 8:], cache=prompt.cache, **rest).logits


@pytest.mark.parametrize(
    "cache", ["exact", "kv4", "k8v4", tj.TurboConfig(block_kv=16, buffer_size=16)]
)
def test_logits_of_a_cache(gm, cache):
    model = make_model(gm)
    params = make_params(model)
    theirs = first_logits(gm, model, params)
    ours = first_logits(gm, with_turbojax(model, cache=cache), params)
    bound = CLOSE_TO_EXACT if cache == "exact" else CLOSE_TO_CODES
    assert relative_error(ours, theirs) < bound


def test_refusals(gm):
    model = make_model(gm)
    params = make_params(model)
    with pytest.raises(TypeError, match="must be a gm.nn.Transformer"):
        with_turbojax(gm.nn.Embedder(4, 4))
    with pytest.raises(ValueError, match="must be causal"):
        with_turbojax(model, attention=TurboAttentionFn())
    changed = with_turbojax(model)
    first = sample(gm, changed, params, "My name is")
    with pytest.raises(NotImplementedError, match="serves one turn"):
        sample(gm, changed, params, "Hello", last_state=first.state)
    with pytest.raises(NotImplementedError, match="take one without pages"):
        sample(gm, with_turbojax(model, cache="turbo4"), params, "Hello")
    with pytest.raises(NotImplementedError, match="sharding="):
        changed.init_cache(batch_size=1, dtype=jnp.float32, cache_length=8, sharding=object())
