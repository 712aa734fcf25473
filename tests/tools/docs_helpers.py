"""The pages of the docs, for tests: their text, copies of them, and the examples in them."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def docs_text(*names: str) -> str:
    """The text of pages under docs/, with every run of white space as one space."""
    return " ".join(" ".join((DOCS / name).read_text(encoding="utf-8") for name in names).split())


def copied_docs(folder: Path) -> Path:
    """A copy of all pages, without their pictures, in a new folder inside of this one."""
    copy = folder / "docs"
    for path in DOCS.rglob("*.md"):
        if "_build" in path.parts:
            continue
        target = copy / path.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return copy


def examples(path: Path) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def run(code: str, names: dict[str, Any] | None = None) -> str:
    """What an example prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "example", "exec"), {"__name__": "docs"} if names is None else names)
    return out.getvalue()
