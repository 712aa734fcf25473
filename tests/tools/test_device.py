"""Devices that lack things: a T4 has neither bfloat16 nor kernels, which every default minds."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import turbojax as tj
from tests.training.finetune_helpers import SETTINGS, corpus, tiny_model
from turbojax import _device, finetune, models
from turbojax.app import doctor, text_model
from turbojax.app import train as train_command
from turbojax.app.main import app
from turbojax.attention import cudnn
from turbojax.caches import exact as exact_attention
from turbojax.finetune.base import windows
from turbojax.finetune.losses import scaled_value_and_grad

T4 = 7.5


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU of some compute capability."""

    def pretend(capability):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)

    return pretend


@pytest.mark.parametrize(
    ("capability", "dtype", "half"),
    [
        (None, "float32", "bfloat16"),
        (7.0, "float16", "float16"),
        (T4, "float16", "float16"),
    ],
)
def test_a_device_without_bfloat16_computes_in_float16(gpu, capability, dtype, half):
    gpu(capability)
    assert tj.device.compute_dtype() == dtype
    assert tj.device.half_dtype() == half
    assert not tj.device.has_kernels()


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0])
def test_from_ampere_on_it_is_bfloat16(gpu, monkeypatch, capability):
    gpu(capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert tj.device.compute_dtype() == tj.device.half_dtype() == "bfloat16"
    assert tj.device.has_kernels()


@pytest.mark.parametrize(
    ("capability", "runs", "lacks"),
    [
        (None, ("CPU: no kernels", "plain JAX"), ("A100 adds", "L4 also", "H100")),
        (T4, ("7.5): no kernels", "float16"), ("A100 adds", "L4 also", "H100")),
        (8.0, ("8.0): the Triton", "cuDNN"), ("L4 adds products in e4m3", "H100")),
        (8.9, ("8.9): the Triton", "e4m3"), ("An H100 adds the Mosaic kernels",)),
        (9.0, ("9.0): the Mosaic", "Triton", "cuDNN"), ()),
    ],
)
def test_one_line_names_the_kernels_and_what_others_add(gpu, capability, runs, lacks):
    gpu(capability)
    line = tj.device.kernels()
    assert "\n" not in line
    here, _, more = line.partition(". ")
    assert all(x in here for x in runs), line
    assert all(x in more for x in lacks), line
    if not lacks:
        assert not more


def test_another_makers_gpu_is_told_apart(gpu, monkeypatch):
    gpu(None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "which are for NVIDIA GPUs" in tj.device.kernels()


@pytest.mark.slow
def test_on_a_t4_plain_jax_runs_every_op(gpu):
    gpu(T4)
    report = doctor.examine()
    assert {op.op: op.chosen for op in report.ops} == dict.fromkeys(
        (op.op for op in report.ops), "xla"
    )
    for op in report.ops:
        for name, refusal in op.refusals.items():
            assert name == "xla" or not refusal.startswith(("fails", "not examined")), (op, name)
    assert report.advice[0] == tj.device.kernels()
    assert report.to_text().count(tj.device.kernels()) == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_exact_attention_takes_no_cudnn_on_a_t4(gpu, dtype):
    gpu(T4)
    x = jax.ShapeDtypeStruct((1, 16, 2, 64), dtype)
    for options in ({}, {"decoding": True}, {"forward_only": True}):
        assert "not compute capability 7.5" in cudnn.unsupported(x, x, **options)
    text = str(jax.make_jaxpr(exact_attention.attention)(x, x, x))
    assert "cudnn" not in text
    with pytest.raises(NotImplementedError, match="not compute capability 7.5"):
        jax.eval_shape(lambda *a: exact_attention.attention(*a, implementation="cudnn"), x, x, x)


@pytest.mark.parametrize(
    ("capability", "stored", "dtype"),
    [
        (None, "bfloat16", "float32"),
        (T4, "bfloat16", "float16"),
        (T4, None, "float16"),
        (T4, "float32", None),
        (T4, "float16", None),
    ],
)
def test_commands_compute_checkpoints_in_what_the_device_has(
    gpu, tiny_folder, capability, stored, dtype
):
    gpu(capability)
    config = models.TransformerConfig.from_hf(models.read_config(tiny_folder))
    wanted = None if dtype is None else jnp.dtype(dtype)
    stored = None if stored is None else jnp.dtype(stored)
    assert text_model.usual_dtype(stored, config) == wanted


def test_what_overflows_float16_is_computed_in_float32(gpu, tiny_folder):
    gpu(T4)
    config = models.TransformerConfig.from_hf(models.read_config(tiny_folder))
    for family in ("gemma2", "gemma3_text"):
        assert family in models.families.FAMILIES
        gemma = dataclasses.replace(config, family=family)
        assert text_model.usual_dtype(jnp.dtype(jnp.bfloat16), gemma) == jnp.float32


@pytest.mark.slow
def test_generate_on_a_t4(gpu, tiny_folder):
    """The command, from a bfloat16 checkpoint, in float16."""
    gpu(T4)
    found = text_model.find_text_model(tiny_folder)
    assert found.dtype == jnp.float16
    assert found.load().decoder.dtype == jnp.float16
    assert text_model.find_random_model("tiny").dtype == jnp.float16
    arguments = ("generate", "def", "--model", tiny_folder, "--max-new-tokens", "3", "--json")
    shown = CliRunner().invoke(app, [*arguments, "--cache", "exact"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)
    # What is asked for is taken.
    assert text_model.find_text_model(tiny_folder, jnp.dtype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_train_chooses_a_precision_for_the_device(gpu, tiny_folder):
    assert train_command._usual_precision(tiny_folder) == "float32"
    gpu(T4)
    assert train_command._usual_precision(tiny_folder) == "float16"


# Float16's smallest numbers ----------------------------------------------------------------------


def _trainer(precision):
    settings = finetune.Settings(steps=3, context=32, batch_size=2, precision=precision)
    stream = np.random.default_rng(0).integers(1, 128, 4096)
    return finetune.Trainer(tiny_model(), settings, stream)


def test_the_loss_is_scaled_in_float16_alone():
    sizes = {"steps": 1, "context": 100, "batch_size": 3}
    assert finetune.Settings(**sizes).loss_scale == 1
    assert finetune.Settings(**sizes, precision="float32").loss_scale == 1
    assert finetune.Settings(**sizes, precision="float16").loss_scale == 256
    assert finetune.Settings(precision="float16").loss_scale == 4096


@pytest.mark.fuzz
def test_a_gradient_in_float16_is_that_in_float32():
    """To a few roundings of 2**-11, where tokens are many; without a scale most of it is lost."""
    more = 2**14  # times the 64 tokens that there are

    def gradient(precision, scale):
        trainer = _trainer(precision)
        mean = trainer._make_loss()
        tokens = windows(trainer._stream, trainer._starts(0), mean.context)

        def loss(*arguments):
            value, density = mean(*arguments)
            return value / more, density

        run = jax.jit(scaled_value_and_grad(loss, scale))
        (value, _), grads = run(trainer.params, tokens, mean.share(tokens))
        return float(value), np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])

    value, exact = gradient("float32", 1.0)
    scale = finetune.Settings(context=32, batch_size=2 * more, precision="float16").loss_scale
    in_float16, grads = gradient("float16", scale)
    _, unscaled = gradient("float16", 1.0)
    length = np.linalg.norm(exact)
    assert abs(in_float16 - value) < 2**-10 * value
    assert np.linalg.norm(grads - exact) < 0.01 * length
    assert np.linalg.norm(unscaled - exact) > 0.1 * length


@pytest.mark.fuzz
def test_the_step_uses_the_scale(monkeypatch):
    """With one that overflows, the gradient is not finite."""
    found = _trainer("float16").run_step()
    assert np.isfinite(float(found["grad_norm"]))
    monkeypatch.setattr(finetune.Settings, "loss_scale", 2.0**40)
    found = _trainer("float16").run_step()
    assert np.isfinite(float(found["bits_per_byte"]))
    assert not np.isfinite(float(found["grad_norm"]))


@pytest.mark.slow
def test_a_run_that_overflows_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(finetune.Settings, "loss_scale", 2.0**40)
    settings = dataclasses.replace(SETTINGS, steps=3, context=32, precision="float16")
    with pytest.raises(FloatingPointError, match="float16 ends at 65,504: try float32"):
        finetune.fine_tune(tmp_path / "run", tiny_model(), settings, corpus())
