"""docs/images.md: its examples run, one after the other, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.models import image_helpers as tiny

PAGE = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.fuzz
def test_examples(tmp_path, monkeypatch):
    """With a tiny model under the name of a published one."""
    monkeypatch.chdir(tmp_path)
    tiny.write_tokenizer(tiny.write(Path("gemma-3-4b-it")))
    Image.fromarray(tiny.images()[1]).save("cat.png")
    names, lines = {"__name__": "docs"}, []
    for example in EXAMPLES:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example, "docs/images.md", "exec"), names)
        lines.append(out.getvalue().strip())
    generated, trained, saved = lines
    assert generated.startswith("(1, 9, 32) ")
    assert names["tokens"] == [2, tiny.BEGIN, *[tiny.IMAGE] * 9, tiny.END, 3, 4, 5]
    assert (trained, saved) == ("True float32", "True")
