"""An engine behind its HTTP server, in this process, and clients in another one."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.suites.serving.cases import Group
from benchmarks.suites.serving.client import Load
from benchmarks.suites.serving.engines import COUNTED, Made, rates
from benchmarks.tables import Row
from turbojax.models.engine import Engine
from turbojax.models.text.tokenizer import NumberTokenizer

NAME = "benchmark"
_START_SECONDS = 60.0


def measure(made: Made, group: Group, deadline: float) -> Row:
    """All requests of a group from its clients, after a few that nobody counts.

    Raises:
      RuntimeError: if the server does not start, or a client is refused.
      ArithmeticError: if an answer is not as long as asked for.
    """
    vocabulary, clients = group.config.vocab_size, group.clients or group.requests
    load = Load(
        model=NAME,
        clients=clients,
        requests=clients,
        prompt=group.prompt,
        new=4,
        vocab_size=vocabulary,
        seed=1,
    )
    with running(made.engine, vocabulary) as port:
        _clients(load, port, deadline)
    # While a server has the engine nobody else may ask it.
    before = made.engine.statistics().to_json()
    load = dataclasses.replace(load, requests=group.requests, new=group.new, seed=2)
    with running(made.engine, vocabulary) as port:
        found = _clients(load, port, deadline)
    after = made.engine.statistics().to_json()
    short = [answer["tokens"] for answer in found["answers"] if answer["tokens"] != group.new]
    if short or len(found["answers"]) != group.requests:
        raise ArithmeticError(f"{len(found['answers'])} answers, of wrong lengths {short[:5]}")
    counts = {name: after[name] - before[name] for name in COUNTED}
    first = [answer["first"] for answer in found["answers"]]
    times = [1e3 * (x["seconds"] - x["first"]) / (group.new - 1) for x in found["answers"]]
    return {
        "status": "ok",
        "finished": len(found["answers"]),
        "us": 1e6 * found["seconds"],
        "seconds": found["seconds"],
        "compile_seconds": 0.0,
        **counts,
        **rates(counts, found["seconds"]),
        "first_token_seconds": float(np.median(first)),
        "last_first_token_seconds": max(first),
        "token_ms": float(np.median(times)),
        "events": sum(answer["events"] for answer in found["answers"]),
        "pool_bytes": after["pool_bytes"],
        "token_capacity": after["token_capacity"],
    }


@contextlib.contextmanager
def running(engine: Engine, vocab_size: int) -> Iterator[int]:
    """A server of the engine in a thread; gives its port. Afterwards the engine is free again.

    Raises:
      RuntimeError: if it does not start.
    """
    from turbojax.server import Server, listen

    listening = listen("127.0.0.1", 0)
    port = int(listening.getsockname()[1])
    server = Server(engine, NumberTokenizer(vocab_size), NAME, listening)
    ready = threading.Event()
    arguments = {"ready": lambda address: ready.set()}
    thread = threading.Thread(target=server.run, kwargs=arguments, name="benchmark server")
    thread.start()
    try:
        if not ready.wait(_START_SECONDS):
            raise RuntimeError(f"the server did not start within {_START_SECONDS:.0f} s")
        yield port
    finally:
        server.stop()
        thread.join()


def _clients(load: Load, port: int, deadline: float) -> dict[str, Any]:
    """What the clients found, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.suites.serving.client", str(port)]
    left = deadline - time.monotonic()
    done = subprocess.run(
        command,
        input=json.dumps(dataclasses.asdict(load)),
        capture_output=True,
        text=True,
        timeout=None if left == float("inf") else max(left, 1.0),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the clients failed: {done.stderr.strip().splitlines()[-1][:300]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
