"""`turbojax serve --resume`: what was interrupted goes on, and gives what it would have given."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.models import hf_helpers
from tests.tools.command_line import refuses, works, write
from turbojax import _locks, models
from turbojax.app.main import app
from turbojax.app.serve import results as serve_results
from turbojax.app.serve import run as serving
from turbojax.app.serve.results import Screen

if _locks.EXIST:
    import fcntl

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("seconds", "first_token_seconds", "reused_tokens", "preemptions")
LINES = [
    {"prompt": "abc", "max_new_tokens": 3},
    {"prompt": "abc", "temperature": 1.0},
    {"id": "named", "prompt": "xyz é", "temperature": 0.8, "top_k": 9},
    {"prompt": "the longest of them", "max_new_tokens": 21},
    {"prompt": "abc", "temperature": 1.0},
]


def _write(tmp_path, lines=LINES) -> str:
    return write(tmp_path, *lines)


def _serve(folder: str, *arguments: str, **options):
    fixed = ["--model", folder, "--max-new-tokens", "6", "--max-sequences", "2"]
    return CliRunner().invoke(app, ["serve", *fixed, *arguments], **options)


def _results(out: Path) -> dict:
    """Results by id, without what depends on the time and on what else ran."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: {k: v for k, v in row.items() if k not in TIMES} for row in rows}


@pytest.fixture(scope="module")
def whole(tiny_folder, tmp_path_factory) -> Path:
    """The results of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    works(_serve(tiny_folder, _write(folder), "--out", str(folder / "out")))
    assert len(_results(folder / "out")) == len(LINES)
    return folder / "out"


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("cut", [0, 1, -1])
@pytest.mark.parametrize("count", [0, 2, 4, 5])
def test_a_run_goes_on_where_it_was_cut(tiny_folder, tmp_path, whole, count, cut):
    """After any number of results, and in the middle of a line."""
    lines = whole.read_bytes().splitlines(keepends=True)
    # Nothing, one byte, or all but the end of the next line.
    part = lines[count][:cut] if count < len(lines) else b""
    out = tmp_path / "out"
    out.write_bytes(b"".join(lines[:count]) + part)
    result = works(_serve(tiny_folder, _write(tmp_path), "--out", str(out), "--resume"))
    assert _results(out) == _results(whole)
    assert out.read_bytes().startswith(b"".join(lines[:count]))
    assert f"{len(LINES) - count} requests" in result.stdout
    if count:
        assert f"{count} had results already" in result.stdout
    assert ("compiling" in result.stderr) == (count < len(LINES))


def test_an_exception_after_each_result(tiny_folder, tmp_path, whole, monkeypatch):
    """Interrupted after every single result: every run adds one, the last one ends."""
    plain = serve_results.ResultFile.write

    def write(self, line):
        plain(self, line)
        raise OSError(28, "No space left on device", "out")

    out, runs = tmp_path / "out", 0
    arguments = (_write(tmp_path), "--out", str(out), "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(serve_results.ResultFile, "write", write)
        while len(out.read_bytes().splitlines() if out.exists() else ()) < len(LINES):
            refuses(_serve(tiny_folder, *arguments), "No space left on device: 'out'")
            runs += 1
    assert runs == len(LINES)
    assert "5 had results already" in _serve(tiny_folder, *arguments).stdout
    assert _results(out) == _results(whole)


def test_a_disk_that_is_full_in_the_middle_of_a_line(tmp_path):
    """What found room is in the file, and the error names it."""

    class Full:
        def write(self, data):
            if not room:
                raise OSError(28, "No space left on device")
            room.pop()
            written.append(data[:3])
            return 3

    room, written = [1, 1], []
    results = serve_results.ResultFile(tmp_path / "out", Full(), {}, 0)
    with pytest.raises(OSError, match=r"No space left on device: '.*out'"):
        results.write('{"id": 1}')
    assert b"".join(written) == b'{"id":'


@pytest.mark.parametrize("content", ["kept", '{"id": 1}\n', "\n"])
def test_results_are_not_overwritten(tiny_folder, tmp_path, content):
    out = tmp_path / "out"
    out.write_text(content)
    result = _serve("/nowhere", _write(tmp_path), "--out", str(out))
    refuses(result, "holds results already: --resume keeps them and goes on, --overwrite")
    assert out.read_text() == content


def test_overwriting_is_asked_for(tiny_folder, tmp_path, whole):
    out = tmp_path / "out"
    out.write_text("old")
    works(_serve(tiny_folder, _write(tmp_path), "--out", str(out), "--overwrite"))
    assert _results(out) == _results(whole)


def test_a_file_that_was_made_for_nothing_goes_away(tiny_folder, tmp_path):
    out = tmp_path / "out"
    file = _write(tmp_path, [{"prompt": 3}])
    assert _serve(tiny_folder, file, "--out", str(out)).exit_code == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("lines", "options", "line"),
    [
        # A line more at the beginning: all others have other numbers.
        ([{"prompt": "abd"}, *LINES], [], 1),
        ([{**LINES[0], "prompt": "abd"}, *LINES[1:]], [], 1),
        ([*LINES[:2], {**LINES[2], "top_k": 8}, *LINES[3:]], [], 3),
        ([*LINES[:3], {**LINES[3], "stop": ["x"]}, *LINES[4:]], [], 4),
        (LINES, ["--kv-dtype", "turbo4"], 1),
        (LINES, ["--dtype", "bfloat16"], 1),
        # The last of an option counts.
        (LINES, ["--max-new-tokens", "7"], 2),
    ],
)
def test_results_of_other_requests_are_refused(tiny_folder, tmp_path, whole, lines, options, line):
    out = tmp_path / "out"
    out.write_bytes(whole.read_bytes())
    file = _write(tmp_path, lines)
    result = _serve(tiny_folder, file, "--out", str(out), "--resume", *options)
    refuses(result, f"line {line}: --out holds a result with its id")
    assert out.read_bytes() == whole.read_bytes()


def test_results_of_no_request_are_kept(tiny_folder, tmp_path, whole):
    out = tmp_path / "out"
    out.write_bytes(whole.read_bytes())
    result = works(_serve(tiny_folder, _write(tmp_path, LINES[:2]), "--out", str(out), "--resume"))
    assert "3 results in --out are of no request here: kept" in result.stderr
    assert out.read_bytes() == whole.read_bytes()


def test_what_was_aborted_runs_again_and_what_failed_does_not(tiny_folder, tmp_path, whole):
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    rows[0]["finish_reason"], rows[1]["finish_reason"] = "aborted", "failed"
    out = tmp_path / "out"
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = works(_serve(tiny_folder, _write(tmp_path), "--out", str(out), "--resume"))
    assert "4 had results already" in result.stdout
    last = json.loads(out.read_text().splitlines()[-1])
    assert (last["id"], last["finish_reason"]) == (rows[0]["id"], "length")


@pytest.mark.parametrize(
    "content",
    ["words\n", "[1]\n", '{"id": 1}\n', '{"id": 1.5, "request": "a", "finish_reason": "stop"}\n'],
)
def test_a_file_of_something_else_is_refused(tiny_folder, tmp_path, content):
    out = tmp_path / "out"
    out.write_text(content)
    result = _serve(tiny_folder, _write(tmp_path), "--out", str(out), "--resume")
    refuses(result, "line 1: is no result of turbojax serve, so --resume cannot go on")
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume is for --out"),
        (["--overwrite"], "--overwrite is for --out"),
        (["--resume", "--overwrite", "--out", "x"], "give one"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, message):
    refuses(_serve("/nowhere", _write(tmp_path), *options), message)


def test_what_an_interrupted_run_can_say(tmp_path):
    """Of two requests one had a result, and the other gets one."""
    out = tmp_path / "out"
    with serve_results.open_results(out, resume=False, overwrite=False) as results:
        screen = Screen(2, 1, results)
        wanted = f"1 results are in {out}, 1 are left: the same command with --resume goes on"
        assert screen.note() == wanted
        screen.write("{}")
        assert screen.note().startswith(f"2 results are in {out}, 0 are left")


@pytest.mark.skipif(not _locks.EXIST, reason="needs locks of files")
@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_second_writer_is_refused_at_once(tmp_path, whole, option):
    out = tmp_path / "out"
    out.write_bytes(whole.read_bytes())
    with serve_results.open_results(out, resume=True, overwrite=False):
        result = _serve("/nowhere", _write(tmp_path), "--out", str(out), option)
    refuses(result, "another process writes to it")
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.skipif(not _locks.EXIST, reason="needs locks of files")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    out = tmp_path / "out"
    with serve_results.open_results(out, resume=False, overwrite=False) as results:
        results.begin()
        results.write("{}")
    assert out.read_text() == "{}\n"


@pytest.mark.skipif(not _locks.EXIST, reason="needs locks of files")
def test_a_file_that_another_process_removes_meanwhile(tmp_path, monkeypatch):
    """It made the file and failed, between our opening and locking it: results have a name."""
    out, flock = tmp_path / "out", fcntl.flock
    first = serve_results.open_results(out, resume=False, overwrite=False)
    first.__enter__()

    def later(*arguments):
        monkeypatch.setattr("fcntl.flock", flock)
        first.__exit__(None, None, None)
        assert not out.exists()
        flock(*arguments)

    monkeypatch.setattr("fcntl.flock", later)
    with serve_results.open_results(out, resume=False, overwrite=False) as results:
        results.begin()
        results.write("{}")
    assert out.read_text() == "{}\n"


@pytest.mark.skipif(not _locks.EXIST, reason="needs locks of files")
def test_a_file_that_is_removed_again_and_again(tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("fcntl.flock", lambda *arguments: out.unlink())
    with (
        pytest.raises(ValueError, match="other processes make and remove it"),
        serve_results.open_results(out, resume=False, overwrite=False),
    ):
        pass
    assert not out.exists()


@pytest.mark.parametrize("whose", ["written by another", "replaced by another"])
def test_results_of_another_process_are_not_removed(tmp_path, whose):
    """By one that made the file, wrote nothing, and has no locks."""
    out = tmp_path / "out"
    with serve_results.open_results(out, resume=False, overwrite=False):
        if whose.startswith("replaced"):
            out.unlink()
        out.write_text("{}\n")
    assert out.read_text() == "{}\n"


def test_a_report_as_json_says_what_was_there(tiny_folder, tmp_path, whole):
    out = tmp_path / "out"
    out.write_bytes(whole.read_bytes())
    options = ["--out", str(out), "--resume", "--json"]
    report = json.loads(_serve(tiny_folder, _write(tmp_path), *options).stdout)
    assert (report["requests"], report["kept"], report["statistics"]) == (0, 5, None)


@pytest.mark.slow
def test_a_report_counts_samples_whether_they_run_or_ran(tiny_folder, tmp_path):
    file = _write(tmp_path, [{"prompt": "abc", "temperature": 1, "max_new_tokens": 2, "n": 3}])
    command = ["serve", file, "--model", tiny_folder, "--out", str(tmp_path / "out"), "--json"]
    first, second = (
        json.loads(CliRunner().invoke(app, [*command, *more]).stdout) for more in ([], ["--resume"])
    )
    assert [first["kept"], second["kept"]] == [0, 1]
    assert first["max_sequences"] == second["max_sequences"] == 3


@pytest.mark.fuzz
@pytest.mark.parametrize("after", [1, 3])
def test_a_killed_process_goes_on(tiny_folder, tmp_path, after):
    """SIGKILL as soon as there are some results: then the same texts as without."""
    lines = [{"prompt": "abc", "temperature": 1.0, "max_new_tokens": 100}] * 9
    file, out, one = _write(tmp_path, lines), tmp_path / "out", tmp_path / "one"
    options = ["--model", tiny_folder, "--max-sequences", "2", "--out"]
    code = "from turbojax.app.main import main; main()"
    command = [sys.executable, "-c", code, "serve", file, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, str(out)], env=environment, stderr=subprocess.DEVNULL)
    begun = time.monotonic()
    while not out.exists() or out.read_bytes().count(b"\n") < after:
        assert process.poll() is None
        assert time.monotonic() - begun < 120
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = out.read_bytes().count(b"\n")
    assert held < len(lines)
    for place, option in ((out, ["--resume"]), (one, [])):
        done = subprocess.run(
            [*command, str(place), *option], env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert _results(out) == _results(one)


def test_serving_what_is_done_already(tmp_path):
    with pytest.raises(ValueError, match="there must be at least one request"):
        serving.serve(None, [], emit=print, done={1})


def test_a_checkpoint_that_names_no_dtype(tiny_folder, tmp_path):
    """What is known before the weights are read decides whose results these are."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    out, file = tmp_path / "out", _write(tmp_path)
    for option in ([], ["--resume"]):
        result = works(_serve(str(folder), file, "--out", str(out), *option))
    assert "5 had results already" in result.stdout


@pytest.mark.fuzz
def test_other_factors_of_longrope_are_refused(tmp_path):
    """A longer request makes the engine take the long factors, and texts of the others differ."""
    folder = str(hf_helpers.write("phi3-longrope", tmp_path / "model"))
    lines = [{"prompt": "1 2", "max_new_tokens": 30}, {"prompt": "3 4 5", "max_new_tokens": 2}]
    out = tmp_path / "out"
    assert _serve(folder, _write(tmp_path, lines[:1]), "--out", str(out)).exit_code == 0
    for more, code in ((lines[1:], 0), ([*lines[1:], {**lines[0], "prompt": "1 2 3"}], 2)):
        file = _write(tmp_path, [lines[0], *more])
        result = _serve(folder, file, "--out", str(out), "--resume")
        assert result.exit_code == code, result.stderr
    assert "line 1: --out holds a result with its id 1 of another" in result.stderr
    assert "a longest request that takes the same factors" in result.stderr


@pytest.mark.slow
def test_another_kind_of_weights_is_another_model(tmp_path):
    lines, out = [{"prompt": "1 2", "max_new_tokens": 2}], tmp_path / "out"
    arguments = ["serve", _write(tmp_path, lines), "--random-weights", "tiny", "--out", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    result = CliRunner().invoke(app, [*arguments, "--resume", "--weights", "int4"])
    refuses(result, "line 1: --out holds a result with its id 1 of another")


def test_results_of_version_0_1_0_are_gone_on_with(tmp_path):
    """Written before `LlamaConfig` became `TransformerConfig`, and before Gemma 3's field."""
    file, out = tmp_path / "requests.jsonl", tmp_path / "out"
    file.write_text(json.dumps({"prompt": "abc", "max_new_tokens": 3}))
    kept = {"id": 1, "text": " im", "finish_reason": "length", "request": "fd27303c15db27ea"}
    out.write_text(json.dumps(kept) + "\n")
    arguments = ["serve", str(file), "--out", str(out), "--resume", "--dtype", "float32"]
    result = works(CliRunner().invoke(app, arguments))
    assert "1 had results already" in result.stdout


def test_a_field_that_configurations_got_later_tells_models_apart(tiny_folder):
    hf = json.loads((Path(tiny_folder) / "config.json").read_text())
    config = models.TransformerConfig.from_hf(hf)
    windows = dataclasses.replace(config, local_windows=(8, None))
    local = dataclasses.replace(windows, local_rope_theta=5000.0)
    texts = [serving._shape(one) for one in (config, windows, local)]
    assert len(set(texts)) == 3
    assert "local_rope_theta" not in texts[1]
    assert "local_rope_theta=5000.0" in texts[2]
