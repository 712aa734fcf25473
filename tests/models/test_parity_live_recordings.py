"""What is recorded of transformers is what it computes now."""

import numpy as np
import pytest

from tests.models import hf_helpers as hf
from tests.models.published import ARCHITECTURES
from tests.models.tokenizer_helpers import KINDS
from tests.recordings import parity_recordings as recordings
from tests.recordings import parity_texts as texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def make():
    """Needs torch and transformers: imported here, because they may not be installed."""
    from tests.recordings import make_recordings

    return make_recordings


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_files_angles_and_greedy_texts(make, name):
    """Its files as they are; numbers as float32 rounds them on any processor."""
    found, recorded = make.facts(name), recordings.facts(name)
    for key, rel in (("frequencies", 1e-6), ("amplitude", 1e-12), ("bfloat16_error", 0.05)):
        if key in recorded:
            assert found.pop(key) == pytest.approx(recorded[key], rel=rel)
    assert found == {key: recorded[key] for key in found}
    assert found.keys() | {"frequencies", "amplitude", "bfloat16_error"} >= recorded.keys()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", texts.FAMILIES)
def test_logits(make, name):
    for kind, found in make.logits(name).items():
        recorded = recordings.logits(name, kind)
        np.testing.assert_allclose(
            found.columns, recorded.columns, rtol=0, atol=texts.TOLERANCE, err_msg=kind
        )
        # Two that are as large may change places.
        assert (found.top != recorded.top).mean() < 0.01, kind


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_defaults(make, family):
    assert make.defaults(family) == recordings.read("models")["defaults"][family]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens(make, kind):
    assert make.tokens(kind) == recordings.read("text")["tokens"][kind]


def test_chats(make):
    assert make.chats() == recordings.read("text")["chats"]
