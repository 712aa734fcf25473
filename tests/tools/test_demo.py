"""The `turbojax demo` command: what it reports, and what it says when it cannot."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

from tests.tools.command_line import refuses, run, works
from turbojax import models
from turbojax.app.demo.measure import DemoSettings, default_file
from turbojax.app.main import app

SMALL = ["--prompt-bytes", "70", "--new-bytes", "8", "--generate-bytes", "4"]


_run = functools.partial(run, "demo")


@pytest.mark.fuzz
def test_json_report(tiny_folder, tmp_path):
    plot = tmp_path / "demo.png"
    # More than the 8-bit buffer of a compressed cache takes by itself.
    longer = ["--prompt-bytes", "110"]
    result = works(_run("--model", tiny_folder, *SMALL, *longer, "--json", "--plot", str(plot)))
    report = json.loads(result.stdout)
    exact, *compressed = report["results"]
    assert [row["name"] for row in report["results"]] == ["exact", "4bit", "2/4bit"]
    assert exact["agreement"] == 1.0
    assert 0.99 < exact["compression_ratio"] <= 1.0
    for row in compressed:
        assert abs(row["bits_per_byte"] - exact["bits_per_byte"]) < 0.2
        assert row["nbytes"] < exact["nbytes"]
        assert row["bytes_per_second"] > 0
        assert len(row["generated"]) > 0
    assert compressed[1]["nbytes"] < compressed[0]["nbytes"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.fuzz
def test_table_names_each_cache_and_its_text(tiny_folder):
    result = works(_run("--model", tiny_folder, *SMALL, "--cache", "exact, 3bit"))
    for text in ("bits/", "exact continues", "3bit continues", "70 bytes prefilled"):
        assert text in result.stdout


@pytest.mark.slow
def test_exact_bits_per_byte_is_that_of_the_model(tiny_folder, tmp_path):
    text = bytes(range(1, 100))
    file = tmp_path / "text"
    file.write_bytes(text)
    result = _run("--model", tiny_folder, *SMALL, "--json", "--file", str(file), "--cache", "exact")
    row = json.loads(result.stdout)["results"][0]
    tokens = jnp.array([[models.BEGINNING_OF_FILE, *text[:78]]])
    logits = models.load(tiny_folder, dtype=jnp.float32)(tokens)[0, 70:78]
    losses = jnp.stack(
        [jax.nn.logsumexp(l) - l[t] for l, t in zip(logits, text[70:78], strict=True)]
    )
    assert row["bits_per_byte"] == pytest.approx(float(losses.mean()) / 0.6931472, abs=2e-3)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["--file", "/"], "Is a directory"),
        (["--cache", "5bit"], "cache '5bit' must be one of exact, 4bit, k4v2, 2/4bit, 3bit"),
        (["--cache", "4bit,4bit"], "must name each cache once"),
        (["--new-bytes", "0"], "new_bytes=0 must be at least 1"),
        (["--prompt-bytes", "1000"], "must be at most the model's 128"),
        (["--model", "/no/such/folder"], "'/no/such/folder' must be 'embedded' or a folder"),
        (["--plot", "/no/such/folder/x.png"], "must be a file in a folder that exists"),
    ],
)
def test_errors_are_one_clear_line(tiny_folder, arguments, message):
    result = refuses(_run("--model", tiny_folder, *SMALL, "--cache", "exact", *arguments), message)
    assert len(result.stderr.strip().splitlines()[-1]) < 400


def test_a_file_that_is_too_short(tiny_folder, tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"abc")
    result = _run("--model", tiny_folder, *SMALL, "--file", str(file))
    refuses(result, "has 3 bytes, must have at least 78")


@pytest.mark.slow
def test_a_run_too_short_to_time_is_still_json(tiny_folder):
    result = _run("--model", tiny_folder, *SMALL, "--new-bytes", "1", "--cache", "exact", "--json")
    assert json.loads(result.stdout)["results"][0]["bytes_per_second"] is None
    table = _run("--model", tiny_folder, *SMALL, "--new-bytes", "1", "--cache", "exact")
    assert table.exit_code == 0


def test_a_model_of_other_tokens_is_refused(tmp_path):
    config = models.TransformerConfig(300, 32, 48, 1, 4, 2, 16, 128)
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), tmp_path)
    refuses(_run("--model", str(tmp_path), *SMALL), "vocab_size=300 must be 256")


def test_default_file_is_a_held_out_module():
    file = default_file(4000)
    assert file.name in models.held_out_modules()
    assert file.stat().st_size >= 4000
    with pytest.raises(FileNotFoundError, match="at least 1000000000 bytes"):
        default_file(10**9)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="prompt_bytes=0"):
        DemoSettings(file=Path("x"), prompt_bytes=0)
    with pytest.raises(ValueError, match="must name each cache once"):
        DemoSettings(file=Path("x"), caches=())


def test_help_and_version():
    help_text = CliRunner().invoke(app, ["--help"]).stdout
    assert "demo" in help_text
    assert "--version" in help_text
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("turbojax 0.")


@pytest.mark.slow
def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import turbojax.__main__ as m; {}"
    wanted = "the turbojax command needs typer: pip install 'typer>=0.15' 'rich>=13' "
    options = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", code.format("m.main()")], **options)
    assert (done.returncode, done.stderr.startswith(wanted)) == (1, True)
    # Whoever imports it gets an error that can be caught: no import ends a process.
    imported = code.format("import turbojax.app.main")
    done = subprocess.run([sys.executable, "-c", imported], **options)
    assert f"MissingError: {wanted}" in done.stderr
