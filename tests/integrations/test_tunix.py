"""turbojax in Tunix: the training step against its own attention, and caches in its sampler."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.integrations.helpers import (
    CLOSE_TO_CODES,
    CLOSE_TO_EXACT,
    FLOAT,
    ROUNDING,
    Letters,
    assert_trains_alike,
    random_like,
    relative_error,
)
from turbojax.flax import TurboAttentionFn
from turbojax.integrations import tunix as adapter

pytestmark = pytest.mark.integrations

WIDTHS = {
    "num_layers": 2,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 32,
    "num_kv_heads": 2,
}
B, T = 2, 24
PADDING = np.array([[0, 3], [5, 0]])  # on the left, on the right
# Tunix' first Gemma places its window by positions that leave out padding on the left, and so shows
# too few keys after it.
PADDING_RIGHT = np.array([[0, 3], [0, 5]])
NAMES = {
    "llama3": "Llama3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma3": "Gemma3",
}


def make_model(family):
    """A random model of two layers; Gemma's first one, and Gemma 3's both, have a window of 6."""
    module = importlib.import_module(f"tunix.models.{family}.model")
    if family.startswith("gemma"):
        config = {
            "num_embed": Letters.vocab_size,
            "sliding_window_size": 6,
        }
        own = {
            "gemma": {
                "attention_types": (
                    module.AttentionType.LOCAL_SLIDING,
                    module.AttentionType.GLOBAL,
                ),
                "attn_logits_soft_cap": 20.0,
                "final_logit_softcap": 30.0,
                "use_post_attn_norm": True,
                "use_post_ffw_norm": True,
            },
            "gemma3": {"param_dtype": jnp.float32},
        }[family]
    else:
        config = {"vocab_size": Letters.vocab_size, "rope_theta": 10_000, "norm_eps": 1e-6}
        own = {} if family == "llama3" else {"use_tied_embedding": False}
    model_config = module.ModelConfig(**WIDTHS, **config, **own)
    model = getattr(module, NAMES[family])(model_config, rngs=nnx.Rngs(0))
    nnx.update(model, random_like(nnx.state(model, nnx.Param), seed=1))
    return model


def batch(padding=PADDING):
    """Tokens, positions and mask, padded on either side, as Tunix' trainers make them."""
    from tunix.generate import utils

    tokens = jax.random.randint(jax.random.key(0), (B, T), 3, Letters.vocab_size)
    place = np.arange(T)[None]
    real = jnp.asarray((place >= padding[:, :1]) & (place < T - padding[:, 1:]))
    tokens = jnp.where(real, tokens, 0)
    return tokens, real, utils.build_positions_from_mask(real), utils.make_causal_attn_mask(real, T)


def step(model, inputs):
    """The loss of the next tokens and its gradient, as ``tunix.sft.peft_trainer`` takes them."""
    tokens, real, positions, mask = inputs

    def loss(model):
        logits, _ = model(tokens, positions, None, mask)
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
        weight = (real[:, 1:] & real[:, :-1]).astype(jnp.float32)
        return -(picked * weight).sum() / weight.sum()

    return nnx.value_and_grad(loss)(model)


@pytest.mark.parametrize("family", adapter.FAMILIES)
def test_training_step(family):
    inputs = batch(PADDING_RIGHT if family == "gemma" else PADDING)
    given = {"is_causal": True, "segments": True, "warn": False}
    exact, eight = (
        adapter.use_turbojax(make_model(family), attention=x)
        for x in (TurboAttentionFn(FLOAT, **given), TurboAttentionFn(**given))
    )
    assert_trains_alike(
        step(make_model(family), inputs), *(step(model, inputs) for model in (exact, eight))
    )
    paths = [
        jax.tree.structure(nnx.to_pure_dict(nnx.state(x))) for x in (exact, make_model(family))
    ]
    assert paths[0] == paths[1]


def train(model):
    """Parameters after two steps of Tunix' trainer."""
    import optax
    from tunix.sft import peft_trainer

    tokens, real, positions, mask = batch(PADDING_RIGHT)
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10, max_steps=2)
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(0.1), config)
    rest = {"positions": positions, "attention_mask": mask}
    trainer.with_gen_model_input_fn(
        lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask, **rest}
    )
    data = peft_trainer.TrainingInput(input_tokens=np.asarray(tokens), input_mask=np.asarray(real))
    trainer.train([data, data])
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_its_trainer():
    """What two steps change is the same, with padding on the right."""
    before = nnx.to_pure_dict(nnx.state(make_model("qwen3"), nnx.Param))
    theirs = train(make_model("qwen3"))
    exact = TurboAttentionFn(FLOAT, is_causal=True, segments=True, warn=False)
    ours = train(adapter.use_turbojax(make_model("qwen3"), attention=exact))
    assert relative_error(ours, theirs) < 100 * ROUNDING
    assert relative_error(before, theirs) > 0.01


def sampler(model):
    from tunix.generate import sampler as theirs

    config = theirs.CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=32)
    return theirs.Sampler(model, Letters(), config)


def sample(model, steps=20, **options):
    """Greedy texts of prompts of unlike lengths, which the sampler pads on the left."""
    prompts = ["hello", "ab", "thequickbrownfox"]
    return sampler(model)(prompts, max_generation_steps=steps, **options)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma3"])
def test_greedy_text_of_an_exact_cache(family):
    """Equal text; a windowed layer keeps its window alone."""
    text = sample(make_model(family)).text
    assert sample(adapter.use_turbojax(make_model(family))).text == text
    assert len(set("".join(text))) > 3, text


def test_beams_of_an_exact_cache():
    """The sampler repeats and reorders what a cache holds, sequence by sequence."""
    texts = [
        sample(model, steps=8, beam_size=2).text
        for model in (make_model("llama3"), adapter.use_turbojax(make_model("llama3")))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "cache", ["exact", "kv4", "k8v4", "turbo4", tj.TurboConfig(block_kv=16, buffer_size=16)]
)
def test_logits_of_a_cache(cache):
    """Of two steps, before texts part; the prompts' own are those of whole prompts."""
    theirs = sample(make_model("llama3"), steps=2, return_logits=True).logits
    model = adapter.use_turbojax(make_model("llama3"), cache=cache)
    ours = sample(model, steps=2, return_logits=True).logits
    bound = CLOSE_TO_EXACT if cache == "exact" else CLOSE_TO_CODES
    for x, y in zip(ours, theirs, strict=True):
        assert relative_error(x[:2], y[:2]) < bound


def test_refusals():
    model = make_model("llama3")
    with pytest.raises(TypeError, match="must be one of tunix.models.llama3.model"):
        adapter.use_turbojax(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="must be causal"):
        adapter.use_turbojax(model, attention=TurboAttentionFn())
    with pytest.raises(ValueError, match="cache='kv5' must be"):
        adapter.use_turbojax(model, cache="kv5")
    tokens, _, positions, _ = batch()
    changed = adapter.use_turbojax(model)
    with pytest.raises(ValueError, match="must hide the keys after each query"):
        changed(tokens, positions, None, jnp.ones((B, T, T), bool))
    with pytest.raises(TypeError, match="not changed before"):
        adapter.use_turbojax(changed)
