"""docs/your_trainer.md: its examples run, one after the other, and print what the page says."""

import os
import re
import subprocess
import sys

import pytest

from tests.tools.docs_helpers import DOCS, ROOT, examples

PAGE = DOCS / "your_trainer.md"


@pytest.mark.slow
def test_examples():
    """In a process of its own with 2 devices, over which one of the examples trains."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(examples(PAGE))],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    nnx, pooled, over_mesh, linen, weights, moments, saved, *errors = done.stdout.splitlines()
    for line in (nnx, linen):
        first, last = map(float, line.split())
        # A text of 16 letters that repeats is learnt; before, all of 61 letters are as likely.
        assert first > 3
        assert last < first / 10
    assert (pooled, over_mesh) == ("True", "True")
    assert (weights, moments) == ("{'float32'}", "{'float32'}")
    ours, plain = map(int, saved.split())
    # Inputs and output of 4, 2, 2 and 4 heads in 2 bytes, log-sum-exps in 4, and two lengths.
    assert ours == 512 * (12 * 16 * 2 + 4 * 4) + 8
    assert plain > 50 * ours
    assert str(ours) in PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert errors == blocks[-1].splitlines()
