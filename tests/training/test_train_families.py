"""All weights of a tiny model of every family that loads: two steps, and what is saved then."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import family_helpers, hf_helpers, moe_helpers
from turbojax import finetune, models
from turbojax.finetune.trainer import Trainer
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import for_length
from turbojax.models.families import FAMILIES, ExpertsConfig

SETTINGS = finetune.Settings(
    steps=3, context=16, batch_size=2, learning_rate=1e-2, warmup_steps=1, precision="float32"
)
MIXED = dataclasses.replace(
    moe_helpers.CONFIGS["qwen3-moe-mixed"],
    num_layers=2,
    local_windows=(9, 9),
    experts=ExpertsConfig(6, 2, 40, dense_layers=(0,)),
)
# One variant of each family, those with windows, several ropes, and layers of both kinds.
VARIANTS = {
    "qwen3_moe": MIXED,
    "gemma3_text": "gemma3",
    "deepseek_v3": {"first_k_dense_replace": 1},
    "smollm3": "smollm3-window",
    "gpt_oss": "gpt-oss",
    "gemma2": "gemma2",
    "phi3": "phi3-longrope",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek-v2-lite",
    "qwen2": "qwen2-window",
    "qwen3": "qwen3-window",
    "llama": "llama3.1",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "granite": "granite",
    "glm": "glm",
    "glm4": "glm4",
}


def config_of(family: str) -> TransformerConfig:
    variant = VARIANTS[family]
    if isinstance(variant, TransformerConfig):
        return variant
    if isinstance(variant, dict):
        return TransformerConfig.from_hf({**hf_helpers.config("deepseek-v3"), **variant})
    return TransformerConfig.from_hf(hf_helpers.config(variant))


def stream() -> np.ndarray:
    """A few tokens over and over, so that every step reads the same."""
    return np.tile(np.random.default_rng(0).permutation(hf_helpers.VOCAB)[:7], 40)


def test_no_family_is_left_out():
    assert set(VARIANTS) == set(FAMILIES) == set(family_helpers.ARCHITECTURES)
    for family in VARIANTS:
        assert config_of(family).family == family


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("family", VARIANTS)
def test_two_steps_and_the_folder(family, tmp_path):
    """The loss falls, every weight gets a gradient, and what is saved has the same logits."""
    config = config_of(family)
    model = models.Transformer(config, rngs=nnx.Rngs(0))
    trainer = Trainer(model, SETTINGS, stream())
    before = jax.tree.map(np.asarray, trainer.params)
    losses = [float(trainer.run_step()["bits_per_token"]) for _ in range(2)]
    assert losses[1] < losses[0] - 0.05
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(trainer.params), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # Only the choice of experts depends on it, which has no gradient.
        assert np.array_equal(old, new) == ("correction" in name), name
    trained = trainer.model()
    models.save(trainer.exported(), tmp_path)
    tokens = jnp.asarray(hf_helpers.tokens(1, 12))
    want = np.asarray(trained(tokens))
    np.testing.assert_array_equal(models.load_transformer(tmp_path)(tokens), want)
    decoder = models.load_decoder(tmp_path)
    assert decoder.config == config
    short = for_length(decoder, 12)
    np.testing.assert_allclose(moe_helpers.logits(short, np.asarray(tokens)), want, atol=1e-4)


@pytest.mark.fuzz
def test_long_rope_trains_with_the_factors_of_its_context():
    """Those of short texts, as generation has them; the exported config is that of long ones."""
    config = config_of("phi3")
    context, original = SETTINGS.context, config.rope_scaling.original_max_length
    assert context <= original < config.max_length
    model = models.Transformer(config, rngs=nnx.Rngs(0))
    trainer = Trainer(model, SETTINGS, stream())
    starts = trainer._starts(0)
    windows = np.stack([stream()[i : i + context + 1] for i in starts]).astype(np.int32)
    bits = models.token_bits(models.unstack(model), windows, batch_size=2).mean()
    np.testing.assert_allclose(trainer.run_step()["bits_per_token"], bits, rtol=1e-5)
    assert trainer.model().config == config
    long = moe_helpers.logits(models.unstack(model), windows[:, :-1])
    assert np.abs(long - np.asarray(model(jnp.asarray(windows[:, :-1])))).max() > 1e-2
