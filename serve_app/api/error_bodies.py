"""Error bodies in the format of the protocol that the request belongs to."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from serve_app.api import anthropic_reply, openai
from serve_app.api.paths import COMPATIBLE, LONGEST_PATH, protocol_of, route_path
from serve_app.api.refusals import Refusal, refusal

ErrorBody = Callable[[Refusal], dict[str, Any]]


def _native_body(refused: Refusal) -> dict[str, Any]:
    return {"error": refused.message}


# Error formats by protocol; all other paths have the native one.
_BODIES: Mapping[str, ErrorBody] = {
    "anthropic": anthropic_reply.error_body,
    "openai": openai.error_body,
}


def error_response(scope: Scope, refused: Refusal) -> Response:
    body = _body_of(scope)(refused)
    return JSONResponse(body, status_code=refused.status, headers=refused.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Handles exceptions of endpoints that were raised before the response started."""
    return error_response(request.scope, refusal(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods: plain text for the native protocol, an error body for the
    others; for an unknown path it lists the served endpoints.
    """
    assert isinstance(error, HTTPException)
    headers = {"allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
    body = _body_of(request.scope)
    if body is _native_body:
        return PlainTextResponse(error.detail, error.status_code, headers=headers)
    message = f"{error.detail}: {request.method} {request.url.path[:LONGEST_PATH]}"
    if error.status_code == 404:
        message += f" is not served; the endpoints are {', '.join(_compatible_endpoints(request))}"
    refused = Refusal(error.status_code, message)
    return JSONResponse(body(refused), error.status_code, headers=headers)


def _body_of(scope: Scope) -> ErrorBody:
    path = route_path(scope)
    if f"{path}/".startswith("/v1/models/") and anthropic_reply.speaks_anthropic(scope):
        return anthropic_reply.error_body
    return _BODIES.get(protocol_of(path), _native_body)


def _methods(request: Request) -> list[str]:
    """The methods of the path over all its routes; Starlette reports those of one route."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})


def _compatible_endpoints(request: Request) -> list[str]:
    routes = (route for route in request.app.routes if isinstance(route, Route))
    paths = (route.path_format for route in routes if route.path.startswith(COMPATIBLE))
    return list(dict.fromkeys(paths))
