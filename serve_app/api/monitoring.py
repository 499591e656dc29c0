"""What monitoring reads: `/metrics`."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from serve_app.telemetry.exposition import CONTENT_TYPE

Exposition = Callable[[], Awaitable[str]]


class Monitoring:
    """`exposition`: the text of the metrics."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    async def metrics(self, request: Request) -> Response:
        return Response(await self._exposition(), media_type=CONTENT_TYPE)
