"""A server from its first address to its last answer."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType

import uvicorn

from turbojax import _checks
from turbojax.models.engine.asynchronous import AsyncEngine, EngineEnded
from turbojax.models.engine.base import BaseEngine
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.server.app import create_app
from turbojax.server.service import Limits

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048
# Aborted requests are answered within a step or two; connections still open then are cut.
_LAST_SECONDS = 5.0
_LOOK_SECONDS = 0.25
# By default Python lets a thread run for 5 ms while others wait, long beside an engine's step.
_SWITCH_SECONDS = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients may connect to; they are answered when a server runs on it.

    Args:
      host: the address, in IPv4 or IPv6, or a name.
      port: the port; 0 for any that is free.

    Raises:
      OSError: if the address is in use or not this machine's.
      ValueError: if the port is out of range.
    """
    _checks.check_integer("port", port)
    if not 0 <= port < 2**16:
        raise ValueError(f"{port=} must be within 0..65535")
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def address_of(listening: socket.socket) -> str:
    """What a client calls a socket's address: ``http://127.0.0.1:8000``."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Answers requests on a socket until it is stopped.

    When it is stopped it accepts no more requests; those that run have `drain_seconds` to come to
    their end, and are aborted then. The engine is closed in any case.

    Args:
      engine: what runs requests; nobody else may use it any more.
      tokenizer: of the model; also the engine's, which looks for stop texts.
      name: of the model, which requests must give.
      listening: where clients connect, see `listen`; it is closed at the end.
      api_keys: see `create_app`.
      limits: see there.
      max_waiting: requests that may wait for their first token.
      drain_seconds: see above.

    Attributes:
      engine: what runs requests, in a thread of its own.

    Raises:
      TypeError: if a number is not one.
      ValueError: if one is out of range, or a key is empty.
    """

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Tokenizer,
        name: str,
        listening: socket.socket,
        *,
        api_keys: Collection[str] = (),
        limits: Limits | None = None,
        max_waiting: int = 1024,
        drain_seconds: float = 30.0,
    ) -> None:
        _checks.check_number("drain_seconds", drain_seconds)
        if drain_seconds < 0:
            raise ValueError(f"{drain_seconds=} must be 0 or more")
        self._listening = listening
        self.engine = AsyncEngine(engine, max_waiting=max_waiting)
        try:
            app = create_app(self.engine, tokenizer, name, api_keys=api_keys, limits=limits)
        except BaseException:
            self.engine.close(drain=False)
            raise
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            ws="none",
            # h11 limits what a client may send as headers.
            http="h11",
            lifespan="on",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(drain_seconds + _LAST_SECONDS) + 1,
        )
        self._server = _Uvicorn(config, self.engine, drain_seconds)

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Runs until `stop` or, in the main thread, SIGINT or SIGTERM; a second one aborts.

        Args:
          ready: called with the address, once clients are answered.

        Raises:
          EngineEnded: if the engine ended of an exception, which ends the server, too.
        """
        self._server.ready = lambda: ready(address_of(self._listening)) if ready else None
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _SWITCH_SECONDS))
        try:
            self._server.run([self._listening])
        finally:
            sys.setswitchinterval(before)
            self.engine.close(drain=False)
            self._listening.close()
        if (error := self.engine.error) is not None:
            raise EngineEnded(f"the engine has ended: {error}") from error

    def stop(self) -> None:
        """Has `run`, in another thread, come to its end."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server, with an engine behind it that drains before connections are cut."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_seconds: float) -> None:
        super().__init__(config)
        self.ready: Callable[[], None] = lambda: None
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._hurry = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    async def on_tick(self, counter: int) -> bool:
        # Called ten times a second. Without an engine there is nothing to serve.
        return await super().on_tick(counter) or self._engine.error is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets)
        self._hurry = True
        await draining

    async def _drain(self) -> None:
        """Lets requests end for a while; aborts them then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        closing = asyncio.ensure_future(self._engine.aclose(drain=True))
        while not self._hurry and loop.time() < end:
            await asyncio.wait({closing}, timeout=min(_LOOK_SECONDS, self._drain_seconds))
            if closing.done():
                break
        self._engine.abort_all()
        await closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hurry = self._hurry or self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own version raises the signal again at the end, but `run` should return.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    engine: BaseEngine,
    tokenizer: Tokenizer,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    listening: socket.socket | None = None,
    api_keys: Collection[str] = (),
    limits: Limits | None = None,
    max_waiting: int = 1024,
    drain_seconds: float = 30.0,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serves a model over HTTP until SIGINT or SIGTERM.

    Arguments are those of `Server`, but for `listening`, which may be left out: then there is a
    socket for `host` and `port` (0 for any that is free). One is given where an address is to be
    taken before a model is loaded, which takes a while. `ready` is called with the address, once
    clients are answered.

    Raises:
      OSError: if the address cannot be listened on.
      ValueError: if a number is out of range, or a key is empty.
      EngineEnded: if the engine ended of an exception.
    """
    found = listen(host, port) if listening is None else listening
    try:
        server = Server(
            engine,
            tokenizer,
            name,
            found,
            api_keys=api_keys,
            limits=limits,
            max_waiting=max_waiting,
            drain_seconds=drain_seconds,
        )
    except BaseException:
        found.close()
        raise
    server.run(ready)
