"""docs/models.md: its examples run, one after the other, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.optimized
@pytest.mark.fuzz
def test_examples():
    names, lines = {"__name__": "docs"}, []
    for example in EXAMPLES:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example, "docs/models.md", "exec"), names)
        lines.append(out.getvalue().removesuffix("\n"))
    loaded, padded, sampled, chat, restored = lines
    assert loaded == "(1, 12, 256) 7,934,208 parameters"
    assert padded.startswith("True ['")
    assert len(sampled) > 2
    assert chat == r"'<user> hello\n<assistant> '"
    assert restored == "split_words True True"
