"""Error bodies in the words of the protocol that the path belongs to."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from serve_app.api.openai import error_body
from serve_app.errors import Refusal, refusal

_OPENAI_PREFIX = "/v1/"


def error_response(path: str, refused: Refusal) -> Response:
    body = error_body(refused) if _openai(path) else {"error": refused.message}
    return JSONResponse(body, status_code=refused.status, headers=refused.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """For what an endpoint raises before it has an answer to send."""
    return error_response(request.url.path, refusal(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods: plain text on the native protocol."""
    assert isinstance(error, HTTPException)
    if not _openai(request.url.path):
        return PlainTextResponse(error.detail, error.status_code, headers=error.headers)
    told = Refusal(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
    return JSONResponse(error_body(told), error.status_code, headers=error.headers)


def _openai(path: str) -> bool:
    return path.startswith(_OPENAI_PREFIX)
