"""Sphinx settings. Build with `make docs`; a warning is an error there."""

import os
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

# Importing turbojax for autodoc needs no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
author = _PROJECT["authors"][0]["name"]
project_copyright = f"2026, {author}"
release = version = _PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"{project} {release}"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# `name` in a docstring links to what is documented under that name, else it is just code.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
# Attributes are described by their class's docstring, once. For returned values see below.
napoleon_custom_sections = [("Attributes", "params_style"), ("Returned values", "params_style")]
python_maximum_signature_line_length = 88


def _returns(_app: Any, _what: str, _name: str, _obj: Any, _opts: Any, lines: list[str]) -> None:
    """Takes a `Returns:` section as it is meant, before napoleon reads it.

    Napoleon takes whatever stands before the first colon for a type. A section that names several
    values is to read like `Args:`, and every other one is plain text.
    """
    if "Returns:" not in lines:
        return
    header = lines.index("Returns:")
    end = header + 1
    while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
        end += 1
    section = textwrap.dedent("\n".join(lines[header + 1 : end])).splitlines()
    entries = [line for line in section if line and not line.startswith(" ")]
    names = [re.match(r"\w+(, \w+)*: ", entry) for entry in entries]
    if all(names) and (len(names) > 1 or ", " in names[0][0]):
        lines[header] = "Returned values:"
    else:
        lines[header:end] = [":returns:", *("   " + line if line else "" for line in section), ""]


def _draw_house(_app: Any) -> None:
    """What `house.md` shows."""
    import house

    folder = _HERE / "_build"
    folder.mkdir(exist_ok=True)
    house.draw(folder / "house.svg")
    (folder / "rooms.md").write_text(house.table(), encoding="utf-8")


def setup(app: Any) -> None:
    """Draws the house first; runs `_returns` before napoleon, whose priority is 500."""
    app.connect("builder-inited", _draw_house)
    app.connect("autodoc-process-docstring", _returns, priority=400)
