"""docs/parallel.md: its examples run on 8 devices, one after the other, and its commands exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tests.tools.docs_helpers import DOCS, examples
from turbojax.app.main import app

PAGE = DOCS / "parallel.md"


@pytest.mark.fuzz
def test_examples():
    """In a process of its own: the number of devices is known before JAX starts."""
    code = "\n".join(examples(PAGE))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # How jax writes a PartitionSpec depends on its version.
    assert re.match(r"2 2 P\w*\('data', None, 'model', None\)\n", done.stdout)
    bits = float(re.search(r"(\d\.\d) bits per byte", done.stdout).group(1))
    assert 7 < bits < 11


def test_commands_have_the_options_that_the_page_names():
    commands = get_command(app).commands
    known = {
        name: {x for one in commands[name].params for x in (*one.opts, *one.secondary_opts)}
        for name in ("generate", "serve", "train")
    }
    text = PAGE.read_text(encoding="utf-8")
    every = set.union(*known.values())
    assert set(re.findall(r"(?<![\w'-])--[a-z][a-z-]+", text)) <= every
    for name, line in re.findall(r"^turbojax (generate|serve|train) (.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        assert {x for x in words if x.startswith("--")} <= known[name]
