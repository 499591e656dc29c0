"""Which HTTP status an exception becomes, and what the client is told."""

from dataclasses import dataclass

from runtime.errors import (
    CaravanError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
    StorageFullError,
)

RETRY_AFTER_S = 1
UNAVAILABLE_RETRY_AFTER_S = 30
BUSY = "server busy, please try again.  maximum pending requests exceeded"


class BodyTooLargeError(RequestError):
    """The request's body is larger than the server reads."""


class ForbiddenError(RequestError):
    """The server is not there for this, or not for whoever asks."""


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
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def refusal(error: Exception) -> Refusal:
    """Only this project's own exceptions are told in their words; others could say too much."""
    match error:
        case BodyTooLargeError():
            return Refusal(413, str(error))
        case ForbiddenError():
            return Refusal(403, str(error))
        case RequestError():
            return Refusal(400, str(error))
        case ModelNotFoundError():
            return Refusal(404, str(error), code="model_not_found")
        case ModelUnavailableError():
            return Refusal(503, str(error), UNAVAILABLE_RETRY_AFTER_S)
        case OverloadedError():
            return Refusal(503, f"{BUSY}: {error}", RETRY_AFTER_S)
        case StorageFullError():
            return Refusal(507, str(error))  # for full disks and quotas: RFC 4331, section 6
        case CaravanError():
            return Refusal(500, str(error))
    return Refusal(500, f"internal error: {type(error).__name__}")
