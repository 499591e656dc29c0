"""The HTTP request that the current asyncio task works for."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RequestContext:
    """`arrived`: by `time.monotonic`. `key`: the name of the API key, empty without one."""

    arrived: float
    key: str = ""


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
