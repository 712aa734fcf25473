"""An engine behind its HTTP server, in this process, and clients in another one."""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import socket
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
    with running(made.engine, vocabulary) as (port, serving):
        load = Load(
            host="127.0.0.1",
            port=port,
            model=NAME,
            clients=clients,
            requests=clients,
            prompt=group.prompt,
            new=4,
            vocab_size=vocabulary,
            seed=1,
        )
        _clients(load, deadline)
        before = serving.statistics().to_json()
        load = dataclasses.replace(load, requests=group.requests, new=group.new, seed=2)
        found = _clients(load, deadline)
        after = serving.statistics().to_json()
    short = [answer["tokens"] for answer in found["answers"] if answer["tokens"] != group.new]
    if short or len(found["answers"]) != group.requests:
        raise ArithmeticError(f"{len(found['answers'])} answers, of wrong lengths {short[:5]}")
    counts = {name: after[name] - before[name] for name in COUNTED if name in after}
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
def running(engine: Engine, vocab_size: int) -> Iterator[tuple[int, Any]]:
    """A server of the engine in a thread; gives its port, and its `AsyncEngine`.

    Raises:
      RuntimeError: if it does not start.
    """
    uvicorn = importlib.import_module("uvicorn")
    server_module = importlib.import_module("turbojax.server")
    asynchronous = importlib.import_module("turbojax.models.engine.asynchronous")
    serving = asynchronous.AsyncEngine(engine)
    app = server_module.create_app(serving, NumberTokenizer(vocab_size), NAME)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    arguments: dict[str, Any] = {"sockets": [listening]}
    thread = threading.Thread(target=server.run, kwargs=arguments, name="benchmark server")
    thread.start()
    try:
        limit = time.monotonic() + _START_SECONDS
        while not server.started:
            if not thread.is_alive() or time.monotonic() > limit:
                raise RuntimeError("the server did not start")
            time.sleep(0.02)
        yield int(listening.getsockname()[1]), serving
    finally:
        server.should_exit = True
        thread.join(_START_SECONDS)
        listening.close()
        # Where the application has not closed it.
        with contextlib.suppress(RuntimeError):
            asyncio.run(serving.aclose())


def _clients(load: Load, deadline: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.suites.serving.client"]
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
