"""The ASGI application: paths, keys, and what answers them."""

import contextlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turbojax.models.engine.asynchronous import AsyncEngine
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.server.connections import GONE, EventStream, read_body, while_connected
from turbojax.server.fields import (
    ApiError,
    answer_api_error,
    answer_exception,
    answer_http_exception,
)
from turbojax.server.requests import read_chat, read_completion
from turbojax.server.responses import Answer, Job
from turbojax.server.service import SHUTTING_DOWN, Limits, Service

Endpoint = Callable[[Request], Awaitable[Response]]
Reader = Callable[[Service, bytes], Job]

_SHORT = 2**18
# Names of these fields, or escapes that may spell one.
_GUIDE = re.compile(rb"guided_|response_format|\\u00[2-7]")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    name: str,
    *,
    api_keys: Collection[str] = (),
    limits: Limits | None = None,
) -> Starlette:
    """An ASGI application that answers as OpenAI's API does.

    Its paths are ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health`` and
    ``/metrics``; what their requests may hold is described on the docs' page on serving.

    Args:
      engine: what runs requests; whoever made it closes it, after the application has ended.
      tokenizer: of the model; also the engine's, which looks for stop texts.
      name: of the model, which requests must give.
      api_keys: what clients must show one of as ``Authorization: Bearer KEY`` under ``/v1``; with
        none nothing needs to be shown.
      limits: of a request; by default those of `Limits`.

    Raises:
      TypeError: if `api_keys` is one text instead of several.
      ValueError: if a key is empty.
      EngineEnded: if the engine has ended.
    """
    if isinstance(api_keys, str):
        raise TypeError("api_keys must be several keys, not one text: [KEY]")
    if not all(api_keys):
        raise ValueError("an API key must not be empty")
    service = Service(engine, tokenizer, name, Limits() if limits is None else limits)
    created = int(time.time())
    model = {"id": name, "object": "model", "created": created, "owned_by": "turbojax"}
    model["max_model_len"] = engine.max_length

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if (asked := request.path_params["name"]) != name:
            raise service.unknown_model(asked)
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        if engine.error is not None:
            raise ApiError("the engine has ended", status=503, code="engine_ended")
        if engine.closing:
            raise ApiError(SHUTTING_DOWN, status=503, code="shutting_down")
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(await service.metrics.page(), media_type=_METRICS_TYPE)

    def guarded(endpoint: Endpoint) -> Endpoint:
        return _with_key(endpoint, [key.encode() for key in api_keys])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", guarded(_answers(service, read_completion)), methods=["POST"]),
            Route("/v1/chat/completions", guarded(_answers(service, read_chat)), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(one_model)),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            ApiError: answer_api_error,
            HTTPException: answer_http_exception,
            Exception: answer_exception,
        },
        lifespan=lifespan,
    )
    app.add_middleware(_Counted, service=service)
    return app


def _answers(service: Service, read: Reader) -> Endpoint:
    """The endpoint that reads requests in this way."""

    async def answered(body: bytes) -> Response:
        job = await service.beside(_takes_long(body), read, service, body)
        answer = Answer(service, job)
        await answer.begin()
        if job.options.stream:
            return EventStream(answer.chunks(), answer.cancel)
        return Response(await answer.whole(), media_type="application/json")

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_body(request, service.limits.body_bytes)
            return await while_connected(request.receive, answered(body))
        except ClientDisconnect:
            return Response(status_code=GONE)

    return endpoint


def _takes_long(body: bytes) -> bool:
    """Whether it may take seconds to read a request: it is long, or may hold a grammar."""
    return len(body) > _SHORT or _GUIDE.search(body) is not None


def _with_key(endpoint: Endpoint, keys: Collection[bytes]) -> Endpoint:
    """An endpoint for those who show one of these keys; for all if there are none."""

    async def checked(request: Request) -> Response:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # Starlette reads headers as Latin-1, whatever was sent.
        given = key.strip(" \t").encode("latin-1") if kind.lower() == "bearer" else b""
        # All keys are compared, each in a time that does not tell how much of it matches.
        fitting = [key for key in keys if hmac.compare_digest(given, key)]
        if keys and not fitting:
            raise ApiError(
                "the header Authorization must be 'Bearer KEY', with one of this server's keys",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await endpoint(request)

    return checked


class _Counted:
    """Counts responses by path and status; all unknown paths count as one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            # Starlette stores the endpoint that it found in the scope.
            path = scope["path"] if "endpoint" in scope else "unknown"
            path = "/v1/models/" if path.startswith("/v1/models/") else path
            self._service.metrics.responded(path, status)
