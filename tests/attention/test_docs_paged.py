"""docs/paged.md: its examples run, one after the other, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "paged.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(names: dict[str, Any], *examples: str) -> list[str]:
    """What the examples print, which share `names`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for example in examples:
            exec(compile(example, "docs/paged.md", "exec"), names)
    return out.getvalue().splitlines()


@pytest.mark.optimized
@pytest.mark.fuzz
def test_by_hand():
    lines = run({"__name__": "docs"}, *EXAMPLES)
    assert re.fullmatch(r"0\.009\d of the squares is lost", lines[0])
    assert lines[1:4] == [
        "(2, 1, 8, 64) (0, 1) (2,)",
        "(0, 3) (0, 1)",
        "32 of 41 tokens found, same bits: True",
    ]
    table = r"4 pages are free again: \[-1 -1 -1 -1 +\d+ +\d+ +\d+ -1\]"
    assert re.fullmatch(table, lines[4])
    counts = re.fullmatch(r"(\d+) pages are needed and (\d+) are free", lines[5]).groups()
    needed, free = map(int, counts)
    assert needed == free + 1
    assert re.fullmatch(r"\d of 64 pages, [\d,]+ bytes, \d+ tokens", lines[6])
    assert lines[7:] == ["(1000, 66) 4.125 bits a value"]
