"""Several processes: the same tokens and losses as one, and what they say of one that is gone."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.training.finetune_helpers import command, text, tiny_model
from turbojax import models, parallel
from turbojax.parallel import processes

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = np.arange(16, dtype=np.int32).reshape(2, 8)
NEW = 6
HEARTBEAT = 6

# Works, and says what came out; then process VICTIM ends in some way, while the other one goes on.
_SCRIPT = """
import json, os, sys, time
from turbojax import parallel

address, index, folder, victim, end = sys.argv[1], *sys.argv[2:]
with parallel.start(address, 2, int(index), heartbeat=HEARTBEAT):
    WORK
    while True:
        print(json.dumps(work()), flush=True)
        if index == victim:
            exec(end)
print("end", flush=True)
"""
_GENERATE = """
    import numpy as np
    from turbojax import models
    decoder = models.load_decoder(folder, dtype="float32", mesh=parallel.mesh_of("model=2"))
    prompts = np.arange(16, dtype=np.int32).reshape(2, 8)
    work = lambda: np.asarray(models.generate(decoder, prompts, max_new_tokens=NEW)).tolist()
"""
_SUM = """
    import jax
    from jax.sharding import PartitionSpec as P
    mesh = parallel.mesh_of("model=2").mesh
    add = lambda: jax.lax.psum(jax.lax.axis_index("model"), "model")
    add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=P()))
    work = lambda: int(add())
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def started(arguments: Callable[[str, int], list[str]]) -> list[subprocess.Popen]:
    """Two processes, each with one device, given what they run: of the address and a number."""
    address = f"127.0.0.1:{free_port()}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments(address, index)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def working(work: str, folder: str, victim: int, end: str) -> list[subprocess.Popen]:
    script = _SCRIPT.replace("WORK", work.strip()).replace("HEARTBEAT", str(HEARTBEAT))
    rest = [folder, str(victim), end]
    script = script.replace("NEW", str(NEW))
    return started(lambda address, index: ["-c", script, address, str(index), *rest])


def expected(folder: str) -> list[list[int]]:
    decoder = models.load_decoder(folder, dtype="float32")
    return np.asarray(models.generate(decoder, PROMPTS, max_new_tokens=NEW)).tolist()


@pytest.mark.slow
def test_tokens_are_those_of_one_process_until_another_is_killed(tiny_folder):
    runs = working(_GENERATE, tiny_folder, 1, "os.kill(os.getpid(), 9)")
    # The kernel resets a connection whose last heartbeat nobody had read.
    closed = "its connection closed: it has ended or was killed"
    wrote = ends(runs, 1, closed, "its connection broke")
    tokens = json.dumps(expected(tiny_folder))
    assert [x.splitlines()[0] for x in wrote] == [tokens, tokens]


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("victim", "end", "reason"),
    [
        (1, "os.kill(os.getpid(), 19)", f"nothing was heard of it for {HEARTBEAT} s"),
        (0, "raise KeyError('mine')", "it failed, see what it wrote"),
    ],
    ids=["stopped", "raised"],
)
def test_one_that_is_gone_ends_the_others(victim, end, reason):
    runs = working(_SUM, "", victim, end)
    assert all(x.startswith("1\n") for x in ends(runs, victim, reason))


def test_the_first_one_is_not_there():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=f"nothing listens at coordinator='{address}', the first"):
        parallel.start(address, 2, 1, patience=1)
    assert jax.process_count() == 1


def test_strangers_are_sent_away():
    """Also one that says nothing, after a moment."""
    server, members = (
        processes._listen(),
        (processes.Member(0, "a", 1), processes.Member(1, "b", 2)),
    )
    port = server.getsockname()[1]
    said = ["é 1\n", "secret 0\n", "secret 2\n", "secret x\n", "guess 1\n", "", "secret 1\nhere\n"]
    given = [socket.create_connection(("127.0.0.1", port)) for _ in said]
    for connection, words in zip(given, said, strict=True):
        connection.sendall(words.encode())
    [link] = processes._accept(server, members, "secret", 0.4, 5)
    assert link.member is members[1]
    assert link._lines.readline() == b"here\n"  # nothing that came with the greeting is lost
    link.close()
    for connection in given:
        connection.close()


def ends(runs: list[subprocess.Popen], victim: int, *reasons: str) -> list[str]:
    """What processes wrote, of which one ended first: the other one has named it, in time."""
    gone, other = runs[victim], runs[1 - victim]
    try:
        first = gone.stdout.readline()
        begun = time.monotonic()
        out, errors = other.communicate(timeout=HEARTBEAT + 60)
        taken = time.monotonic() - begun
    finally:
        gone.kill()  # it may be stopped
        other.kill()
        rest, wrote = gone.communicate()
        other.communicate()
    assert other.returncode == processes.EXIT_CODE, errors
    assert taken < HEARTBEAT + 20
    assert "end" not in out
    [line] = [x for x in errors.splitlines() if x.startswith("turbojax: ")]
    named = f"process {victim} ({socket.gethostname()}, pid {gone.pid})"
    lines = [f"turbojax: {named} is gone: {x}; process {1 - victim} ends, too" for x in reasons]
    assert line in lines
    assert gone.returncode in (-signal.SIGKILL, 1)
    assert ("KeyError: 'mine'" in wrote) == (gone.returncode == 1)
    return [out, first + rest]


@pytest.mark.fuzz
def test_training_and_an_end_in_good_order(tmp_path):
    """By the command: the losses of one process, whose checkpoints are the same."""
    models.save(tiny_model(), tmp_path / "start")
    (tmp_path / "words.txt").write_bytes(text(0, 9000))
    options = ["--data", str(tmp_path / "words.txt"), "--model", str(tmp_path / "start")]
    sizes = "--context 128 --batch 2 --steps 2 --log-every 1 --evaluate-every 0"
    options = ["train", *options, *sizes.split(), "--evaluate-windows", "2"]
    many = ["--mesh", "data=2", "--processes", "2", "--out", str(tmp_path / "two")]
    runs = started(
        lambda address, index: [
            *("-m", "turbojax", *options, *many, "--coordinator", address),
            *("--process", str(index)),
        ]
    )
    outs = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert outs[1][0] == ""
    one = command(*options, "--out", str(tmp_path / "one"))
    assert one.exit_code == 0, one.stderr
    logs = [json.loads((tmp_path / name / "log.json").read_text()) for name in ("one", "two")]
    assert logs[0]["identity"] == logs[1]["identity"]
    # See test_mesh_training: sums of 256 losses in another order.
    np.testing.assert_allclose(logs[0]["losses"], logs[1]["losses"], rtol=256 * 2.0**-24, atol=1e-6)
    assert (tmp_path / "two" / "model" / "config.json").exists()


def linked(monkeypatch, count: int, heartbeat: float) -> tuple[list, list]:
    """The watches of so many processes, in one; what would end them is noted."""
    ended: list[tuple[str, int]] = []
    lines: list[str] = []

    monkeypatch.setattr(processes, "_end", lambda code: ended.append((lines[-1], code)))
    monkeypatch.setattr(processes.os, "write", lambda fd, data: lines.append(data.decode()))
    members = [processes.Member(i, f"host{i}", 100 + i) for i in range(count)]
    pairs = [socket.socketpair() for _ in range(count - 1)]
    hub = [processes._Link(members[i + 1], pair[0], heartbeat) for i, pair in enumerate(pairs)]
    watches = [processes._Watch(members[0], hub)]
    for i, pair in enumerate(pairs):
        link = processes._Link(members[0], pair[1], heartbeat)
        watches.append(processes._Watch(members[i + 1], [link]))
    return watches, ended


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def all_closed() -> None:
    """Waits for the threads, which close their connections."""
    wait_for(lambda: not [x for x in threading.enumerate() if x.name == "turbojax processes"])


def test_the_first_one_passes_on_who_is_gone(monkeypatch):
    watches, ended = linked(monkeypatch, 3, heartbeat=5)
    watches[2].leave("failed")
    wait_for(lambda: len(ended) == 2)
    text = "turbojax: process 2 (host2, pid 102) is gone: it failed, see what it wrote; process"
    for watch in watches:
        watch.leave("done")
    all_closed()
    assert sorted(ended) == [(f"{text} {i} ends, too\n", processes.EXIT_CODE) for i in (0, 1)]


def test_codes_of_errors():
    codes = {None: 0, SystemExit(): 0, SystemExit(3): 3, SystemExit("why"): 1, KeyError("x"): 2}
    assert [processes._exit_code(error, 2) for error in codes] == list(codes.values())


def test_silence_and_good_order(monkeypatch):
    watches, ended = linked(monkeypatch, 2, heartbeat=0.4)
    time.sleep(1)
    assert ended == []  # both say that they are there
    watches[1]._left.set()  # no longer, but its connection stays
    wait_for(lambda: len(ended) == 1)
    assert "process 1 (host1, pid 101) is gone: nothing was heard of it for 0.4 s" in ended[0][0]
    watches[0].leave("done")
    all_closed()
    watches, ended = linked(monkeypatch, 2, heartbeat=0.4)
    watches[1].leave("done")
    watches[0].leave("done")
    all_closed()
    assert ended == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, 0), "count=2 and index=0 need a coordinator"),
        (("10.0.0.1", 2, 0), "must be host:port"),
        (("10.0.0.1:99999", 2, 0), "must be host:port"),
        (("10.0.0.1:1234", 2, None), "needs count and index, which are 2, None"),
        (("10.0.0.1:1234", 2, 2), "index=2 must be at least 0 and below count=2"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        parallel.start(*given)


def test_bad_times():
    with pytest.raises(ValueError, match="heartbeat=0.5 must be at least 1 second"):
        parallel.start("10.0.0.1:1234", 2, 0, heartbeat=0.5)
    assert jax.process_count() == 1


def test_commands_refuse_half_of_the_options():
    result = command("generate", "a", "--processes", "2")
    assert result.exit_code == 2
    assert "--processes and --process are for --coordinator" in result.stderr
