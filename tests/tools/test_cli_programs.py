"""Compiled programs that the commands keep on disk."""

import os
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from tests.training.interrupt_helpers import environment, turbojax
from turbojax.app import programs as cli_programs
from turbojax.app.main import app

SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """No folder chosen yet; the user's is a temporary one; all is as it was afterwards."""
    old = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cli_programs, "folder", lambda: tmp_path / "cache" / "programs")
    with warnings.catch_warnings():
        jax.config.update("jax_compilation_cache_dir", None)
        yield lambda: {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in old.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_a_folder_of_the_user(settings, tmp_path):
    cli_programs.use(True, "turbojax test")
    (programs,) = (tmp_path / "cache" / "programs").iterdir()
    assert settings()["jax_compilation_cache_dir"] == str(programs)
    assert settings()["jax_persistent_cache_min_compile_time_secs"] < 1
    assert programs.stat().st_mode & 0o077 == 0


def test_the_users_own_folder_stays(settings, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    before = settings()
    cli_programs.use(True, "turbojax test")
    assert settings() == before
    assert not (tmp_path / "cache").exists()


def test_none_are_kept_if_asked(settings):
    cli_programs.use(False, "turbojax test")
    assert not settings()["jax_enable_compilation_cache"]
    assert settings()["jax_compilation_cache_dir"] is None


def test_a_folder_that_cannot_be_written_is_one_line(settings, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file")
    cli_programs.use(True, "turbojax test")
    assert settings()["jax_compilation_cache_dir"] is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("turbojax test: compiled programs are not kept: ")
    assert "--no-compilation-cache" in line


def test_processors_do_not_share_programs(monkeypatch):
    here = cli_programs._processor()
    assert here == cli_programs._processor()
    monkeypatch.setattr(cli_programs.Path, "read_text", lambda *_, **__: "flags\t: avx9000\n")
    assert cli_programs._processor() != here


def test_the_oldest_go_first(tmp_path):
    now = time.time()
    for i in range(6):
        path = tmp_path / "cpu" / f"jit_f-{i}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (now - 100 * (i % 3), now - 1000))
    (tmp_path / "cpu" / "another").write_bytes(bytes(1000))
    cli_programs.remove_oldest(tmp_path, 400)
    assert {path.name for path in (tmp_path / "cpu").iterdir()} == {
        *(f"jit_f-{i}-cache" for i in (0, 1, 3, 4)),
        "another",
    }
    cli_programs.remove_oldest(tmp_path / "nowhere", 0)


@pytest.mark.fuzz
@pytest.mark.parametrize("broken", [b"", b"no program", None])
def test_a_broken_program_is_compiled_and_kept_anew(
    broken, settings, tmp_path, monkeypatch, capsys
):
    """As a process leaves it that is killed while it writes."""
    from jax.experimental.compilation_cache import compilation_cache

    monkeypatch.setattr(cli_programs, "_LEAST_SECONDS", 0)
    compilation_cache.reset_cache()
    cli_programs.use(True, "turbojax test")

    def compiled() -> bytes:
        (jax.jit(lambda x: jnp.sin(x) * len(SETTINGS))).lower(jnp.ones(7)).compile()
        (file,) = (tmp_path / "cache").rglob("jit__lambda*-cache")
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if broken is None else broken)
        return content

    try:
        first = compiled()
        jax.clear_caches()
        assert len(compiled()) > 0.9 * len(first)
        assert capsys.readouterr().err == ""
    finally:
        compilation_cache.reset_cache()


def test_a_full_disk_is_said_once(settings, capsys):
    cli_programs.use(True, "turbojax test")
    for program in ("jit_f", "jit_g"):
        warnings.warn(
            f"Error writing persistent compilation cache entry for '{program}': OSError: full",
            stacklevel=1,
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "turbojax test: compiled programs are not kept: OSError: full"


@pytest.mark.parametrize("command", ["generate", "serve", "train", "demo", "levels", "quantize"])
def test_every_command_has_the_option(command):
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).stdout
    assert "--no-compilation-cache" in text
    assert "JAX_COMPILATION_CACHE_DIR" in text


@pytest.mark.fuzz
def test_the_second_run_compiles_nothing_large(tmp_path):
    env = {**environment(tmp_path), "JAX_LOG_COMPILES": "0"}
    command = turbojax("generate", "--random-weights", "tiny", "--max-new-tokens", "4")

    def run(*more: str) -> set[str]:
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done
        return {str(path) for path in tmp_path.rglob("*-cache")}

    assert run("--no-compilation-cache") == set()
    first = run()
    assert any("next_tokens" in name for name in first)
    times = {name: os.stat(name).st_mtime_ns for name in first}
    assert run() >= first
    assert times == {name: os.stat(name).st_mtime_ns for name in first}
    assert sys.platform != "linux" or all("x86_64-" in x or "aarch64-" in x for x in first)
