"""The HTTP request that the current asyncio task serves; its id is in every log line."""

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from runtime.engine.request import RequestOrigin

HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """`arrived`: by `time.monotonic`. `key`: the name of the API key, empty without one."""

    id: str
    arrived: float = field(default_factory=time.monotonic)
    key: str = ""
    traceparent: str = ""  # that of the request's span


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


def request_id(given: str | None) -> str:
    """The client's id if it is well-formed, else a new one."""
    return given if given is not None and _SANE.fullmatch(given) else uuid.uuid4().hex


def begin_work(origin: RequestOrigin) -> None:
    """Assign the current asyncio task, until its end, to this request of an ingress."""
    current_request.set(RequestContext(origin.id))
