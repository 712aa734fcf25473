"""The `turbojax levels` command: its table, its picture, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from turbojax import models
from turbojax.app.levels import measure
from turbojax.app.main import app

SMALL = ["--tokens", "96", "--block", "8", "--layer", "1"]
# The other policies are in the picture.
IN_TABLE = ("topk", "strided")


def _run(*arguments: str):
    return CliRunner().invoke(app, ["levels", *arguments], env={"COLUMNS": "160"})


@pytest.mark.fuzz
def test_json_report_and_picture(tiny_folder, tmp_path):
    plot = tmp_path / "levels.png"
    names = [name for name in measure.POLICY_NAMES if name not in IN_TABLE]
    options = ["--policy", ",".join(names), "--json", "--plot", str(plot)]
    result = _run("--model", tiny_folder, *SMALL, *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["name"] for row in report["results"]] == names
    assert report["settings"]["heads"] == [0, 1, 2, 3]
    for row in report["results"]:
        shares = {int(level): share for level, share in row["shares"].items()}
        assert sum(shares.values()) == pytest.approx(1)
        work = sum(share / level for level, share in shares.items() if level)
        assert row["density"] == pytest.approx(work, rel=1e-6)
        assert len(row["densities"]) == len(row["errors"]) == 4
        assert 0.5 < row["cosine"] < 1
        assert 0 < row["relative_l1"] < 1
    by_name = {row["name"]: row for row in report["results"]}
    # More work, less error: the same policy with higher bounds.
    assert by_name["threshold95"]["density"] > by_name["threshold"]["density"]
    assert by_name["threshold95"]["relative_l1"] < by_name["threshold"]["relative_l1"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_table(tiny_folder):
    result = _run("--model", tiny_folder, *SMALL, "--policy", ", ".join(IN_TABLE), "--head", "2,0")
    assert result.exit_code == 0, result.stderr
    for text in (*IN_TABLE, "ideal speed-up", "96 tokens in blocks of 8", "2 heads"):
        assert text in result.stdout


@pytest.mark.slow
def test_operands_are_those_of_the_layer(tiny_folder, tmp_path):
    """Attention with the layer's query and key, done by hand from the weights."""
    file = tmp_path / "text"
    file.write_bytes(bytes(range(1, 64)))
    model = models.load(tiny_folder, dtype=jnp.float32)
    settings = measure.MapSettings(file=file, layer=1, tokens=64, block=8)
    query, key, value = measure._layer_operands(model, settings)
    seen = []

    def attend(query, key, value, cache, options=None):
        jax.debug.callback(lambda *x: seen.append(x), query, key, value, ordered=True)
        return models.causal_attention(query, key, value)

    model(jnp.arange(64)[None], attend=attend)
    jax.effects_barrier()
    assert len(seen) == 2
    for ours, theirs in zip((query, key, value), seen[1], strict=True):
        assert np.abs(np.asarray(ours) - theirs).max() < 1e-5


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["--policy", "best"], "policy 'best' must be one of topk, threshold,"),
        (["--policy", "topk,topk"], "must name each policy once"),
        (["--layer", "2"], "layer=2 must be between 0 and 1"),
        (["--head", "4"], "heads=(4,) must be between 0 and 3"),
        (["--head", "x"], "invalid literal for int"),
        (["--tokens", "129"], "tokens=129 must be at most the model's 128"),
        (["--tokens", "1"], "tokens=1 must be at least 2"),
        (["--block", "12"], "block=12 must be a positive multiple of 8"),
        (["--plot", "/no/such/folder/x.png"], "must be a file in a folder that exists"),
    ],
)
def test_errors_are_one_clear_line(tiny_folder, arguments, message):
    result = _run("--model", tiny_folder, *SMALL, "--policy", "window", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_too_short(tiny_folder, tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"abc")
    result = _run("--model", tiny_folder, *SMALL, "--file", str(file))
    assert result.exit_code == 2
    assert "has 3 bytes, must have at least 95" in result.stderr


def test_a_model_of_other_tokens_is_refused(tmp_path):
    config = models.TransformerConfig(300, 32, 48, 1, 4, 2, 16, 128)
    model = nnx.eval_shape(lambda: models.Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="vocab_size=300 must be 256"):
        measure.run(model, measure.MapSettings(file=tmp_path))
