"""The messages of the direct stream and their frames: four bytes of length, then msgpack.

The replica sends `Challenge`, the caller `Proof`, the replica `Accepted` (`handshake.py`): both
prove knowledge of the replica's token without sending it. Then the caller sends one
`GenerateRequest` or `EmbedRequest` after the other; each is answered by `DeltaMessage`, up to the
delta with `finish`, or by `Failed`. Closing the connection aborts the request.

During a request the replica sends `Heartbeat` every `HEARTBEAT_S`, or `Draining` once it has been
told to stop, and the caller moves the request to another replica. Requests that were running on a
replica that died are suspected: the next replica runs them one at a time and sends `TrialStarted`
for each, until it has drawn `trial_tokens` or ended. If that replica dies too, the cause is
known.

`Watch` instead of a request subscribes to `Report`, until the caller sends anything or leaves, or
the replica sends `Draining`.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from runtime.distributed.handshake import DIGEST_BYTES, NONCE_BYTES
from runtime.errors import (
    CaravanError,
    EngineDeadError,
    GenerationFailedError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    PromptTooLongError,
    ReplicaLostError,
    RequestError,
    StorageFullError,
)
from serve_app.gateway.tasks import ChatDelta, ChatTask, EmbeddingTask, Task
from serve_app.routing.policy import Load
from serve_app.routing.prefixes import PrefixHashes

PURPOSE = "stream of answers"
MAX_HANDSHAKE_BYTES = 256
MAX_ASK_BYTES = 256 * 2**20
MAX_TOLD_BYTES = 64 * 2**20
HEARTBEAT_S = 1.0

LENGTH = struct.Struct(">I")
# Most specific first; what is not listed travels as its nearest ancestor here.
_TRAVELLING: tuple[type[CaravanError], ...] = (
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


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """`nonce`: the caller's. `digest`: its proof over both."""

    nonce: Nonce
    digest: Digest


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """`digest`: the listener's proof over both nonces."""

    digest: Digest


class GenerateRequest(msgspec.Struct, frozen=True, tag="ask"):
    """`trial_tokens` 0: the task is not on trial."""

    task: ChatTask
    trial_tokens: int = 0


class EmbedRequest(msgspec.Struct, frozen=True, tag="ask vectors"):
    task: EmbeddingTask
    trial_tokens: int = 0


class DeltaMessage(msgspec.Struct, frozen=True, tag="told"):
    delta: ChatDelta


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    kind: str
    message: str


class TrialStarted(msgspec.Struct, frozen=True, tag="taken"):
    pass


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    pass


class Draining(msgspec.Struct, frozen=True, tag="leaving"):
    pass


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """`every_s`: that often at most; what does not change is told every `HEARTBEAT_S`."""

    every_s: float


class Report(msgspec.Struct, frozen=True, tag="report"):
    """`chains`: of the tasks that came since the last report. `taken`: how many came at all."""

    load: Load
    chains: tuple[PrefixHashes, ...]
    taken: int


Wire = (
    Challenge
    | Proof
    | Accepted
    | GenerateRequest
    | EmbedRequest
    | DeltaMessage
    | Failed
    | TrialStarted
    | Heartbeat
    | Draining
    | Watch
    | Report
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Wire)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens, and the secret that it expects its callers to know.

    `replica`: its name, which no later one has. `model`: equal where an answer that one replica has
    begun can go on at the other.
    """

    host: str
    port: int
    token: str = field(repr=False)
    replica: str = ""
    model: str = ""


class WireError(Exception):
    """The other side does not speak this protocol."""


def asking(task: Task, *, trial_tokens: int = 0) -> GenerateRequest | EmbedRequest:
    if isinstance(task, ChatTask):
        return GenerateRequest(task, trial_tokens)
    return EmbedRequest(task, trial_tokens)


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Wire:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"Malformed message: {error}") from error


class FrameSplitter:
    """Bytes as they arrive → whole messages.

    `limit_bytes`: of one message; raised when the other side has proved what it is.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Wire]:
        """The messages that are whole now. What is buffered is never copied: a frame may be long
        and arrive in many pieces."""
        self._buffer += data
        messages: list[Wire] = []
        begin = 0
        with memoryview(self._buffer) as view:
            while (end := self._frame_end(begin)) is not None:
                with view[begin + LENGTH.size : end] as body:
                    messages.append(decode(body))
                begin = end
        del self._buffer[:begin]
        return messages

    def _frame_end(self, begin: int) -> int | None:
        if len(self._buffer) - begin < LENGTH.size:
            return None
        end = begin + LENGTH.size + checked_length(self._buffer, self.limit_bytes, begin)
        return end if end <= len(self._buffer) else None


async def read_message(reader: asyncio.StreamReader, limit_bytes: int) -> Wire:
    length = checked_length(await reader.readexactly(LENGTH.size), limit_bytes)
    return decode(await reader.readexactly(length))


def greetings(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[Callable[[msgspec.Struct], Awaitable[None]], Callable[[], Awaitable[Wire]]]:
    """How a handshake sends and receives on these: short messages only."""

    async def send(message: msgspec.Struct) -> None:
        writer.write(frame(message))
        await writer.drain()

    async def receive() -> Wire:
        return await read_message(reader, MAX_HANDSHAKE_BYTES)

    return send, receive


def checked_length(buffer: bytes | bytearray, limit_bytes: int, begin: int = 0) -> int:
    """The length that stands in `buffer` at `begin`; WireError above the limit."""
    (length,) = LENGTH.unpack_from(buffer, begin)
    if length > limit_bytes:
        raise WireError(f"A message of {length:,} bytes; at most {limit_bytes:,} are accepted.")
    return length


def failed(error: Exception) -> Failed:
    """What the other side may know of an error: only our own are told in their words."""
    for kind in _TRAVELLING:
        if isinstance(error, kind):
            return Failed(kind.__name__, str(error))
    return Failed(CaravanError.__name__, f"The model replica failed: {type(error).__name__}.")


def error_of(message: Failed) -> CaravanError:
    kinds = {kind.__name__: kind for kind in _TRAVELLING}
    return kinds.get(message.kind, CaravanError)(message.message)
