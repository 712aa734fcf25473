"""Models with experts against `transformers`: logits, greedy texts, and folders both ways."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import moe_helpers as moe
from turbojax import models

pytestmark = pytest.mark.slow
# float32's rounding through three layers; no choice of experts is that close.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def theirs():
    """Needs torch and transformers: imported here, because they may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", moe.CONFIGS)
def test_logits_and_greedy_texts(theirs, name, tmp_path):
    decoder = moe.load(name, tmp_path)
    reference = theirs.load(tmp_path)
    for text in (moe.tokens(3, 40), moe.tokens(1, 1, seed=4)):
        want = theirs.logits(reference, text)
        assert 0.8 < want.std() < 3
        assert np.abs(moe.logits(decoder, text) - want).max() < TOLERANCE
    prompts = moe.tokens(2, 12, seed=2)
    want = theirs.greedy(reference, prompts, np.ones_like(prompts), 8)
    got = models.generate(decoder, prompts, max_new_tokens=8, cache="exact")
    np.testing.assert_array_equal(got, want)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", moe.CONFIGS)
def test_folders_of_each_other(theirs, name, tmp_path):
    """What `transformers` writes is read, and all of what is written here."""
    decoder = moe.load(name, tmp_path / "ours")
    reference = theirs.load(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    again = models.load_decoder(tmp_path / "theirs")
    assert again.config == decoder.config
    text = moe.tokens(1, 9)
    np.testing.assert_array_equal(moe.logits(again, text), moe.logits(decoder, text))
    model = models.load(tmp_path / "ours")
    models.save(model, tmp_path / "saved")
    # All tensors, and no others.
    found = theirs.whole_state(tmp_path / "saved")
    for key, x in reference.state_dict().items():
        np.testing.assert_array_equal(found[key].numpy(), x.numpy())
    assert (
        np.abs(np.asarray(model(jnp.asarray(text))) - moe.logits(decoder, text)).max() < TOLERANCE
    )
