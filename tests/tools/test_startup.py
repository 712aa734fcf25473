"""What commands refuse before anything slow: files, pictures, memory."""

import errno
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.tools.command_line import refuses
from turbojax import models
from turbojax.app import startup
from turbojax.app.main import app

PLOTTING = {
    "demo": ["demo", "--model", "MODEL"],
    "levels": ["levels", "--model", "MODEL"],
    "train": ["train", "--model", "MODEL", "--out", "OUT"],
    "compare": ["compare", "OUT", "OUT"],
}


def _run(*arguments: str, columns: str = "120"):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": columns})


def _command(name: str, tmp_path: Path, *more: str):
    """A command on a model that does not exist: what is refused comes before that."""
    names = {"MODEL": "/nowhere", "OUT": str(tmp_path / "out")}
    return _run(*(names.get(x, x) for x in PLOTTING[name]), *more)


def _refused(result, *messages: str) -> None:
    refuses(result)
    assert len(result.stderr.splitlines()) == 1
    for message in messages:
        assert message in result.stderr


class TestFiles:
    @pytest.mark.parametrize("name", PLOTTING)
    @pytest.mark.parametrize("ending", [".xyz", "", ".txt"])
    def test_endings_that_matplotlib_does_not_know(self, tmp_path, name, ending):
        plot = f"{tmp_path}/picture{ending}"
        _refused(_command(name, tmp_path, "--plot", plot), f"--plot {plot} must end with", ".png")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", PLOTTING)
    def test_no_matplotlib(self, tmp_path, name, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda x, *y: None if x == "matplotlib" else find(x, *y)
        )
        result = _command(name, tmp_path, "--plot", f"{tmp_path}/x.png")
        refuses(result, "--plot needs", "matplotlib: pip install")

    @pytest.mark.parametrize("name", PLOTTING)
    def test_pictures_in_folders_that_do_not_exist(self, tmp_path, name):
        plot = f"{tmp_path}/no/x.png"
        _refused(_command(name, tmp_path, "--plot", plot), f"--plot {plot} must be a file in a")

    @pytest.mark.parametrize("ending", [".png", ".PDF", ".svg", ".jpg"])
    def test_endings_that_it_knows(self, tmp_path, ending):
        startup.check_plot(tmp_path / f"x{ending}")
        startup.check_plot(None)

    def test_files_to_write(self, tmp_path):
        file = tmp_path / "file"
        file.write_text("kept")
        startup.check_output_file("--write", file)
        startup.check_output_file("--write", tmp_path / "new")
        startup.check_output_file("--write", Path("/dev/null"))
        assert os.listdir(tmp_path) == ["file"]
        assert file.read_text() == "kept"
        for path in (tmp_path, tmp_path / "no" / "new", file / "new"):
            with pytest.raises(ValueError, match="--write .* must be a file in a folder that"):
                startup.check_output_file("--write", path)

    def test_folders_to_write(self, tmp_path):
        file = tmp_path / "file"
        file.write_text("kept")
        for path in (tmp_path, tmp_path / "new", tmp_path / "some" / "deep" / "folder"):
            startup.check_output_folder("--out", path)
        for path in (file, file / "below"):
            with pytest.raises(ValueError, match=r"--out .* must be a folder, '.*file' is a file"):
                startup.check_output_folder("--out", path)
        assert os.listdir(tmp_path) == ["file"]

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody writes")
    @pytest.mark.parametrize(
        "arguments",
        [
            ["demo", "--model", "/nowhere", "--plot", "/proc/x.png"],
            ["train", "--model", "/nowhere", "--out", "/proc/turbojax"],
            ["quantize", "--out", "/proc/turbojax"],
            ["compare", "/nowhere", "/nowhere", "--write", "/proc/x.json"],
            ["serve", "REQUESTS", "--model", "/nowhere", "--out", "/proc/x.jsonl"],
        ],
    )
    def test_places_where_nobody_can_write(self, tmp_path, arguments):
        requests = tmp_path / "requests"
        requests.write_text('{"prompt": "a"}')
        result = _run(*(str(requests) if x == "REQUESTS" else x for x in arguments))
        _refused(result, "must be where files can be written: '/proc'")

    def test_a_file_that_is_read_only(self, tmp_path, monkeypatch):
        file = tmp_path / "file"
        file.write_text("kept")
        monkeypatch.setattr(os, "access", lambda *_: False)  # who runs tests may write anywhere
        with pytest.raises(ValueError, match="must be a file that can be written"):
            startup.check_output_file("--out", file)

    def test_a_file_in_a_folder_that_is_read_only(self, tmp_path, monkeypatch):
        """It is written in place."""
        file = tmp_path / "file"
        file.write_text("kept")

        def refuse(**_):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        startup.check_output_file("--out", file)
        with pytest.raises(ValueError, match="must be where files can be written"):
            startup.check_output_file("--out", tmp_path / "new")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["demo", "--model", "/nowhere", "--file", "/no/such/file"],
            ["levels", "--model", "/nowhere", "--file", "/no/such/file"],
            ["quantize", "--out", "OUT", "--calibration-file", "/no/such/file"],
            ["quantize", "--out", "OUT", "--evaluation-file", "/no/such/file"],
        ],
    )
    def test_texts_that_are_not_there(self, tmp_path, arguments, monkeypatch):
        monkeypatch.setattr("turbojax.app.text_model.load_tokenizer", None)
        out = str(tmp_path / "out")
        result = _run(*(out if x == "OUT" else x for x in arguments))
        _refused(result, "No such file or directory: '/no/such/file'")

    def test_caches_of_the_demo(self):
        _refused(_run("demo", "--model", "/nowhere", "--cache", "exact,5bit"), "cache '5bit' must")


class TestMemory:
    @pytest.mark.parametrize(
        "options",
        [
            ["--batch-size", "1000000000"],
            ["--batch-size", "1000000000000000"],
            ["--batch-size", "1000000000", "--prefill-batch-size", "1", "--cache", "turbo4"],
            ["--batch-size", "1000000000", "--cache", "exact", "--prompt-tokens", "1"],
        ],
    )
    def test_a_batch_that_does_not_fit(self, options):
        begun = time.monotonic()
        result = _run("generate", "--random-weights", "tiny", *options)
        _refused(result, "this needs at least", "GB are free: smaller --batch-size, ")
        assert time.monotonic() - begun < 20

    def test_prompts_that_run_at_a_time_count(self, monkeypatch):
        monkeypatch.setattr(startup, "available_memory", lambda: 10**8)
        options = ["--random-weights", "tiny", "--batch-size", "1500", "--max-new-tokens", "1"]
        result = _run("generate", *options, "--cache", "turbo4")
        _refused(result, " of 1,500 prompts of 128 tokens that run", "--prefill-batch-size")

    def test_a_device_says_what_it_has(self, monkeypatch):
        for held, free in (({"bytes_limit": 100, "bytes_in_use": 30}, 70), (None, None)):
            device = SimpleNamespace(platform="gpu", memory_stats=lambda held=held: held)
            monkeypatch.setattr(startup.jax, "local_devices", lambda device=device: [device])
            assert startup.available_memory() == free

    def test_a_batch_of_a_checkpoint_before_its_weights_are_read(self, tiny_folder, monkeypatch):
        monkeypatch.setattr(models, "load_decoder", None)
        options = ["a", "--model", tiny_folder, "--max-new-tokens", "9"]
        _refused(_run("generate", *options, "--batch-size", "10000000000"), "GB are free")
        _refused(
            _run("generate", *options[:-1], "127"),
            "a prompt of 2 tokens and max_new_tokens=127 must be at most the model's 128 tokens",
        )

    def test_weights_that_do_not_fit(self, monkeypatch, tmp_path):
        monkeypatch.setattr(startup, "available_memory", lambda: 10**9)
        _refused(
            _run("generate", "--random-weights", "llama-3-8b"), "16.1 GB of weights), and 1.0 GB"
        )
        # The model is not loaded for it: a quarter of one in bfloat16, and three times a layer.
        (tmp_path / "model.safetensors").write_bytes(b"")
        (tmp_path / "config.json").write_text(json.dumps(models.SHAPES["llama-3-8b"].to_hf()))
        _refused(
            _run("quantize", "--out", str(tmp_path / "x"), "--model", str(tmp_path)),
            "at least 6.6 GB of memory (4.0 GB of quantized weights, 2.6 GB of three times a layer",
        )

    @pytest.mark.parametrize(
        "options",
        [
            ["--num-pages", "1000000000"],
            ["--pool-bytes", "1000000000000000"],
            ["--max-sequences", "1000000000"],
        ],
    )
    def test_a_pool_that_does_not_fit(self, tiny_folder, tmp_path, options, monkeypatch):
        monkeypatch.setattr(models, "load_decoder", None)
        file, out = tmp_path / "requests", tmp_path / "out"
        file.write_text('{"prompt": "a", "max_new_tokens": 2}')
        arguments = ["serve", str(file), "--model", tiny_folder, "--out", str(out)]
        _refused(_run(*arguments, *options), "this needs at least", "smaller --num-pages")
        assert not out.exists()

    @pytest.mark.parametrize(
        "options", [["--batch", "1000000"], ["--batch", "1000000", "--remat=full"]]
    )
    def test_a_training_step_that_does_not_fit(self, tiny_folder, tmp_path, options):
        words = tmp_path / "words"
        words.write_text("some words " * 1000)
        out = tmp_path / "out"
        arguments = ["train", "--model", tiny_folder, "--out", str(out), "--data", str(words)]
        _refused(_run(*arguments, *options), "GB of 1,000,000 sequences", "smaller --batch or")
        assert not out.exists()

    def test_what_fits_is_not_refused(self):
        startup.check_memory({"weights": 10, "caches": 20}, "smaller", available=30)
        with pytest.raises(ValueError, match=r"at least 0.0 MB of memory \(.*caches, .*weights"):
            startup.check_memory({"weights": 10, "caches": 21}, "smaller", available=30)

    def test_nothing_is_refused_where_memory_is_not_known(self, monkeypatch):
        monkeypatch.setattr(startup, "available_memory", lambda: None)
        startup.check_memory({"weights": 10**30}, "smaller")

    def test_memory_of_this_machine(self):
        free = startup.available_memory()
        assert free is None or 10**6 < free < 10**15

    def test_a_container_has_less(self, tmp_path, monkeypatch):
        """The group of the process, or one around it, may allow less than the machine has."""
        own = next(
            x[3:] for x in Path("/proc/self/cgroup").read_text().splitlines() if x[:3] == "0::"
        )
        group = tmp_path / own.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        for name, content in (
            ("memory.max", "5000000\n"),
            ("memory.current", "3000000\n"),
            ("memory.stat", "anon 1\ninactive_file 400000\nactive_file 600000\n"),
        ):
            (group / name).write_text(content)
        assert list(startup._group_memory(tmp_path)) == [3_000_000]
        (group / "memory.max").write_text("max\n")
        assert not list(startup._group_memory(tmp_path))

    @pytest.mark.quick(11, slow=0)
    @pytest.mark.parametrize("kind", models.CACHE_NAMES)
    def test_bytes_are_those_of_the_caches(self, tiny_folder, kind):
        decoder = models.load_decoder(tiny_folder, dtype=jnp.float32)
        cache = models.cache_by_name(kind, decoder.config.num_kv_heads)
        for batch, length in ((1, 20), (3, 100)):
            made = models.init_caches(decoder, batch, length, cache)
            found = startup.cache_bytes(decoder.config, decoder.dtype, batch, length, cache)
            assert found == made.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="about Linux")
def test_memory_is_not_read_from_a_file_that_is_not_there(monkeypatch):
    monkeypatch.setattr(startup, "Path", lambda _: Path("/no/such/file"))
    assert startup.available_memory() > 10**6


def test_the_command_imports_no_models():
    """They take a second, in which nobody wants to wait for `--help` or a wrong option."""
    slow = ["turbojax.models", "turbojax.flax", "turbojax.finetune", "flax", "optax", "matplotlib"]
    code = f"""
import sys
import turbojax.app.main
found = [name for name in {slow} if name in sys.modules]
app = [name for name in sys.modules if name.startswith("turbojax.app.")]
found += [name for name in app if name.endswith((".run", ".measure", "_model"))]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", get_command(app).commands)
def test_help_names_no_single_family_as_what_can_be_loaded(name):
    text = " ".join(_run(name, "--help", columns="300").stdout.split())
    assert "Usage:" in text
    assert "Llama checkpoint" not in text
