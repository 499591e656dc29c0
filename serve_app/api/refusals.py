"""Maps exceptions to HTTP status codes and messages for clients."""

import re
from dataclasses import dataclass

from runtime.errors import (
    CaravanError,
    InvalidImageError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    StorageFullError,
)

RETRY_AFTER_S = 1
UNAVAILABLE_RETRY_AFTER_S = 30
# The code, and in protocols and clients without codes the words, by which clients recognise that
# they must shorten a conversation.
CONTEXT_EXCEEDED = "context_length_exceeded"
TOO_LONG = "prompt is too long"
# With this code and the field of an image, Codex removes the image from the conversation.
INVALID_VALUE = "invalid_value"
BUSY = "server busy, please try again.  maximum pending requests exceeded"


# An absolute path of at least two parts, with the last part as a group; not the path of a URL.
_PATH = re.compile(r"(?<![\w:/.~-])/(?:[^\s/:;,'\"`()]+/)+([^\s/:;,'\"`()]+)")


class BodyTooLargeError(RequestError):
    """The request body is larger than the limit."""


class SlowBodyError(RequestError):
    """The request body arrives more slowly than the limit."""


class ContentEncodingError(RequestError):
    """The request body is compressed."""


class QuotaError(RequestError):
    """The tenant has used up its share of a resource."""


class ForbiddenError(RequestError):
    """The server's configuration or the client's key does not permit the request."""


class UnservedFieldError(RequestError):
    """The request has a field that would change the response and is not served."""

    def __init__(self, field: str) -> None:
        super().__init__(f'field "{field}" is not served yet')
        self.field = field


class ResponseNotFoundError(RequestError):
    """The tenant has no stored response with the requested id."""


class PreviousResponseError(RequestError):
    """The tenant has no stored response with the id that a request continues."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, a message for the client, and the seconds after which a retry makes sense.

    `closes`: the connection is closed after the response. `kind` and `code`: the
    `type` and `code` of OpenAI's error body, where the status does not determine them. `field`: the
    field that is refused, if the error knows it.
    """

    status: int
    message: str
    retry_after_s: int | None = None
    kind: str | None = None
    code: str | None = None
    closes: bool = False
    field: str | None = None

    @property
    def compatible_message(self) -> str:
        """The message for clients of OpenAI's and Anthropic's protocols."""
        return f"{TOO_LONG}: {self.message}" if self.code == CONTEXT_EXCEEDED else self.message

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:  # RFC 9110, section 15.5.2
            headers["www-authenticate"] = "Bearer"
        if self.closes:
            headers["connection"] = "close"
        return headers


def refusal(error: Exception) -> Refusal:
    """The refusal for an exception. Only messages of this project's exceptions are sent to clients;
    others could reveal internals.

    Of paths on the server, clients see the file name only, such as a blob's digest.
    """
    match error:
        case BodyTooLargeError():
            return Refusal(413, str(error))
        case SlowBodyError():  # the rest of the body would otherwise occupy the connection
            return Refusal(408, str(error), closes=True)
        case ContentEncodingError():
            return Refusal(415, str(error))
        case QuotaError():
            return Refusal(429, str(error), RETRY_AFTER_S)
        case ForbiddenError():
            return Refusal(403, str(error))
        case ResponseNotFoundError():
            return Refusal(404, str(error), kind="invalid_request_error")
        case UnservedFieldError(field=field):
            return Refusal(400, str(error), field=field)
        case InvalidImageError(field=field):
            return Refusal(400, str(error), code=INVALID_VALUE, field=field)
        case PreviousResponseError():
            return Refusal(400, str(error), code="previous_response_not_found")
        case PromptTooLongError():
            return Refusal(400, str(error), code=CONTEXT_EXCEEDED)
        case RequestError():
            return Refusal(400, str(error))
        case ModelNotFoundError():
            return Refusal(404, str(error), code="model_not_found")
        case ModelUnavailableError():
            return Refusal(503, _without_directories(error), UNAVAILABLE_RETRY_AFTER_S)
        case OverloadedError():
            return Refusal(503, f"{BUSY}: {error}", RETRY_AFTER_S)
        case StorageFullError():  # full disk or quota: RFC 4331, section 6
            return Refusal(507, _without_directories(error))
        case CaravanError():
            return Refusal(500, _without_directories(error))
    return Refusal(500, f"internal error: {type(error).__name__}")


def _without_directories(error: CaravanError) -> str:
    return _PATH.sub(r"\1", str(error))
