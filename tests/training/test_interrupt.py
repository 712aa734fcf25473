"""Ctrl-C: a command ends soon, with exit code 130 and one line, whatever it is doing."""

import json
import os
import random
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.training.interrupt_helpers import ROOT, environment, interrupted, turbojax
from turbojax import _interrupt
from turbojax.app.main import app
from turbojax.models.engine import Engine, Finished

# `_interrupt` alone, without the seconds that importing jax takes.
ALONE = f"""
import hashlib, importlib.util, os, signal, sys, time
file = {str(ROOT / "turbojax/_interrupt.py")!r}
spec = importlib.util.spec_from_file_location("_interrupt", file)
interrupt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupt)
def begin():
    interrupt.begin("turbojax test")
    interrupt.say(lambda: "2 of 5 are written")
    print("begun", file=sys.stderr, flush=True)
"""
# As in XLA's compiler: no instruction of Python is run, and the interpreter's lock is free.
IN_C = """
def application():
    begin()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**8)
interrupt.run(application)
"""
LOST = """
def application():
    begin()
    for _ in range(2):
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            pass
interrupt.run(application)
"""
SLEEPING = """
def application():
    begin()
    try:
        time.sleep(30)
    finally:
        interrupt.say(lambda: "3 of 5 are written")
interrupt.run(application)
"""
IN_A_DESTRUCTOR = """
class Slow:
    def __del__(self):
        begin()
        time.sleep(5)
def application():
    x = Slow()
    del x
    time.sleep(30)
interrupt.run(application)
"""
NO_NOTE = """
def application():
    begin()
    interrupt.say(lambda: 1 / 0)
    print("now", file=sys.stderr, flush=True)
    time.sleep(30)
interrupt.run(application)
"""
LINE = "turbojax test: interrupted: 2 of 5 are written"


def alone(code: str, **options):
    options.setdefault("moment", "begun")
    ended = interrupted([sys.executable, "-c", ALONE + code], dict(os.environ), **options)
    ended.lines.remove("begun")
    return ended


def test_ends_while_the_main_thread_is_in_c():
    ended = alone(IN_C, delay=0.2)
    assert ended.check() == LINE
    assert ended.seconds >= _interrupt.GRACE


@pytest.mark.slow
def test_ends_although_the_exception_is_swallowed():
    assert alone(LOST, delay=0.2).check() == LINE


def test_ends_where_no_exception_can_be_raised():
    assert alone(IN_A_DESTRUCTOR, delay=0.2).check() == LINE


def test_what_can_be_finished_is():
    ended = alone(SLEEPING, delay=0.1)
    assert ended.check(seconds=_interrupt.GRACE) == LINE.replace("2", "3", 1)


def test_a_second_signal_ends_it_at_once():
    ended = alone(IN_C, delay=0.2, signals=(signal.SIGINT, signal.SIGINT))
    assert ended.check(seconds=_interrupt.GRACE) == LINE


def test_sigterm_has_a_code_of_its_own():
    ended = alone(SLEEPING, delay=0.1, signals=(signal.SIGTERM,))
    assert ended.check(code=143) == "turbojax test: terminated: 3 of 5 are written"


def test_a_note_that_fails_does_not_keep_it():
    ended = alone(NO_NOTE, moment="now")
    ended.lines.remove("now")
    assert ended.check() == "turbojax test: interrupted: what it had written is kept"


@pytest.mark.parametrize(
    ("arguments", "argv", "expected"),
    [
        (["python", "-m", "turbojax", "serve"], ["-m", "serve"], True),
        (["python", "-X", "dev", "-Imturbojax"], ["-m"], True),
        (["python", "-m", "pytest", "-m", "turbojax"], ["-m", "-m", "turbojax"], False),
        (["python", "/usr/bin/turbojax", "demo"], ["/usr/bin/turbojax", "demo"], True),
        (["python", "train.py", "-m", "turbojax"], ["train.py", "-m", "turbojax"], False),
        (["python"], [""], False),
    ],
)
def test_only_the_command_handles_signals(arguments, argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", arguments)
    monkeypatch.setattr(sys, "argv", argv)
    assert _interrupt._is_command() == expected


@pytest.mark.slow
def test_the_library_leaves_signals_alone():
    code = (
        "import signal; old = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
        "import turbojax.app.main, turbojax.__main__\n"
        "assert old == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))\n"
        "assert signal.set_wakeup_fd(-1) == -1\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )


def test_while_it_imports(tmp_path):
    command = turbojax("generate", "x", options=("-X", "importtime"))
    ended = interrupted(command, environment(tmp_path), "numpy._core.numeric")
    assert ended.check() == "turbojax: interrupted: nothing was written"


@pytest.fixture
def requests(tmp_path):
    file = tmp_path / "requests.jsonl"
    lines = [{"prompt": "def f(x):", "max_new_tokens": 400}, {"prompt": "a", "max_new_tokens": 2}]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.fuzz
def test_while_serve_compiles(requests, tmp_path):
    out = tmp_path / "out.jsonl"
    command = turbojax("serve", str(requests), "--out", str(out), "--no-compilation-cache")
    ended = interrupted(command, environment(tmp_path), "Compiling jit(run_step)", delay=0.3)
    assert re.match(r"turbojax serve: interrupted: 0 (of 2 )?results ", ended.check_command())


@pytest.mark.slow
def test_an_interrupted_command_in_process(requests, tmp_path, tiny_folder, monkeypatch):
    """The line says what `serve` has written."""
    requests.write_text(requests.read_text().replace("400", "40"))
    step, finished = Engine.step, list[Finished]()

    def interrupted_step(engine):
        if finished:
            raise KeyboardInterrupt
        events = step(engine)
        finished.extend(event for event in events if isinstance(event, Finished))
        return events

    monkeypatch.setattr(Engine, "step", interrupted_step)
    out = tmp_path / "out.jsonl"
    arguments = ["serve", str(requests), "--out", str(out), "--model", tiny_folder]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    last = result.stderr.splitlines()[-1]
    assert re.match(r"turbojax serve: interrupted: 1 (of 2 )?results ", last)
    assert len(out.read_text().splitlines()) == len(finished) == 1


def train(out, *more: str) -> list[str]:
    sizes = ["--context", "64", "--batch", "1", "--steps", "100000", "--evaluate-every", "0"]
    return turbojax(
        "train", "--out", str(out), *sizes, "--save-every", "5", "--log-every", "1", *more
    )


@pytest.mark.parametrize("begun", [False, True])
def test_train_promises_what_it_knows(tmp_path, tiny_folder, monkeypatch, begun):
    """Before it knows that the folder holds this run, it does not say that it can go on."""

    def fine_tune(*arguments, report, **options):
        if begun:
            report({"step": 5, "resumed": True})
        raise KeyboardInterrupt

    monkeypatch.setattr("turbojax.finetune.fine_tune", fine_tune)
    words, out = tmp_path / "words", tmp_path / "run"
    words.write_text("some words " * 1000)
    (out / "checkpoints" / "5").mkdir(parents=True)
    sizes = ["--context", "64", "--batch", "1"]
    arguments = ["train", "--out", str(out), "--model", tiny_folder, "--data", str(words), *sizes]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    said = result.stderr.splitlines()[-1].removeprefix("turbojax train: interrupted: ")
    goes_on = f"the checkpoint of step 5 is in {out}; the same command goes on from there"
    assert said == (goes_on if begun else "nothing was written")


@pytest.mark.fuzz
def test_train_says_where_it_goes_on(tmp_path):
    out, env = tmp_path / "run", environment(tmp_path)

    def line(moment: str) -> str:
        return interrupted(train(out), env, moment).check_command()

    begins_anew = "no checkpoint was written yet; the same command begins anew"
    assert line("Compiling jit(_train_step").endswith(begins_anew)
    said = line("step     12")
    step = int(said.partition("the checkpoint of step ")[2].partition(" ")[0])
    assert (out / "checkpoints" / str(step)).is_dir()
    assert said == (
        f"turbojax train: interrupted: the checkpoint of step {step} is in {out}; "
        "the same command goes on from there"
    )
    line(f"resuming at step {step}")


COMMANDS = {
    "generate": (["generate", "def f(x):", "--max-new-tokens", "64"], "jit(run_prompts)"),
    "generate, decoding": (["generate", "a", "--max-new-tokens", "64"], "jit(next_tokens)"),
    "generate, random weights": (["generate", "--random-weights", "tiny"], "jit(run_prompts)"),
    "serve": (["serve", "{requests}", "--out", "{folder}/out"], "jit(run_step)"),
    "serve, standard output": (["serve", "{requests}"], "jit(enter)"),
    "demo": (["demo"], "jit("),
    "levels": (["levels", "--tokens", "1024"], "jit("),
    "eval": (["eval", "--context", "255", "--out", "{folder}/eval.json"], "jit("),
    "quantize": (["quantize", "--out", "{folder}/int4"], "jit("),
    "train": (["train", "--out", "{folder}/run", "--context", "256", "--batch", "1"], "jit("),
}


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(i, marks=pytest.mark.fuzz if i else pytest.mark.slow) for i in range(3)],
)
@pytest.mark.parametrize("name", COMMANDS)
def test_at_random_moments(name, seed, requests, tmp_path):
    arguments, program = COMMANDS[name]
    arguments = [x.format(requests=requests, folder=tmp_path) for x in arguments]
    delay = random.Random(f"{name} {seed}").uniform(0, 1.5)
    command = turbojax(*arguments)
    ended = interrupted(command, environment(tmp_path), f"Compiling {program}", delay)
    assert ended.check_command().startswith(f"turbojax {arguments[0]}: interrupted: ")
