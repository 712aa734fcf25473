"""Sphinx settings. Build with `make docs`; a warning is an error there."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

# Importing turbojax for autodoc needs no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
# Attributes are described by their class's docstring, once.
napoleon_use_ivar = True
napoleon_custom_sections = [("Returned values", "params_style")]  # see below
python_maximum_signature_line_length = 88


def _returned_values(_app: Any, _what: str, _name: str, _obj: Any, _opts: Any, lines: list[str]):
    """Lets a `Returns:` section that names several values read like `Args:`.

    Napoleon takes every `Returns:` for one value with a type in front of its colon.
    """
    if "Returns:" not in lines:
        return
    header = lines.index("Returns:")
    section = []
    for line in lines[header + 1 :]:
        if line and not line.startswith(" "):
            break
        section.append(line)
    text = [line for line in section if line]
    if not text:
        return
    indent = len(text[0]) - len(text[0].lstrip())
    entries = [line.strip() for line in text if not line.startswith(" " * (indent + 1))]
    if len(entries) > 1 and all(re.match(r"\w+: ", entry) for entry in entries):
        lines[header] = "Returned values:"


def setup(app: Any) -> None:
    """Runs the above before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _returned_values, priority=400)
