"""`turbojax eval --mesh`: split over heads it measures what one device does."""

import json

import jax
import pytest
from typer.testing import CliRunner

from turbojax.app.main import app

pytestmark = pytest.mark.mesh


def run(model, text, *options):
    sizes = ["--context", "31", "--batch-size", "2", "--methods", "exact,kv4", "--json"]
    arguments = ["eval", "--no-compilation-cache", "--model", model, "--text", text, *sizes]
    try:
        return CliRunner().invoke(app, [*map(str, arguments), *options])
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.fuzz
def test_split_over_heads(tiny_folder, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 4)
    one, two = (
        json.loads(run(tiny_folder, text, *mesh).stdout)["methods"]
        for mesh in (("--measures", "text"), ("--mesh", "model=2"))
    )
    for name, row in two.items():
        wanted = one[name]["text"]
        assert row["text"]["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-5)
        assert row["text"]["cost"] == pytest.approx(wanted["cost"], abs=1e-5)
        assert row["text"]["cache_bytes"] == wanted["cache_bytes"]
        assert "a split model is not looked into" in row["layers"]["refused"]
    refused = run(tiny_folder, text, "--mesh", "data=2")
    assert "--mesh data=2 must split heads alone" in refused.stderr
