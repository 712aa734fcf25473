"""Clients: what they send within limits, and what becomes of work when they hang up."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turbojax.server.fields import ApiError

_T = TypeVar("_T")

GONE = 499
"""The status of a response that nobody reads."""

_BODY_SECONDS = 60.0
"""Seconds within which a body must be here, since its beginning takes memory."""

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"


async def read_body(request: Request, most: int) -> bytes:
    """A request's body, of at most `most` bytes."""
    error = ApiError(f"the body must have at most {most} bytes", status=413, code="body_too_large")
    if int(request.headers.get("content-length", "0")) > most:
        raise error
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise error
    except TimeoutError:
        words = f"the body took longer than {_BODY_SECONDS:g} seconds to come"
        raise ApiError(words, status=408, code="body_too_slow") from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs `work`, and cancels it with ClientDisconnect when the client hangs up.

    `receive` is of the connection, whose request has been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: chunks of JSON as they come, then ``[DONE]``.

    `chunks` is closed when the client hangs up; `end` is called at the end in any case, also where
    nothing was sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[dict[str, Any], None], end: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._chunks, self._end = chunks, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it all."""
        try:
            await while_connected(receive, self._send(send))
        except (ClientDisconnect, OSError):
            self.status_code = GONE
        finally:
            self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await _send_part(send, event(chunk))
        except ApiError as error:
            # The status has been sent: clients look for errors in events, too.
            await _send_part(send, event(error.to_json()))
        await _send_part(send, _DONE, more=False)


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def to_json(value: dict[str, Any]) -> bytes:
    """An object as JSON in UTF-8, in one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event with a JSON value, which has no line breaks."""
    return b"data: " + to_json(value) + b"\n\n"
