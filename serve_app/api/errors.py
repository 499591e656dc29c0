"""Error bodies in the words of the protocol that the path belongs to."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from serve_app.api.openai import error_body
from serve_app.api.refusals import Refusal, refusal

_OPENAI_PREFIX = "/v1/"
LONGEST_PATH = 80


def error_response(path: str, refused: Refusal) -> Response:
    body = error_body(refused) if _openai(path) else {"error": refused.message}
    return JSONResponse(body, status_code=refused.status, headers=refused.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """For what an endpoint raises before it has an answer to send."""
    return error_response(route_path(request.scope), refusal(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods: plain text on the native protocol, in OpenAI's an error
    body; for an unknown path it lists the endpoints that are served."""
    assert isinstance(error, HTTPException)
    if not _openai(route_path(request.scope)):
        return PlainTextResponse(error.detail, error.status_code, headers=error.headers)
    message = f"{error.detail}: {request.method} {request.url.path[:LONGEST_PATH]}"
    if error.status_code == 404:
        message += f" is not served; the endpoints are {', '.join(_openai_endpoints(request))}"
    refused = Refusal(error.status_code, message)
    return JSONResponse(error_body(refused), error.status_code, headers=error.headers)


def route_path(scope: Scope) -> str:
    """The path below the prefix that the application is served at."""
    prefix, path = scope.get("root_path", ""), scope["path"]
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


def _openai_endpoints(request: Request) -> list[str]:
    routes = (route for route in request.app.routes if isinstance(route, Route))
    return [route.path_format for route in routes if _openai(route.path)]


def _openai(path: str) -> bool:
    return path.startswith(_OPENAI_PREFIX)
