"""Several processes, each with devices of its own, that run one program together.

`jax.distributed` brings them together, and ends all when one stops answering. It then speaks of
"tasks", aborts with a dump of the stack, and on a GPU a process may wait in a collective until it
does. So each process also keeps a connection to the first one. The kernel closes the connections of
a process that ends, however it ends: the others hear of it at once, say who it was in one line, and
end. Of a process that hangs, or a host that is cut off, nothing closes: there heartbeats decide.

The connections carry nothing else. Whoever connects must know a secret that JAX's own collective
has handed out.
"""

import atexit
import contextlib
import dataclasses
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np

EXIT_CODE = 70
"""The exit code of a process that ends because another one is gone."""

_GRACE = 2.0
"""Seconds that an error waits for the news that another process is gone: it may be a consequence,
as a collective fails at the same moment."""
_LATER = 10
"""Seconds by which JAX ends the processes later than the code here, which names the process."""
_PROBE = 10.0
"""Seconds for one try to reach the first process."""
_MOST_BYTES = 512
"""Bytes that a process may say of itself."""


@dataclasses.dataclass(frozen=True)
class Member:
    """One of the processes: its number, its machine's name, and its pid there."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


class Processes:
    """The processes of a run, from `start` to `stop`; also a context manager.

    Attributes:
      count: how many there are.
      index: the number of this one; the first is 0.
      members: all of them.
      error_code: what this process exits with where an error leaves the ``with`` statement.
    """

    def __init__(self, members: tuple[Member, ...], index: int, links: "list[_Link]") -> None:
        self.members, self.index, self.count = members, index, len(members)
        self.error_code = 1
        self._watch = _Watch(members[index], links)
        self._is_over = False

    def stop(self) -> None:
        """Waits for all others to come this far, and ends the run. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            jax.distributed.shutdown()
            self._watch.leave("done")

    def fail(self, code: int = 1) -> None:
        """Tells the others that this process has failed, which ends them, and ends this one, too.

        Not at once: when Python's interpreter ends, after it has shown what went wrong.

        Args:
          code: what this process exits with.
        """
        if self._is_over:
            return
        self._is_over = True
        self._watch.leave("failed")
        # JAX would wait for processes that are gone.
        atexit.register(_end, code)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        code = _exit_code(error, self.error_code)
        if code:
            if isinstance(error, Exception):
                time.sleep(_GRACE)  # where another one explains it, this process ends meanwhile
            self.fail(code)
        else:
            self.stop()


def start(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    heartbeat: float = 60.0,
    patience: float = 300.0,
) -> Processes:
    """Brings this process together with the others of a run; call it before anything else of JAX.

    Each process then sees all devices (`jax.devices`), runs the same program, and holds its part of
    arrays. Where one ends early, even if killed, or is not heard of for `heartbeat` seconds, each
    of the others writes a line that names it to standard error, and exits with `EXIT_CODE`.

    Args:
      coordinator: ``"host:port"`` of the first process, which listens there; None where JAX finds
        it, and also count and index, without help, under Slurm or Open MPI.
      count: how many processes there are.
      index: the number of this one, from 0.
      heartbeat: seconds.
      patience: seconds that processes wait for each other at the start. If one does not come, JAX
        then aborts those that have found the first one.

    Returns:
      What ends the run: use it in a ``with`` statement, or call `Processes.stop`.

    Raises:
      ValueError: if an argument is missing or out of range, or JAX cannot find out.
      RuntimeError: if JAX has devices already, or was started before.
      OSError: if the first process is not there in time, or one that has come is gone before all
        are connected.
    """
    _check(coordinator, count, index, heartbeat, patience)
    if coordinator is not None and index:
        _reach(coordinator, patience)
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=count,
        process_id=index,
        initialization_timeout=math.ceil(patience),
        heartbeat_timeout_seconds=math.ceil(heartbeat) + _LATER,
        cluster_detection_method=None if coordinator is None else "deactivate",
    )
    server = None
    mine: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    if jax.process_index() == 0 and jax.process_count() > 1:
        server = _listen()
        host = socket.gethostname() if coordinator is None else coordinator.rpartition(":")[0]
        mine["address"] = [host.strip("[]"), server.getsockname()[1]]
        mine["secret"] = secrets.token_hex(16)
    rows = _exchanged(mine)
    members = tuple(Member(i, row["host"], row["pid"]) for i, row in enumerate(rows))
    links: list[_Link] = []
    if server is not None:
        links = _accept(server, members, rows[0]["secret"], heartbeat, patience)
    elif len(rows) > 1:
        address = (rows[0]["address"][0], rows[0]["address"][1])
        connection = socket.create_connection(address, timeout=patience)
        hello = f"{rows[0]['secret']} {jax.process_index()}\n"
        connection.sendall(hello.encode())
        links = [_Link(members[0], connection, heartbeat)]
    return Processes(members, jax.process_index(), links)


def _check(
    coordinator: str | None,
    count: int | None,
    index: int | None,
    heartbeat: float,
    patience: float,
) -> None:
    if coordinator is None:
        if (count, index) != (None, None):
            raise ValueError(f"{count=} and {index=} need a coordinator, such as '10.0.0.1:1234'")
    else:
        host, _, port = coordinator.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError(f"{coordinator=} must be host:port, such as '10.0.0.1:1234'")
        if count is None or index is None:
            raise ValueError(f"{coordinator=} needs count and index, which are {count}, {index}")
        if not 0 <= index < count:
            raise ValueError(f"{index=} must be at least 0 and below {count=}")
    for name, seconds in {"heartbeat": heartbeat, "patience": patience}.items():
        if not 1 <= seconds <= 10**9:  # JAX counts them in 32 bits
            raise ValueError(f"{name}={seconds} must be at least 1 second, and at most 10^9")


def _reach(coordinator: str, patience: float) -> None:
    """Waits until something listens there: JAX's own wait ends in an abort, not in an error."""
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise TimeoutError(
                    f"nothing listens at {coordinator=}, the first process, "
                    f"in {patience:g} s: {error}"
                ) from error
        time.sleep(min(0.2, patience / 10))


def _exchanged(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process says of itself, in the order of their numbers."""
    from jax.experimental import multihost_utils

    data = json.dumps(mine).encode()
    if len(data) > _MOST_BYTES:
        raise ValueError(f"the host's name has more than {_MOST_BYTES} bytes: {mine['host'][:64]}")
    row = np.frombuffer(data.ljust(_MOST_BYTES), np.uint8)
    if jax.process_count() == 1:
        return [mine]
    with _stdout_to_stderr():  # Gloo, which is for CPUs, says that it is connected
        rows = np.asarray(multihost_utils.process_allgather(row))
    return [json.loads(x.tobytes()) for x in rows]


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends what is written to standard output meanwhile, even by C++, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(
    server: socket.socket,
    members: tuple[Member, ...],
    secret: str,
    heartbeat: float,
    patience: float,
) -> "list[_Link]":
    """A connection to each of the other processes."""
    links: dict[int, _Link] = {}
    until = time.monotonic() + patience
    with server:
        while len(links) < len(members) - 1:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = [str(x) for x in members[1:] if x.index not in links]
                raise TimeoutError(f"no connection from {', '.join(missing)}") from None
            # Short, since the others wait and hear nothing of this process meanwhile.
            connection.settimeout(heartbeat / 4)
            with contextlib.suppress(OSError, ValueError):
                line = connection.makefile("rb", buffering=0).readline(128)
                given, _, number = line.decode("ascii").partition(" ")
                known = 0 < int(number) < len(members) and int(number) not in links
                if secrets.compare_digest(given, secret) and known:
                    links[int(number)] = _Link(members[int(number)], connection, heartbeat)
                    continue
            connection.close()  # a stranger
    return [links[i] for i in sorted(links)]


class _Link:
    """A connection to another process, over which both say that they are there."""

    def __init__(self, member: Member, connection: socket.socket, heartbeat: float) -> None:
        self.member, self.heartbeat = member, heartbeat
        self._connection = connection
        connection.settimeout(heartbeat)
        self._lines = connection.makefile("rb")

    def send(self, line: str) -> None:
        """Sends a line; whether it arrives is what `listen` finds out."""
        with contextlib.suppress(OSError):
            self._connection.sendall(f"{line}\n".encode())

    def finish(self) -> None:
        """Says that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection, once nothing listens any more."""
        self._lines.close()
        self._connection.close()

    def listen(self, heard: Callable[[str], None]) -> str | None:
        """Reads lines to the end: why the other one is gone, or None if it left in good order."""
        while True:
            try:
                line = self._lines.readline(_MOST_BYTES).decode().strip()
            except TimeoutError:
                return f"nothing was heard of it for {self.heartbeat:g} s"
            except (OSError, ValueError):
                return "its connection broke"
            if line == "done":
                return None
            if line == "failed":
                return "it failed, see what it wrote"
            if not line:
                return "its connection closed: it has ended or was killed"
            heard(line)


class _Watch:
    """Threads that tell the others that this process runs, and listen to them."""

    def __init__(self, me: Member, links: list[_Link]) -> None:
        self._me, self._links = me, links
        self._left = threading.Event()
        self._lock = threading.Lock()
        if links:
            self._start(self._beat)
        for link in links:
            self._start(self._listen, link)

    def _start(self, run: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=run, args=given, name="turbojax processes", daemon=True).start()

    def leave(self, word: str) -> None:
        """Sends a last word: that this process is ``"done"``, or has ``"failed"``."""
        self._left.set()
        for link in self._links:
            link.send(word)
            link.finish()

    def _beat(self) -> None:
        every = min(link.heartbeat for link in self._links) / 4
        while not self._left.wait(every):
            for link in self._links:
                link.send("here")

    def _listen(self, link: _Link) -> None:
        def heard(line: str) -> None:
            # The first process hears from all others, and tells them who is gone.
            if line.startswith("gone "):
                self._end(line.removeprefix("gone "), link)

        why = link.listen(heard)
        if why is not None:
            self._end(f"{link.member} is gone: {why}", link)
        link.close()

    def _end(self, news: str, source: _Link) -> None:
        """Ends this process, unless it has left already; only the first cause is printed."""
        with self._lock:
            if self._left.is_set():
                return
            for link in self._links:
                if link is not source:
                    link.send(f"gone {news}")
            # Not through `sys.stderr`, whose lock the main thread may hold.
            line = f"turbojax: {news}; process {self._me.index} ends, too\n"
            os.write(2, line.encode(errors="replace"))
            _end(EXIT_CODE)


def _end(code: int) -> NoReturn:
    """Ends the process without JAX's shutdown, which waits for processes that are gone."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exit_code(error: BaseException | None, otherwise: int) -> int:
    """The exit code of a process that ends by this error; 0 for an end in good order."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        # The command ends in its own way (`typer.Exit`).
        return getattr(error, "exit_code", otherwise)
    return error.code if isinstance(error.code, int) else int(error.code is not None)
