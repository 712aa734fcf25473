"""docs/transforms.md: its examples run and print what they should."""

import numpy as np
import pytest

from tests.tools.docs_helpers import DOCS, examples, run

EXAMPLES = examples(DOCS / "transforms.md")


@pytest.mark.optimized
@pytest.mark.fuzz
def test_export_example():
    """The text is what the model says without being exported."""
    pytest.importorskip("flatbuffers")
    names = {"__name__": "docs"}
    printed = run(EXAMPLES[0], names)
    session, text = names["session"], []
    for _ in range(12):
        token = np.argmax(session.logits, axis=-1)
        text.append(int(token[0]))
        session = session.step(token)
    assert printed == bytes(text).decode() + "\n"


def test_policy_example():
    assert run(EXAMPLES[1]) == "3 2\n"
