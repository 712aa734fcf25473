"""docs/latent.md: its example runs and prints the bytes of the page's table."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "latent.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "docs/latent.md", "exec"), {"__name__": "docs"})
    assert out.getvalue().splitlines() == ["(2, 1, 16, 128) 388", "(2, 1, 16, 512) 644"]
    for name, size in (("turbo4", 388), ("fp8_e4m3", 644)):
        assert re.search(rf'"{name}".*\| {size} \|', PAGE)
