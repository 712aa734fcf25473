"""docs/transforms.md: its examples run and print what they should."""

import jax
import pytest

import turbojax as tj
from tests.tools.docs_helpers import DOCS, examples, run
from turbojax import models

EXAMPLES = examples(DOCS / "transforms.md")


@pytest.mark.slow
def test_export_example():
    """The text is what the model says without being exported."""
    pytest.importorskip("flatbuffers")
    model = models.load("embedded", dtype="float32")
    prompt = jax.numpy.asarray([list(b"def fibonacci(n):")])
    new = models.generate(model, prompt, max_new_tokens=13, cache=tj.TurboConfig())
    assert run(EXAMPLES[0]) == bytes(new[0, 1:].tolist()).decode() + "\n"


def test_policy_example():
    assert run(EXAMPLES[1]) == "3 2\n"
