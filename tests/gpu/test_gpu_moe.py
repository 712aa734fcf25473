"""Models with experts on a GPU: in floating point as on the CPU, in INT4 as XLA computes them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.models import moe_helpers as moe
from turbojax import models, smoothing
from turbojax.matmul.grouped import grouped_matmul
from turbojax.matmul.int4 import matmul
from turbojax.models import quantized_layer

pytestmark = pytest.mark.gpu
PLAIN = smoothing.Smoothing(cas=False, pts=False, rpn=False, crs=False)


@pytest.fixture(params=["mixtral", "qwen3-moe-mixed"])
def folder(request, tmp_path):
    """A model whose tokens go to all experts, so that no rounding chooses another one."""
    config = moe.CONFIGS[request.param]
    every = dataclasses.replace(config.experts, per_token=config.experts.count)
    return moe.write(dataclasses.replace(config, experts=every), tmp_path)


@pytest.mark.parametrize("length", [1, 40])
def test_logits_are_those_of_the_cpu(folder, length):
    def found():
        return moe.logits(models.load_decoder(folder), moe.tokens(2, length))

    with jax.default_matmul_precision("highest"):
        got = found()
        with jax.default_device(jax.devices("cpu")[0]):
            want = found()
    assert np.isfinite(got).all()
    assert moe.relative(got, want) < 1e-3


@pytest.mark.quick(2)
@pytest.mark.parametrize("length", [1, 40])
def test_logits_of_int4_are_those_of_xla(folder, length, monkeypatch):
    decoder = models.quantize_model(models.load_decoder(folder), smoothing=PLAIN)
    text = moe.tokens(2, length)
    got = moe.logits(decoder, text)
    for module, function in ((quantized_layer, matmul), (quantized_layer, grouped_matmul)):
        reference = functools.partial(function, implementation="xla")
        monkeypatch.setattr(module, function.__name__, reference)
    want = moe.logits(decoder, text)
    assert np.isfinite(got).all()
    # Activations are now and then rounded to another neighbour.
    assert moe.relative(got, want) < 0.1
