"""Models with experts on a GPU: floating point and INT4, as on the CPU."""

import dataclasses

import jax
import moe_helpers as moe
import numpy as np
import pytest

from turbojax import models, smoothing

pytestmark = pytest.mark.gpu
PLAIN = smoothing.Smoothing(cas=False, pts=False, rpn=False, crs=False)


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed"])
def test_logits_are_those_of_the_cpu(name, length, kind, tmp_path):
    """Of tokens that go to all experts, so that no rounding chooses another one."""
    config = moe.CONFIGS[name]
    every = dataclasses.replace(config.experts, per_token=config.experts.count)
    folder = moe.write(dataclasses.replace(config, experts=every), tmp_path)
    text = moe.tokens(2, length)

    def found():
        decoder = models.load_decoder(folder)
        if kind == "quantized":
            decoder = models.quantize_model(decoder, smoothing=PLAIN)
        return moe.logits(decoder, text)

    with jax.default_matmul_precision("highest"):
        got = found()
        with jax.default_device(jax.devices("cpu")[0]):
            want = found()
    # Activations are now and then rounded to another neighbour.
    assert moe.relative(got, want) < (1e-3 if kind == "float" else 0.1)
    assert np.isfinite(got).all()
