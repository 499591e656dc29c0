"""The pages for browsers: the static files of `serve_app/page`, which hold no secrets."""

from importlib.resources import files
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.auth import PAGE_PATH, PAGES

GREETING = "Ollama is running"
_FILES = Path(str(files("serve_app.page")))
_HEADERS = {
    # Scripts, styles and requests from this server only; images also from the user's attachments.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a new version of the server brings new files
}


class _Secured:
    """Middleware: adds `_HEADERS`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def page_routes() -> list[BaseRoute]:
    secured = [Middleware(_Secured)]
    return [
        Route("/", _root, middleware=secured),
        *(Route(path, _page, middleware=secured) for path in PAGES),
        Mount(PAGE_PATH, StaticFiles(directory=_FILES), middleware=secured),
    ]


async def _root(request: Request) -> Response:
    """The chat page for browsers; Ollama's greeting for its clients."""
    vary = {"vary": "Accept"}
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(_FILES / "index.html", headers=vary)
    return PlainTextResponse(GREETING, headers=vary)


async def _page(request: Request) -> Response:
    return FileResponse(_FILES / f"{request.url.path.rsplit('/', 1)[-1]}.html")
