"""The text model of a Mistral Small that also reads pictures, beside `transformers` itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import hf_helpers as hf
from tests.recordings import parity_recordings as recordings
from turbojax import models

pytestmark = pytest.mark.slow
NAME = "mistral-no-window"


def test_logits_are_those_of_transformers(tmp_path):
    """Of a file that transformers writes, with pictures' layers in it."""
    import torch
    import transformers

    from tests.models import torch_helpers as theirs

    text = {**hf.SMALL, "head_dim": 24, "sliding_window": None}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **text},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "language_model" in path or "lm_head" in path:
                array = hf.weight(NAME, path, parameter.shape)
                parameter.copy_(torch.from_numpy(array))
    model.eval().save_pretrained(tmp_path)
    ids = recordings.arrays()["short/tokens"].astype(np.int64)
    want = theirs.logits(model, ids)
    got = models.load(tmp_path)(jnp.asarray(ids, jnp.int32))
    assert 0.8 < want.std() < 3
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
