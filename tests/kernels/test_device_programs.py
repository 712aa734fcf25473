"""`benchmarks.device`: sanitizers, registers, texts of programs; what is printed."""

import functools
import importlib.util
import json
import os
import re
import sys
import types
from pathlib import Path

import jax
import pytest

from benchmarks.device import registers, sanitize, sanitizer_cases, traced

KERNELS = Path(__file__).parents[2] / "pallas_kernels"

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at turbojax_control+0x1f0
=========     by thread (0,0,0) in block (3,0,0)
=========     Access to 0x7f3404000000 is out of bounds
=========     and is 58,720,001 bytes after the nearest allocation at 0x7f3400000000
=========     Saved host backtrace up to driver entry point at kernel launch time
========= Invalid __global__ write of size 4 bytes
=========     at turbojax_control+0x1f0
=========     by thread (1,0,0) in block (3,0,0)
ran: a GPU
========= ERROR SUMMARY: 133 errors
========= ERROR SUMMARY: 33 errors were not printed. Use --print-limit option to adjust it
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
ran: a GPU
========= Error: Race reported between Write access at turbojax_control+0x330
=========     and Read access at turbojax_control+0x3d0 [496 hazards]
=========
========= Warning: Race reported between Read access at other+0x10
=========     and Write access at other+0x20 [8 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_every_kernel_has_a_case():
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'"(turbojax_\w+)"', text)}
    # The frames alone call `plgpu.kernel`; a launch that hands a name on has none itself.
    assert sum(len(re.findall(r"plgpu\.kernel[(,]", text)) for text in sources) == 3
    launch = (
        r"(?:pl\.pallas_call|(?:pipeline|warp|program|lanes)\.(?:launch|update))\((?!run, name)"
    )
    calls = sum(len(re.findall(launch, text)) for text in sources)
    assert len(named) >= calls > 20
    covered = {name for case in sanitizer_cases.CASES.values() for name in case.kernels}
    # The kernel of `upstream_triton` has the name of its function.
    assert covered == named | {"attention_kernel"}


def test_a_case_lowers_and_has_its_kernels(capsys):
    sanitize.dry("^fp8 tokens$|^control")
    names = ["fp8 tokens", *sanitizer_cases.CONTROLS]
    assert capsys.readouterr().out.splitlines() == [f"lowers: {name}" for name in names]


@pytest.mark.fuzz
def test_all_cases_lower():
    sanitize.dry("")


def test_kernels_that_are_not_in_a_case_are_missed(monkeypatch):
    build = functools.partial(sanitizer_cases._fp8_tokens, "triton")
    case = sanitizer_cases.Case(("turbojax_quantize",), build)
    monkeypatch.setattr(sanitizer_cases, "CASES", {"wrong": case})
    with pytest.raises(LookupError, match=r"wrong has no \['turbojax_quantize'\]"):
        sanitize.dry("wrong")


def test_memcheck_is_read():
    found = sanitize.parse(MEMCHECK)
    assert (found.found, found.errors) == (133, None)
    assert found.kinds == {"Invalid __global__ write of size 4 bytes at turbojax_control*": 2}


def test_racecheck_is_read():
    found = sanitize.parse(RACECHECK)
    assert (found.found, found.errors) == (2, 1)
    assert list(found.kinds) == [
        "Error: Race reported between Write access at turbojax_control*",
        "Warning: Race reported between Read access at other*",
    ]


def test_no_summary_is_no_result():
    assert sanitize.parse("========= COMPUTE-SANITIZER\nran: a GPU\n").found is None
    assert sanitize.parse("").kinds == {}


def test_the_order_of_tasks():
    tasks = sanitize.tasks("", ("memcheck", "racecheck"))
    assert [task.tool for task in tasks[:2]] == ["memcheck", "racecheck"]
    assert all(task.name.startswith("control") for task in tasks[:2])
    assert len(set(tasks)) == len(tasks) == 2 + 2 * len(sanitizer_cases.CASES)
    assert {task.name for task in sanitize.tasks("kv4, d", ("memcheck",))} == {"kv4, decode"}


SAID = {
    "clean": ("ran: a GPU\n========= ERROR SUMMARY: 0 errors", 0, "clean"),
    "found": (MEMCHECK, 133, "found"),
    "unclear": ("ran: x\n========= Internal Sanitizer Error\n========= ERROR SUMMARY: 0 errors", 0,
                "unclear"),
    "crashed": ("no CUDA\n", None, "failed"),
    "did not run": ("Traceback\n========= ERROR SUMMARY: 0 errors", 0, "failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_rows(name, tmp_path):
    """A stand-in for the sanitizer says what it may say."""
    text, count, status = SAID[name]
    row = check(tmp_path, f"print({text!r})")
    assert (row["found"], row["status"], row["tool"]) == (count, status, "memcheck")
    assert row["kernels"] == ["turbojax_fp8_tokens"]
    json.dumps(row)
    [log] = (tmp_path / "logs").iterdir()
    assert log.name == "memcheck_fp8_tokens.txt"


def test_what_takes_too_long_is_stopped(tmp_path):
    row = check(tmp_path, "import time; time.sleep(60)", limit=0.5)
    assert row["status"] == "not finished"
    assert row["seconds"] < 30
    assert check(tmp_path, "", limit=0.0)["reason"] == "there was no time to start it"


def check(folder, code, limit=60.0):
    script = folder / "sanitizer"
    script.write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
    script.chmod(0o755)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    arguments = types.SimpleNamespace(
        sanitizer=str(script), option=[], cache=str(folder), logs=logs
    )
    return sanitize.check(sanitize.Task("fp8 tokens", "memcheck"), limit, arguments)


def test_what_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: None)
    row = sanitize.check(sanitize.Task("attention, jax-triton", "memcheck"), 9.0, None)
    assert (row["status"], row["reason"]) == ("not run", "jax_triton is not installed")


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    """With a stand-in: every row is there, in order, whichever ended first."""
    asked = {"date": "2000-01-01", "device": "a GPU", "backend": "gpu"}
    answers = iter((json.dumps(asked), "Version 2025.3 (build 1)\n"))
    monkeypatch.setattr(
        sanitize.subprocess,
        "run",
        lambda *_, **__: types.SimpleNamespace(returncode=0, stdout=next(answers)),
    )
    script = tmp_path / "sanitizer"
    script.write_text(f"#!{sys.executable}\nprint({SAID['clean'][0]!r})\n", encoding="utf-8")
    script.chmod(0o755)
    out = tmp_path / "found.json"
    sanitize.main(["--sanitizer", str(script), "--filter", "kv4, d|d, bf16$", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["device"], found["sanitizer"]) == ("a GPU", "2025.3")
    assert [(row["tool"], row["case"], row["status"]) for row in found["rows"]] == [
        (tool, name, "clean")
        for tool in ("memcheck", "racecheck")
        for name in ("kv4, decode", "paged, bf16")
    ]
    assert str(out) in capsys.readouterr().out


PRINTED = """ptxas warning : Registers are spilled to local memory in function 'first'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    40 bytes stack frame, 76 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 40 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
"""


def test_what_ptxas_says():
    assert registers.parse(PRINTED) == [("first", 168, 76, 72), ("second", 48, 0, 0)]
    assert registers.parse("ptxas info    : 0 bytes gmem\n") == []


def test_what_is_printed_beside_python_is_read(capfd):
    with registers._output() as text:
        os.write(1, b"out ")
        os.write(2, b"err")
    assert text() == "out err"
    os.write(1, b"shown")
    assert capfd.readouterr().out == "shown"


def test_cases_are_calls_of_shapes():
    """Their functions are traced when they are lowered: here only what they are called with."""
    made = registers.cases()
    call, arguments = made["prompts, fp8, 128, causal"]()
    assert callable(call)
    assert [x.shape for x in arguments] == [(2, 8192, n, 128) for n in (16, 4, 4)]
    assert len(made) > 24 + 4 + 20


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None, reason="there may be a plugin"
)
def test_without_the_plugin_it_says_what_it_needs():
    with pytest.raises(SystemExit, match=r"pip install 'jax\[cuda13\]"):
        registers.described()
    assert jax.devices()[0].platform == "cpu"


CASE = "^plain append, 4 bits$"


def test_equal_code_gives_equal_texts_and_a_difference_is_shown(tmp_path, capsys):
    traced.main(["--write", str(tmp_path), CASE])
    [path] = tmp_path.iterdir()
    traced.main(["--compare", str(tmp_path), CASE])
    assert "equal: plain append, 4 bits" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(" add ", " sub ", 1), encoding="utf-8")
    with pytest.raises(SystemExit, match="1 differ"):
        traced.main(["--compare", str(tmp_path), CASE])
    shown = capsys.readouterr().out
    assert "differs: plain append, 4 bits" in shown
    assert " sub " in shown


@pytest.mark.slow
def test_code_of_lanes_is_compared_where_asked_for(tmp_path, capsys):
    """A jaxpr does not show what a kernel's lanes do."""
    name = "paged append, int8, Hopper"
    traced.write(tmp_path, name, code=True)
    assert traced.compare(tmp_path, name, code=True) == 0
    text = traced.path_of(tmp_path, name).read_text(encoding="utf-8")
    assert "llvm." in text
    traced.path_of(tmp_path, name).write_text(text.replace("llvm.", "llvn.", 1), encoding="utf-8")
    assert traced.compare(tmp_path, name, code=True) == 1
    assert traced.compare(tmp_path, name) == 1  # without it, the code is missing
    assert f"differs: {name}" in capsys.readouterr().out


def test_places_do_not_count():
    one = "pallas_call[name=_append name_and_src_info=kernel at /a/b.py:12 x=<f at 0x7f1>] add"
    other = "pallas_call[name=_other name_and_src_info=kernel at /c/d.py:9 x=<f at 0x8a2>] add"
    assert traced.normalized(one) == traced.normalized(other)
    assert traced.normalized(one) != traced.normalized(other.replace("add", "sub"))
    assert traced.normalized("name=append") != traced.normalized("name=decode")


def test_kernels_and_public_operations_are_cases():
    names = [name for name, _ in traced.cases()]
    assert len(names) == len(set(names)) == len({traced.path_of(traced.Path(), x) for x in names})
    assert {"prompts, fp8, 128", "plain decode, 4 bits"} <= set(names)
