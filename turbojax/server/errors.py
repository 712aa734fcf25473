"""Errors in the shape that OpenAI's clients read."""

import contextlib
from collections.abc import Iterator, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turbojax import _json

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told instead of an answer.

    `message` says what is wrong: the field, its value, and the requirement. `param` is the field,
    `code` a word for programs, and `headers` are further ones of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def to_json(self) -> dict[str, object]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The response."""
        return JSONResponse(self.to_json(), self.status, self.headers)


@contextlib.contextmanager
def blamed_on(param: str | None) -> Iterator[None]:
    """Turns errors that the library raises in the body into errors of a field."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ApiError(_json.line(str(error)), param=param) from error


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of its own errors: no such path, another method."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {_json.shown_name(request.url.path)}: {error.detail}"
    return ApiError(words, status=error.status_code, headers=error.headers).response()


async def answer_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of everything else, which it then raises again, to be logged."""
    return ApiError("the server failed; its log says why", status=500).response()
