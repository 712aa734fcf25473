"""docs/lora.md and docs/your_trainer.md: their examples run, and print what the pages say."""

import os
import re
import subprocess
import sys

import pytest

from tests.tools.docs_helpers import DOCS, ROOT, examples, run

LORA, YOUR_TRAINER = DOCS / "lora.md", DOCS / "your_trainer.md"


def printed(page) -> list[str]:
    """What a page says that its examples print."""
    return re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.optimized
@pytest.mark.fuzz
def test_adapters():
    """A text unlike what the model knows: adapters of 5 % of its size learn from it in 20 steps."""
    names = {"__name__": "docs"}
    out = "".join(run(example, names) for example in examples(LORA))
    [page] = printed(LORA)
    sizes, bits, kind = out.splitlines()
    assert sizes == page.splitlines()[0]
    before, after = map(float, re.findall(r"\d\.\d\d", bits))
    said = list(map(float, re.findall(r"\d\.\d\d", page.splitlines()[1])))
    # Both are rounded, and processors differ in the third digit: 0.085 less, here.
    assert after < before - 0.06
    assert abs(before - said[0]) < 0.03
    assert abs(after - said[1]) < 0.03
    assert kind.startswith("Adapters ('q', 'k', 'v', 'o'")


@pytest.mark.slow
def test_a_trainer_of_ones_own():
    """In a process of its own with 2 devices, over which one of the examples trains."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(examples(YOUR_TRAINER))],
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
    assert str(ours) in YOUR_TRAINER.read_text(encoding="utf-8")
    assert errors == printed(YOUR_TRAINER)[-1].splitlines()
