"""`turbojax serve`: bad lines, standard input, and results beside progress."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.tools.command_line import refuses, works, write
from turbojax.app.main import app
from turbojax.app.serve import command
from turbojax.app.serve import results as serve_results
from turbojax.app.serve.results import Screen
from turbojax.models.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
GOOD = '{"prompt": "abc"}'
MIXED = [
    GOOD,
    "{",
    '{"prompt": 3}',
    "",
    '{"id": 1, "prompt": "its id is taken"}',
    json.dumps({"prompt": "a" * 200}),
    '{"prompt": "a", "stop": [256]}',
    '{"id": "last", "prompt": "b"}',
]
WRONG = {
    2: "not JSON",
    3: "'prompt' must be a string",
    5: "id 1 must not be that of line 1",
    6: "a prompt of 201 tokens and 2 new ones must be at most max_length=128",
    7: "token=256 of a request must be within 0..255",
}


def _serve(folder: str, *arguments: str, **options):
    fixed = ["--model", folder, "--max-new-tokens", "2"]
    return CliRunner().invoke(app, ["serve", *arguments, *fixed], **options)


def _not_loaded(*_, **__):
    raise AssertionError("the weights were read")


def test_all_bad_lines_are_named_before_the_weights_are_read(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("turbojax.models.load_decoder", _not_loaded)
    file = write(tmp_path, *MIXED)
    result = _serve(tiny_folder, file)
    assert (result.exit_code, result.stdout) == (2, "")
    *named, last = result.stderr.splitlines()
    for (number, reason), line in zip(WRONG.items(), named, strict=True):
        assert line.startswith(f"turbojax serve: {file}: line {number}: {reason}")
    assert last.endswith("5 of 7 requests are bad, nothing ran: --skip-bad runs the others")


@pytest.mark.slow
def test_bad_lines_can_be_skipped(tiny_folder, tmp_path):
    file = write(tmp_path, *MIXED)
    result = works(_serve(tiny_folder, file, "--skip-bad"))
    assert {json.loads(line)["id"] for line in result.stdout.splitlines()} == {1, "last"}
    for number in WRONG:
        assert f"{file}: line {number}: " in result.stderr
    assert "5 of 7 requests are bad: skipped" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("; 5 bad lines skipped")


@pytest.mark.parametrize("option", [[], ["--skip-bad"]])
def test_nothing_but_bad_lines(tiny_folder, tmp_path, option):
    result = refuses(_serve(tiny_folder, write(tmp_path, *["{"] * 30), *option))
    lines = result.stderr.splitlines()
    # The first twenty, and how many there are.
    assert len(lines) == 21
    assert "line 20: not JSON" in lines[-2]
    assert "30 of 30 requests are bad: nothing can run" in lines[-1]


def test_a_pool_that_is_too_small_for_some(tiny_folder, tmp_path):
    lines = [GOOD, json.dumps({"prompt": "a" * 60})]
    options = ["--num-pages", "2", "--page-size", "16"]
    result = _serve(tiny_folder, write(tmp_path, *lines), *options)
    refuses(result, "line 2: a prompt of 61 tokens and 2 new ones need 4 pages, must")


def test_a_reason_is_never_longer_than_a_few_lines(tiny_folder, tmp_path):
    line = json.dumps({"prompt": "a", "x" * 100_000: 1})
    result = _serve(tiny_folder, write(tmp_path, line))
    assert len(result.stderr) < 1000


@pytest.mark.slow
def test_requests_from_standard_input(tiny_folder, tmp_path):
    file = tmp_path / "-"
    file.write_text("not this file")
    result = works(_serve(tiny_folder, "-", input=f"{GOOD}\n{GOOD}"))
    assert [json.loads(x)["id"] for x in result.stdout.splitlines()] == [1, 2]
    result = _serve(tiny_folder, "-", input="{")
    assert "standard input: line 1: not JSON" in result.stderr
    assert "standard input: there must be" in _serve(tiny_folder, "-", input="\n").stderr


@pytest.mark.slow
def test_compiling_is_said_before_the_first_step(tiny_folder, tmp_path, monkeypatch):
    """To a pipe as a line; a terminal has it in the bar."""
    happened = []
    step, echo = Engine.step, command.typer.echo
    monkeypatch.setattr(Engine, "step", lambda engine: (happened.append("step"), step(engine))[1])
    monkeypatch.setattr(
        command.typer, "echo", lambda line, **kind: (happened.append(line), echo(line, **kind))
    )
    assert _serve(tiny_folder, write(tmp_path, GOOD)).exit_code == 0
    assert happened[:2] == ["compiling", "step"]


def _whole_lines(shown: str) -> list[str]:
    """What a terminal shows line by line; a line is what comes after the last erasing of it."""
    lines = []
    for line in re.split(r"\r?\n", shown):
        last = re.split(r"\x1b\[[0-9]*K", line)[-1].rpartition("\r")[2]
        lines.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last))
    return lines


def test_a_terminal_shows_results_above_the_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(
        serve_results, "Console", lambda **_: Console(file=terminal, force_terminal=True, width=80)
    )
    results = [json.dumps({"id": i, "text": "[bold]:smile: " * 20}) for i in range(3)]
    with Screen(3, 0, None) as screen:
        screen.begin()
        screen._bar.refresh()
        assert "compiling" in terminal.getvalue()
        assert "requests" not in terminal.getvalue()
        for result in results:
            screen.advance(1, 1)
            screen.write(result)
            screen._bar.refresh()
    lines = _whole_lines(terminal.getvalue())
    assert [line for line in lines if line.startswith('{"id"')] == results
    assert any("requests" in line for line in lines)
    assert screen.note() == "3 results are on standard output"


def test_a_pipe_gets_results_while_the_bar_is_on_a_terminal(monkeypatch):
    terminal, pipe = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(
        serve_results, "Console", lambda **_: Console(file=terminal, force_terminal=True, width=80)
    )
    with Screen(1, 0, None) as screen:
        screen.begin()
        screen.advance(1, 1)
        screen.write('{"id": 1}')
        screen._bar.refresh()
    assert pipe.getvalue() == '{"id": 1}\n'
    assert '"id"' not in terminal.getvalue()
    assert "requests" in terminal.getvalue()


@pytest.mark.fuzz
@pytest.mark.parametrize("piped", [False, True])
def test_results_and_progress_on_a_real_terminal(tiny_folder, tmp_path, piped):
    """Standard output and error are one terminal, or the terminal shows progress alone."""
    lines = [json.dumps({"prompt": "abc", "max_new_tokens": 90})] * 6
    controller, terminal = pty.openpty()
    code = "from turbojax.app.main import main; main()"
    options = [write(tmp_path, *lines), "--model", tiny_folder, "--max-sequences", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    out = tmp_path / "out"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *options],
            env=environment,
            stdin=terminal,
            stdout=file if piped else terminal,
            stderr=terminal,
        )
    os.close(terminal)
    shown = bytearray()
    while True:
        try:
            piece = os.read(controller, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(controller)
    assert process.wait() == 0
    text = shown.decode()
    assert "compiling" in text
    lines = out.read_text().splitlines() if piped else _whole_lines(text)
    results = [json.loads(x) for x in lines if x.startswith('{"id"')]
    assert sorted(x["id"] for x in results) == [1, 2, 3, 4, 5, 6]
    # None of them anywhere else.
    assert text.count('{"id"') == (0 if piped else 6)
