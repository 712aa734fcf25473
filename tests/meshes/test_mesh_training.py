"""Training over a mesh: losses, operations and memory of a device, checkpoints on other meshes."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers, moe_helpers
from tests.training.finetune_helpers import SETTINGS, TINY, command, corpus, text
from training import state
from turbojax import finetune, models
from turbojax.finetune import checkpoint
from turbojax.models import pooled_by_name
from turbojax.models.config import ExpertsConfig
from turbojax.parallel import Axes, mesh_of

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

SETTINGS = dataclasses.replace(SETTINGS, batch_size=8, context=128)
POOLED = pooled_by_name("threshold", block_size=32)


def axes(data: int) -> Axes:
    return Axes(batch="data", mesh=jax.make_mesh((data,), ("data",)))


def trainer(axes: Axes | None, **options) -> finetune.Trainer:
    model = models.Transformer(TINY, rngs=nnx.Rngs(1))
    return finetune.Trainer(model, SETTINGS, corpus().stream, axes=axes, **options)


def losses(run: finetune.Trainer, steps: int) -> np.ndarray:
    return np.array([float(run.run_step()["bits_per_byte"]) for _ in range(steps)])


def collectives(text: str) -> set[str]:
    return set(re.findall(r"(all-gather|all-reduce|reduce-scatter|all-to-all|permute)\(", text))


@pytest.fixture(scope="module")
def one() -> tuple[finetune.Trainer, np.ndarray]:
    """A run on one device, and its losses."""
    run = trainer(None)
    return run, losses(run, 4)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the order of sums.

    In any order a float32 sum of n positive numbers is off by n units of rounding at most, here of
    the losses of a step's tokens. What gradients are off by is as small a share of a step, and
    steps move the loss by less than it is.
    """
    n = SETTINGS.tokens_per_step
    np.testing.assert_allclose(found, expected, rtol=n * 2.0**-24)


def flops(run: finetune.Trainer) -> float:
    run.compile()
    return run._compiled.cost_analysis()["flops"]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("data", "fsdp"), [(8, True), (2, True), (8, False)])
def test_losses_are_those_of_one_device_at_a_share_of_the_operations(one, data, fsdp):
    run = trainer(axes(data), fsdp=fsdp)
    close(losses(run, 4), one[1])
    # What all do anyway is the optimizer, of whole weights without `fsdp`.
    assert flops(run) * data / flops(one[0]) == pytest.approx(1, abs=0.05)
    text = run._compiled.as_text()
    found = collectives(text)
    assert found == ({"all-gather", "all-reduce", "reduce-scatter"} if fsdp else {"all-reduce"})
    memory = run._compiled.memory_analysis()
    whole = one[0]._compiled.memory_analysis()
    vectors = 4 * 3 * 4 * TINY.hidden_size  # whole on every device, with moments: three norms
    share = whole.alias_size_in_bytes / data + vectors if fsdp else whole.alias_size_in_bytes
    assert memory.alias_size_in_bytes <= share


def of_bits(run: finetune.Trainer) -> np.ndarray:
    """What the weights make of two windows, in the order of their tokens."""
    size = SETTINGS.context + 1
    tokens = np.asarray(corpus().stream[: 2 * size]).reshape(2, size).astype(np.int32)
    return run.bits(tokens, run.attend)


@pytest.mark.fuzz
def test_tokens_over_a_ring(one):
    """Sequences over two devices, and the tokens of each over two: attention is a ring."""
    run = trainer(Axes.of(jax.make_mesh((2, 2), ("data", "sequence"))))
    close(losses(run, 4), one[1])
    assert "permute" in collectives(run._compiled.as_text())
    # Of a token of 2 to 15 bits, through weights that steps in another order have made.
    np.testing.assert_allclose(of_bits(run), of_bits(one[0]), atol=1e-4)


@pytest.mark.fuzz
def test_tokens_that_do_not_count():
    """Their share differs between devices; the mean is over those of all."""
    size = corpus().stream.size
    # Some, and so few that there are devices with none.
    for learn in (np.random.default_rng(0).random(size) < 0.3, np.arange(size) % 500 == 7):
        expected = losses(trainer(None, learn=learn), 3)
        for mesh in (axes(8), Axes.of(jax.make_mesh((2, 2), ("data", "sequence")))):
            close(losses(trainer(mesh, learn=learn), 3), expected)


@pytest.mark.fuzz
def test_pooled_and_packed():
    """With levels that are chosen in the step, within documents, also where these are split."""
    options = {"pooled": POOLED, "packed": True}
    expected = trainer(None, **options)
    first = losses(expected, 3)
    for mesh in (axes(2), Axes.of(jax.make_mesh((1, 2), ("data", "sequence")))):
        run = trainer(mesh, **options)
        close(losses(run, 3), first)
        np.testing.assert_allclose(of_bits(run), of_bits(expected), atol=1e-4)


@pytest.mark.fuzz
def test_layers_with_experts_and_layers_without(tmp_path):
    """In two stacks, whose matrices are split along other axes; also read onto the mesh."""
    mixed = moe_helpers.CONFIGS["qwen3-moe-mixed"]
    config = dataclasses.replace(mixed, vocab_size=256)
    settings = dataclasses.replace(SETTINGS, batch_size=2, context=32, warmup_steps=0)
    models.save(models.Transformer(config, rngs=nnx.Rngs(1)), tmp_path)

    def found(axes: Axes | None) -> list[float]:
        model = models.load_transformer(tmp_path, mesh=axes)
        if axes is not None:
            kernel = model.dense_blocks.mlp.up_proj.kernel.get_value()
            assert kernel.addressable_shards[0].data.size * 2 == kernel.size
        return losses(finetune.Trainer(model, settings, corpus().stream, axes=axes), 3)

    expected = found(None)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found(axes(2)), expected, rtol=1e-4)


@pytest.mark.slow
def test_layers_are_gathered_again_in_the_backward_pass():
    """No layer's weights are whole for longer than it runs, with `remat` and without."""
    config = dataclasses.replace(TINY, num_layers=2)
    for remat in ("none", "full"):
        model = models.Transformer(config, rngs=nnx.Rngs(1))
        settings = dataclasses.replace(SETTINGS, remat=remat)
        run = finetune.Trainer(model, settings, corpus().stream, axes=axes(8))
        text = jax.jit(run._make_step()).lower(*run._arguments(0)).as_text()
        # Forward and backward have a function of a layer each, with its seven matrices.
        assert text.count("stablehlo.all_gather") == 1 + 2 * 7
        assert text.count("stablehlo.reduce_scatter") == 1 + 7


@pytest.mark.slow
@pytest.mark.usefixtures("no_orbax_log")
def test_a_checkpoint_goes_on_on_another_mesh(one, tmp_path):
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        first = trainer(axes(8))
        losses(first, 2)
        first.save(manager)
        manager.wait_until_finished()
        for other in (axes(2), None):
            second = trainer(other)
            assert second.restore(manager)
            assert second.step == 2
            for a, b in zip(
                jax.tree.leaves(first.exported_params()),
                jax.tree.leaves(second.exported_params()),
                strict=True,
            ):
                np.testing.assert_array_equal(a, b)
            close(losses(second, 2), one[1][2:])


@pytest.mark.slow
@pytest.mark.usefixtures("no_orbax_log")
def test_a_run_over_a_mesh(tmp_path):
    """From start to the exported model: what it scores on held-out text, whole again."""
    settings = dataclasses.replace(SETTINGS, steps=2)
    model = models.Transformer(TINY, rngs=nnx.Rngs(1))
    text = dataclasses.replace(corpus(), held_out=corpus().held_out * 3)
    rhythm = finetune.Rhythm(evaluate_every=0)
    logs = [
        finetune.fine_tune(tmp_path / name, model, settings, text, axes=mesh, rhythm=rhythm)
        for name, mesh in (("one", None), ("eight", axes(8)))
    ]
    assert logs[0]["identity"] == logs[1]["identity"]
    close(*(np.array(log["held_out_bits_per_byte"]["run"]) for log in logs))
    saved = models.load(tmp_path / "eight" / "model")
    assert saved.config.max_length == SETTINGS.context


def test_the_command_refuses_before_it_loads(tmp_path):
    data, out = tmp_path / "words.txt", tmp_path / "out"
    data.write_bytes(text(0, 9000))
    options = ["--data", str(data), "--out", str(out), "--model", "nowhere"]
    result = command("train", *options, "--mesh", "data=3")
    assert result.exit_code == 2
    assert "batch_size=8 must be a multiple of 3" in result.stderr


# Of everything that is split over heads or is not: biases, norms of queries and keys.
HEADS = dataclasses.replace(
    TINY,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
EXPERTS = dataclasses.replace(
    HEADS,
    num_layers=2,
    family="qwen3_moe",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    experts=ExpertsConfig(4, 2, 8, normalize=True),
)

# DeepSeek-V2: a dense layer and one with experts and shared ones, latent attention in both.
LATENT = dataclasses.replace(
    models.TransformerConfig.from_hf(
        {
            **hf_helpers.config("deepseek-v2-lite"),
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
        }
    ),
    vocab_size=256,
)


def random(config: models.TransformerConfig) -> models.Transformer:
    """A model all of whose weights are drawn: biases and norms, too."""
    model = models.Transformer(config, rngs=nnx.Rngs(1))
    state, rng = nnx.state(model, nnx.Param), np.random.default_rng(0)
    moved = jax.tree.map(
        lambda x: x + np.float32(0.1) * rng.normal(size=x.shape).astype("f"), state
    )
    nnx.update(model, moved)
    return model


def gradient(run: finetune.Trainer) -> tuple[float, list[np.ndarray]]:
    """Loss and gradient of the first step, whole."""
    _, _, *given = run._arguments(0)
    (value, _), grads = jax.jit(run._value_and_grad())(run.params, *given)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(grads)]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("mesh", "config", "options"),
    [
        ("data=2,model=2", HEADS, {"learn": True, "accumulate": 2}),
        ("model=2", HEADS, {"fsdp": False}),
        ("data=2,model=2,sequence=2", HEADS, {"learn": True, "remat": "full"}),
        ("data=2,model=2", EXPERTS, {}),
        ("data=2,model=2", LATENT, {}),
        ("data=4,model=2", HEADS, {"fsdp": False, "pooled": POOLED, "packed": True}),
    ],
)
def test_heads_over_devices(mesh, config, options):
    """Loss and gradient of one device, of weights of which each device has its share."""
    options = dict(options)
    steps = {name: options.pop(name) for name in ("accumulate", "remat") if name in options}
    settings = dataclasses.replace(SETTINGS, **steps)
    if options.get("learn"):
        options["learn"] = np.random.default_rng(0).random(corpus().stream.size) < 0.3
    stream, fsdp = corpus().stream, options.pop("fsdp", True)
    one = finetune.Trainer(random(config), SETTINGS, stream, **options)
    run = finetune.Trainer(
        random(config), settings, stream, axes=mesh_of(mesh), fsdp=fsdp, **options
    )
    (value, expected), (found, grads) = gradient(one), gradient(run)
    close(found, value)
    for one_grad, grad in zip(expected, grads, strict=True):
        # As `close`, through the norms and softmax of two layers, whose errors add up.
        atol = 4 * SETTINGS.tokens_per_step * 2.0**-24 * np.abs(one_grad).max()
        np.testing.assert_allclose(grad, one_grad, rtol=0, atol=atol)
    kernel = run.params["blocks"]["attention"]["o_proj"]["kernel"].get_value()
    shares = run._split.count if fsdp else 2
    assert kernel.addressable_shards[0].data.size * shares == kernel.size


@pytest.mark.slow
def test_operations_and_bits_where_heads_are_split():
    """A device has its share of the operations, and held-out text is scored alike."""
    one, two = (
        finetune.Trainer(random(HEADS), SETTINGS, corpus().stream, axes=axes)
        for axes in (None, mesh_of("data=2,model=2"))
    )
    np.testing.assert_allclose(of_bits(two), of_bits(one), atol=1e-4)
    # Norms, and the residual stream, are computed by every device of `model`.
    assert flops(two) * 4 / flops(one) == pytest.approx(1, abs=0.1)
    close(losses(two, 3), losses(one, 3))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_on_a_mesh(name):
    """In parts, with heads split: losses of one device."""
    settings = dataclasses.replace(SETTINGS, optimizer_name=name, learning_rate=1e-3)
    one = finetune.Trainer(random(HEADS), settings, corpus().stream)
    axes = mesh_of("data=2,model=2")
    parts = dataclasses.replace(settings, accumulate=2)
    run = finetune.Trainer(random(HEADS), parts, corpus().stream, axes=axes)
    close(losses(run, 3), losses(one, 3))


def test_refusals():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with pytest.raises(ValueError, match="num_heads=2 must be a multiple of 4"):
        trainer(Axes.of(mesh))
    with pytest.raises(ValueError, match="must split batch, heads or sequence"):
        trainer(Axes(mesh=mesh))
    ring, data = Axes(sequence="model", mesh=mesh), axes(4)
    for config, change, axes_given, words in (
        ({"intermediate_size": 25}, {}, mesh_of("model=2"), "intermediate_size=25 must be a multi"),
        ({}, {"context": 100}, ring, "context=100 must be a multiple of 8"),
        ({}, {"batch_size": 6}, data, "batch_size=6 must be a multiple of 4"),
    ):
        model = models.Transformer(
            dataclasses.replace(HEADS if config else TINY, **config), rngs=nnx.Rngs(1)
        )
        settings = dataclasses.replace(SETTINGS, **change)
        with pytest.raises(ValueError, match=words):
            finetune.Trainer(model, settings, corpus().stream, axes=axes_given)


@pytest.mark.slow
def test_training_of_models_splits_the_windows_of_a_step():
    """`training.state`: equal but for the order of sums, see `close`."""
    settings = state.Settings(
        steps=3,
        tokens_per_step=256,
        short_context=64,
        long_context=64,
        long_fraction=0.0,
        warmup_steps=2,
        precision="float32",
        optimizer="muon",
    )
    runs = [state.Trainer(TINY, settings, corpus().stream, devices=n) for n in (1, 2)]
    close(*(losses(run, 3) for run in runs))
    weights = jax.tree.leaves(nnx.state(runs[1].model()))
    assert {device for x in weights for device in x.devices()} == {jax.devices()[0]}
