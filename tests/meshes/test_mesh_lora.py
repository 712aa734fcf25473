"""Adapters trained over a mesh: loss, gradient and steps are those of one device."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.meshes.test_mesh_training import LATENT
from tests.training.finetune_helpers import command
from tests.training.test_lora import CONFIG, SETTINGS, text, trained
from turbojax import finetune, models
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
    return models.random_decoder(CONFIG if name == "float" else LATENT, dtype=jnp.float32)


def gradient(run: LoraTrainer) -> tuple[float, list[np.ndarray]]:
    """Loss and gradient of the first step, whole."""
    adapters, _, decoder, *given = run._arguments(0)
    (value, _), grads = jax.jit(run._value_and_grad())(adapters, decoder, *given)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(grads)]


@pytest.mark.quick(first=1, slow=1)
@pytest.mark.parametrize(
    ("name", "mesh", "settings", "options"),
    [
        ("float", "data=2,model=2", {"accumulate": 2}, {"learn": LEARN}),
        ("int4", "data=4", {"remat": "full"}, {"learn": LEARN, "gradient": "exact"}),
        # Two KV heads: of four devices of heads two go to the axis of the sequence.
        ("float", "data=2,model=4", {"remat": "full"}, {"fsdp": False}),
        ("latent", "data=2,model=2", {}, {}),
        ("float", "model=2", {}, {}),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(name, mesh, settings, options):
    options = dict(options)
    decoder = base(name)
    adapters, stream = trained(decoder, rank=2), STREAM % decoder.config.vocab_size
    settings = dataclasses.replace(SETTINGS, **settings)
    split = models.shard(decoder, mesh_of(mesh))
    run = LoraTrainer(split, adapters, settings, stream, **options)
    # Products of so many tokens as a device has: other shapes have sums in another order.
    devices = split.axes.size("batch")
    alike = dataclasses.replace(SETTINGS, accumulate=devices * settings.accumulate)
    is_sliced = options.pop("fsdp", True)
    one = LoraTrainer(decoder, adapters, alike, stream, **options)
    (value, expected), (found, grads) = gradient(one), gradient(run)
    # Units of rounding of sums over a step's tokens and, forward and backward, over the inputs of
    # the four products of each layer.
    widest = max(max(x.shape) for x in jax.tree.leaves(decoder.layers))
    units = (SETTINGS.tokens_per_step + 2 * decoder.config.num_layers * 4 * widest) * 2.0**-24
    assert found == pytest.approx(value, rel=units)
    for one_grad, grad in zip(expected, grads, strict=True):
        np.testing.assert_allclose(grad, one_grad, rtol=0, atol=units * np.abs(one_grad).max())
    window = stream[: settings.context + 1][None].repeat(4, 0)
    bits = one.bits(window)
    np.testing.assert_allclose(run.bits(window), bits, rtol=0, atol=units * bits.max())
    matrices = [x for x in jax.tree.leaves(run.decoder.layers) if x.ndim > 1]
    parts = [x.size // x.addressable_shards[0].data.size for x in matrices]
    assert min(parts) >= (devices if is_sliced else 1)


@pytest.mark.slow
def test_layers_are_gathered_again_in_the_backward_pass():
    """No layer's weights are whole for longer than it runs, though they have no gradient."""
    decoder = models.random_decoder(dataclasses.replace(CONFIG, num_layers=3), dtype=jnp.float32)
    run = LoraTrainer(models.shard(decoder, mesh_of("data=4")), trained(decoder), SETTINGS, STREAM)
    text = jax.jit(run._make_step()).lower(*run._arguments(0)).as_text()
    # The table of embeddings, and the seven matrices of a layer, forward and backward. The first
    # layer has functions of its own: tokens before it have no gradient, so that q, k and v are not
    # needed again. All others share theirs.
    assert text.count("stablehlo.all_gather") == 1 + (7 + 4) + (7 + 7)


@pytest.mark.slow
def test_refusals():
    decoder = base("int4")
    split = models.shard(decoder, mesh_of("model=2"))
    adapters = models.init_adapters(decoder)
    with pytest.raises(NotImplementedError, match=r"INT4 weights are not trained over \('model',"):
        LoraTrainer(split, adapters, SETTINGS, STREAM)
    three = models.shard(decoder, mesh_of("data=3"))
    with pytest.raises(ValueError, match="batch_size=4 must be a multiple of 3"):
        LoraTrainer(three, adapters, SETTINGS, STREAM)
    with pytest.raises(ValueError, match="decoder.axes=None must be those of a mesh"):
        finetune.sliced(decoder)


@pytest.mark.slow
@pytest.mark.usefixtures("no_orbax_log")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_command(tmp_path):
    """A run over a mesh, of weights that are cut as they are read, goes on on one device."""
    data, model = tmp_path / "words.txt", tmp_path / "model"
    data.write_bytes(text(900).tobytes())
    config = dataclasses.replace(CONFIG, intermediate_size=48, max_length=64)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), model, extra_config=ends)
    given = f"lora --data {data} --model {model} --context 16 --batch 4 --rank 2 --steps 4"
    given += " --accumulate 2 --log-every 1 --save-every 2 --target q --target down --remat full"

    def losses(out: str, *options: str) -> list[float]:
        result = command(*given.split(), "--out", str(tmp_path / out), *options)
        assert result.exit_code == 0, result.output
        return finetune.read_log(tmp_path / out)["losses"]

    mesh = ("--mesh", "data=2,model=2")
    one, found = losses("one"), losses("two", *mesh)
    # Losses of some bits, rounded to six digits.
    np.testing.assert_allclose(found, one, atol=1e-4)
    assert one[-1] < one[0]
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "4")
    assert losses("two")[:2] == found[:2]
    np.testing.assert_allclose(losses("two"), one, atol=1e-4)
    refused = command(*given.split(), "--out", str(tmp_path / "x"), "--no-fsdp")
    assert refused.exit_code == 2
    assert "--no-fsdp is for --mesh" in refused.stderr
