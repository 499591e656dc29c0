"""Which HTTP status an exception becomes, and what the client is told."""

import re
from dataclasses import dataclass
from traceback import format_exception

from runtime.errors import (
    CaravanError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
    StorageFullError,
)
from serve_app.logs import get_logger

LONGEST_REASON = 300
RETRY_AFTER_S = 1
UNAVAILABLE_RETRY_AFTER_S = 30
BUSY = "server busy, please try again.  maximum pending requests exceeded"


# An absolute path of at least two parts, its last one apart; not what follows a URL's host.
_PATH = re.compile(r"(?<![\w:/.~-])/(?:[^\s/:;,'\"`()]+/)+([^\s/:;,'\"`()]+)")


log = get_logger()


class BodyTooLargeError(RequestError):
    """The request's body is larger than the server reads."""


class SlowBodyError(RequestError):
    """The request's body comes more slowly than the server waits for."""


class QuotaError(RequestError):
    """The tenant has used up its part of what the server can do at once."""


class ForbiddenError(RequestError):
    """The server or the client's key does not permit the request."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, the words for the client, and the seconds after which trying again is sensible.

    `kind` and `code`: the `type` and `code` of OpenAI's error body, where the status does not say
    enough.
    """

    status: int
    message: str
    retry_after_s: int | None = None
    kind: str | None = None
    code: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        # The rest of a slow body would keep the connection in use.
        return headers | ({"connection": "close"} if self.status == 408 else {})


def refusal(error: Exception) -> Refusal:
    """Only this project's own exceptions are told in their words; others could say too much.

    Of files on the server clients see the name, such as a blob's digest, without its directory.
    """
    match error:
        case BodyTooLargeError():
            return Refusal(413, str(error))
        case SlowBodyError():
            return Refusal(408, str(error))
        case QuotaError():
            return Refusal(429, str(error), RETRY_AFTER_S)
        case ForbiddenError():
            return Refusal(403, str(error))
        case RequestError():
            return Refusal(400, str(error))
        case ModelNotFoundError():
            return Refusal(404, str(error), code="model_not_found")
        case ModelUnavailableError():
            return Refusal(503, _without_directories(error), UNAVAILABLE_RETRY_AFTER_S)
        case OverloadedError():
            return Refusal(503, f"{BUSY}: {error}", RETRY_AFTER_S)
        case StorageFullError():  # for full disks and quotas: RFC 4331, section 6
            return Refusal(507, _without_directories(error))
        case CaravanError():
            return Refusal(500, _without_directories(error))
    return Refusal(500, f"internal error: {type(error).__name__}")


def explained(what: str, error: Exception) -> CaravanError:
    """Why `what` could not be loaded, in one line. Exceptions that are not of this project are
    logged with their traceback."""
    if isinstance(error, CaravanError):
        return error
    log.error("unforeseen error", what=what, traceback="".join(format_exception(error)))
    lines = str(error).strip().splitlines()
    reason = f": {lines[0][:LONGEST_REASON]}" if lines else ""
    return CaravanError(f"{what} could not be loaded: {type(error).__name__}{reason}")


def _without_directories(error: CaravanError) -> str:
    return _PATH.sub(r"\1", str(error))
