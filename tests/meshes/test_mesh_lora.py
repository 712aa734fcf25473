"""Adapters trained over a mesh: loss, gradient and steps are those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.meshes.test_mesh_families import tiny
from tests.training.test_lora import CONFIG, SETTINGS, text, trained
from turbojax import models
from turbojax.finetune.lora import LoraTrainer
from turbojax.parallel import mesh_of

pytestmark = pytest.mark.mesh

SETTINGS = dataclasses.replace(SETTINGS, batch_size=4, steps=3)
# Of everything that heads split: biases, an inner size with zeros at its end.
CONFIG = dataclasses.replace(
    CONFIG, num_layers=1, intermediate_size=50, qkv_bias=True, output_bias=True, mlp_bias=True
)
STREAM = text(600).astype(np.int32)
LEARN = np.random.default_rng(0).random(600) < 0.3


def base(name: str) -> models.Decoder | models.QuantizedDecoder:
    if name == "int4":
        return models.random_quantized_decoder(CONFIG, dtype=jnp.float32)
    config = CONFIG if name == "float" else dataclasses.replace(tiny(name), num_layers=2)
    return models.random_decoder(config, dtype=jnp.float32)


def gradient(run: LoraTrainer) -> tuple[float, list[np.ndarray]]:
    """Loss and gradient of the first step, whole."""
    adapters, _, decoder, *given = run._arguments(0)
    (value, _), grads = jax.jit(run._value_and_grad())(decoder, adapters, *given)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(grads)]


@pytest.mark.quick(first=1, slow=3)
@pytest.mark.parametrize(
    ("name", "mesh", "settings", "options"),
    [
        ("float", "data=2,model=2", {"accumulate": 2}, {"learn": LEARN}),
        ("int4", "data=4", {"remat": "full"}, {"learn": LEARN, "gradient": "exact"}),
        # Two KV heads: of four devices of heads two go to the axis of the sequence.
        ("float", "data=2,model=4", {"remat": "full"}, {"fsdp": False}),
        ("deepseek_v3", "data=2,model=2", {}, {}),
        ("float", "model=2", {}, {}),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(name, mesh, settings, options):
    one_options = {k: x for k, x in options.items() if k != "fsdp"}
    decoder = base(name)
    adapters, stream = trained(decoder, rank=2), STREAM % decoder.config.vocab_size
    one = LoraTrainer(decoder, adapters, SETTINGS, stream, **one_options)
    split = models.shard(decoder, mesh_of(mesh))
    settings = dataclasses.replace(SETTINGS, **settings)
    run = LoraTrainer(split, adapters, settings, stream, **options)
    (value, expected), (found, grads) = gradient(one), gradient(run)
    # Units of rounding of sums over a step's tokens and, forward and backward, over the inputs of
    # the four products of each layer, of 32 to 64 numbers.
    units = (SETTINGS.tokens_per_step + 2 * decoder.config.num_layers * 4 * 64) * 2.0**-24
    assert found == pytest.approx(value, rel=units)
    for one_grad, grad in zip(expected, grads, strict=True):
        np.testing.assert_allclose(grad, one_grad, rtol=0, atol=units * np.abs(one_grad).max())
    matrices = [x for x in jax.tree.leaves(run.decoder.layers) if x.ndim > 1]
    parts = [x.size // x.addressable_shards[0].data.size for x in matrices]
    assert min(parts) >= (run._split.axes.size("batch") if options.get("fsdp", True) else 1)
