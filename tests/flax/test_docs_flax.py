"""docs/flax.md: its examples run, one after the other."""

import pytest

from tests.tools.docs_helpers import DOCS, examples, run


@pytest.mark.optimized
@pytest.mark.slow
def test_examples():
    names = {"__name__": "docs"}
    out = "".join(run(example, names) for example in examples(DOCS / "flax.md"))
    reported, compressed, twin = out.splitlines()
    assert reported.startswith("mask of 1 of 2 sequences, the first one is 1, must hide keys and")
    assert compressed.startswith("[303 123] ")
    assert float(compressed.split()[-1]) > 2
    assert twin == "[301 301]"
    assert names["out"].shape == (2, 300, 64)
