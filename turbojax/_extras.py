"""Packages that only parts of turbojax need, and how to install them.

No package named turbojax is on an index, so messages name the packages themselves.
"""

import importlib.util

COMMAND = ("typer>=0.15", "rich>=13", "platformdirs>=4")
"""What the command needs: dependencies of the project, but not of `import turbojax`."""

EXTRAS = {
    "gpu": ("jax[cuda13]>=0.10.2",),
    "triton": ("jax-triton>=0.3.1",),
    "text": ("tokenizers>=0.20", "jinja2>=3.1.6"),
    "server": (
        "starlette>=0.46",
        "uvicorn>=0.34",
        "prometheus-client>=0.21",
        "llguidance>=1.0",
    ),
    "gguf": ("gguf>=0.17", "tokenizers>=0.20", "jinja2>=3.1.6"),
    "tasks": ("lm-eval>=0.4.13,<0.5",),
    "images": ("pillow>=10",),
    "demo": ("matplotlib>=3.9",),
    "qwix": ("qwix>=0.1.5",),
    "tensorboard": ("tensorboardX>=2.6.2",),
    "wandb": ("wandb>=0.18",),
    "train": ("optax>=0.2.8", "orbax-checkpoint>=0.11"),
}
"""The project's extras, as in `pyproject.toml`."""


class MissingError(ImportError):
    """A package that an extra brings is not installed; the message says how to install it."""


def install(extra: str) -> str:
    """The line for a shell that installs an extra's packages, or those of ``"command"``."""
    packages = COMMAND if extra == "command" else EXTRAS[extra]
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def need_matplotlib(what: str = "a plot") -> None:
    """Raises MissingError, whose message says how to install it, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingError(f"{what} needs the package matplotlib: {install('demo')}")
