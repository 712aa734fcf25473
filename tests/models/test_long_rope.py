"""LongRoPE's two sets of factors in sessions: chosen at the start, said, and kept.

That logits are those of transformers on both sides of the border, `test_parity_forward.py` and
`test_parity_live_long_rope.py` hold. The tiny Phi-3 of these tests was made for 32 tokens.
"""

import dataclasses
import warnings

import jax.numpy as jnp
import pytest

from tests.models import hf_helpers as hf
from turbojax import models

ORIGINAL = 32


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return models.load_decoder(hf.write("phi3-longrope", tmp_path_factory.mktemp("phi3")))


@pytest.mark.slow
def test_a_session_that_may_cross_the_border_says_so(decoder):
    ids = jnp.asarray(hf.tokens(2, 20))
    with pytest.warns(UserWarning, match=r"(?s)up to 32 tokens.*max_length=32") as caught:
        models.start(decoder, ids, max_length=ORIGINAL + 1)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.start(decoder, ids, max_length=ORIGINAL)


@pytest.mark.slow
def test_a_stored_session_keeps_its_factors(decoder, tmp_path):
    ids = hf.tokens(1, 20)
    session = models.start(decoder, jnp.asarray(ids), max_length=30)
    models.save_session(tmp_path / "short", session)
    expected = [int(token[0]) for token in models.stream(session, 10)]
    restored, _ = models.load_session(tmp_path / "short", decoder)
    assert [int(token[0]) for token in models.stream(restored, 10)] == expected
    assert models.load_session(tmp_path / "short", decoder, max_length=ORIGINAL)
    with pytest.raises(ValueError, match="of another model: longrope=short, not long"):
        models.load_session(tmp_path / "short", decoder, max_length=ORIGINAL + 1)
    # What is left of a model's length says nothing where the factors are the same.
    other = dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, max_length=99))
    models.load_session(tmp_path / "short", other)
