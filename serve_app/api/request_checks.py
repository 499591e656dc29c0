"""Checks of requests that need only their heads."""

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.error_bodies import error_response
from serve_app.api.refusals import Refusal

# Returns the reason to refuse the request of an HTTP scope, or None; may store facts in the scope.
Check = Callable[[Scope], Refusal | None]


class CheckRequests:
    """Middleware: applies `checks` in their order and answers with the first refusal."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self._app = app
        self._checks = tuple(checks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for check in self._checks:
                refused = check(scope)
                if refused is not None:
                    await error_response(scope, refused)(scope, receive, send)
                    return
        await self._app(scope, receive, send)
