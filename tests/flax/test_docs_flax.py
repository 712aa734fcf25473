"""docs/flax.md: its examples run, one after the other."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "flax.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.optimized
@pytest.mark.slow
def test_examples():
    names, out = {"__name__": "docs"}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for example in EXAMPLES:
            exec(compile(example, "docs/flax.md", "exec"), names)
    reported, compressed, twin = out.getvalue().splitlines()
    assert reported.startswith("mask of 1 of 2 sequences, the first one is 1, must hide keys and")
    assert compressed.startswith("[303 123] ")
    assert float(compressed.split()[-1]) > 2
    assert twin == "[301 301]"
    assert names["out"].shape == (2, 300, 64)
