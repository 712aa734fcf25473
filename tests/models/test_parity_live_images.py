"""Gemma 3 with images beside `transformers` itself: the recording, and a file that it writes."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import image_helpers as tiny
from tests.recordings import image_recordings as recordings
from turbojax import models

pytestmark = pytest.mark.slow


def test_recording():
    from tests.recordings import make_image_recordings

    found = make_image_recordings.record()
    assert found.keys() == recordings.arrays().keys()
    for name, recorded in recordings.arrays().items():
        if name.startswith("greedy"):
            np.testing.assert_array_equal(found[name], recorded)
            continue
        scale = max(float(np.abs(recorded).max()), 1.0)
        np.testing.assert_allclose(found[name], recorded, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_files_that_transformers_writes(tmp_path):
    """With SigLIP's head, which is not read, and a processor's settings."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    keys = tiny.config(tower={"vision_use_head": True})
    config = Gemma3Config(**{name: keys[name] for name in keys if name != "architectures"})
    model = Gemma3ForConditionalGeneration(config).eval()
    shapes = tiny.shapes()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in shapes:
                parameter.copy_(torch.from_numpy(tiny.weight(name, tuple(parameter.shape))))
    model.save_pretrained(tmp_path)
    Gemma3ImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    vision = models.load_vision(tmp_path)
    first = vision.images(tiny.images()[tiny.OF_PROMPTS[0]])
    got = models.load(tmp_path)(jnp.asarray([tiny.PROMPTS[0]]), images=first)[0]
    np.testing.assert_allclose(got, recordings.arrays()["logits0"], rtol=0, atol=1e-4)
