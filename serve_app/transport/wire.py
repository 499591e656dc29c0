"""The messages between ingresses, replicas and vision encoders, and their encoding.

A frame is four bytes of length, big-endian, then msgpack. The listener sends `Challenge`, the
caller `Proof`, the listener `Accepted` (`authentication.py`): both prove knowledge of the
listener's token without sending it. Then the caller sends requests, one after the other. Closing
the connection aborts the request.

| Request | Replies |
|---|---|
| `GenerateRequest`, `EmbedRequest` | `DeltaMessage` up to the one with `finish` |
| `TokenizeRequest` | the same |
| `Watch` | `LoadReport` whenever the load has changed, until the caller closes the connection |
| `EncodeRequest` | `Features`, then their bytes; before them `SendPixels` if the encoder needs the
pixels, which the caller sends as bytes |

`Failed` ends any request. During each request the listener sends `Heartbeat` every `HEARTBEAT_S`,
or `Draining` instead once it stops; the caller then continues its request on another replica.
"""

import struct
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from runtime.distributed.handshake import DIGEST_BYTES, NONCE_BYTES
from runtime.engine.request import NO_ORIGIN, RequestOrigin
from runtime.errors import (
    CaravanError,
    EngineDeadError,
    GenerationFailedError,
    InvalidImageError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    PromptTooLongError,
    ReplicaLostError,
    RequestError,
    StorageFullError,
)
from serve_app.messages.replica_load import PrefixHashes, ReplicaLoad
from serve_app.messages.tasks import ChatDelta, ChatTask, EmbeddingTask, PromptTask, Task

MAX_HANDSHAKE_BYTES = 256
MAX_TASK_BYTES = 256 * 2**20
MAX_ENCODE_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 64 * 2**20
MAX_DIMENSIONS = 8
MAX_TENANT_CHARACTERS = 64
HEARTBEAT_S = 1.0

LENGTH = struct.Struct(">I")
# Most specific first. Any other CaravanError is sent as its nearest base class in this list.
_SENT_ERRORS: tuple[type[CaravanError], ...] = (
    PromptTooLongError,
    RequestError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    GenerationFailedError,
    EngineDeadError,
    ReplicaLostError,
    StorageFullError,
    CaravanError,
)

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
FileDigest = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
FeatureType = Literal["bfloat16", "float16"]


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """`nonce`: the listener's nonce."""

    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """`nonce`: the caller's nonce. `digest`: the caller's proof over both nonces."""

    nonce: Nonce
    digest: Digest


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """`digest`: the listener's proof over both nonces."""

    digest: Digest


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate"):
    task: ChatTask


class EmbedRequest(msgspec.Struct, frozen=True, tag="embed"):
    task: EmbeddingTask


class TokenizeRequest(msgspec.Struct, frozen=True, tag="tokenize"):
    task: PromptTask


class EncodeRequest(msgspec.Struct, frozen=True, tag="encode"):
    """`shape` of the pixels, `grid`, `digest` and `rows`: as in PreparedImage. `tower`: the digest
    of the file with the weights. `tenant`: the digest of the tenant's name. `origin`: the request
    that the image is from."""

    tower: FileDigest
    digest: FileDigest
    shape: Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=MAX_DIMENSIONS)]
    grid: tuple[Size, Size]
    rows: Size
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARACTERS)] = ""
    origin: RequestOrigin = NO_ORIGIN


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """`every_s`: the shortest interval between reports. An unchanged load is reported every
    `HEARTBEAT_S`."""

    every_s: float


class DeltaMessage(msgspec.Struct, frozen=True, tag="delta"):
    delta: ChatDelta


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """`hashes`: prefix hashes of the requests since the previous report. `recorded`: number of
    requests with hashes since the replica started."""

    load: ReplicaLoad
    hashes: tuple[PrefixHashes, ...]
    recorded: int


class SendPixels(msgspec.Struct, frozen=True, tag="send pixels"):
    """The caller then sends the pixels: float32, little-endian, row-major."""


class Features(msgspec.Struct, frozen=True, tag="features"):
    """The numbers [rows, width] follow: 16 bits each, little-endian, row-major."""

    rows: Size
    width: Size
    dtype: FeatureType


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    pass


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    pass


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`kind`: the name of a class in runtime/errors.py. `field`: that of an InvalidImageError."""

    kind: str
    message: str
    field: str | None = None


WireMessage = (
    Challenge
    | Proof
    | Accepted
    | GenerateRequest
    | EmbedRequest
    | TokenizeRequest
    | EncodeRequest
    | Watch
    | DeltaMessage
    | LoadReport
    | SendPixels
    | Features
    | Heartbeat
    | Draining
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(WireMessage)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica or encoder listens, and the token that its callers must know.

    `replica`: a name that is never reused. `model`: equal for replicas that can continue each
    other's answers; empty for one that could not load its model.
    """

    host: str
    port: int
    token: str = field(repr=False)
    replica: str = ""
    model: str = ""


class WireError(Exception):
    """The other end violates the protocol."""


class ConnectionLost(Exception):
    """The connection failed. `at_work`: the other end may have been working on the request."""

    def __init__(self, message: str, *, at_work: bool = False) -> None:
        super().__init__(message)
        self.at_work = at_work


TaskRequest = GenerateRequest | EmbedRequest | TokenizeRequest


def request_of(task: Task) -> TaskRequest:
    match task:
        case ChatTask():
            return GenerateRequest(task)
        case EmbeddingTask():
            return EmbedRequest(task)
        case PromptTask():
            return TokenizeRequest(task)


def frame(message: WireMessage) -> bytes:
    """RequestError: a delta is larger than callers accept; they would take the replica for lost."""
    body = _encoder.encode(message)
    if isinstance(message, DeltaMessage) and len(body) > MAX_REPLY_BYTES:
        raise RequestError(
            f"the reply has {len(body):,} bytes in one piece; at most {MAX_REPLY_BYTES:,} can be "
            "sent. Request fewer log-probabilities of the prompt, or shorten it."
        )
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> WireMessage:
    """Raises WireError unless `body` is one message."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"Malformed message: {error}") from error


def failed(error: Exception) -> Failed:
    """The reply to a request that failed. Texts of errors other than CaravanError are not sent."""
    if isinstance(error, InvalidImageError):
        return Failed(InvalidImageError.__name__, str(error), error.field)
    for kind in _SENT_ERRORS:
        if isinstance(error, kind):
            return Failed(kind.__name__, str(error))
    return Failed(CaravanError.__name__, f"The model replica failed: {type(error).__name__}.")


def error_of(message: Failed) -> CaravanError:
    if message.kind == InvalidImageError.__name__:
        return InvalidImageError(message.field, message.message)
    kinds = {kind.__name__: kind for kind in _SENT_ERRORS}
    return kinds.get(message.kind, CaravanError)(message.message)
