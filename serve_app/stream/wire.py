"""The messages of the direct stream and their frames: four bytes of length, then msgpack.

The replica opens with a `Challenge`; the other side proves that it knows the replica's token
without sending it. Then, again and again: one `Ask` or `AskVectors`, answered by `Told` until a
delta has `finish`, or by `Failed`. Whoever closes the connection ends what is being answered.
"""

import asyncio
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.errors import (
    CaravanError,
    EngineDeadError,
    GenerationFailedError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)
from serve_app.task import ChatDelta, ChatTask, EmbeddingTask, Task

MAX_HANDSHAKE_BYTES = 256
MAX_ASK_BYTES = 256 * 2**20
MAX_TOLD_BYTES = 64 * 2**20

_LENGTH = struct.Struct(">I")
# Most specific first; what is not listed travels as its nearest ancestor here.
_TRAVELLING: tuple[type[CaravanError], ...] = (
    PromptTooLongError,
    RequestError,
    OverloadedError,
    GenerationFailedError,
    EngineDeadError,
    CaravanError,
)


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    digest: bytes


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    task: ChatTask


class AskVectors(msgspec.Struct, frozen=True, tag="ask vectors"):
    task: EmbeddingTask


class Told(msgspec.Struct, frozen=True, tag="told"):
    delta: ChatDelta


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    kind: str
    message: str


Wire = Challenge | Proof | Ask | AskVectors | Told | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Wire)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens, and the secret that it expects its callers to know."""

    host: str
    port: int
    token: str


class WireError(Exception):
    """The other side does not speak this protocol."""


def asking(task: Task) -> Ask | AskVectors:
    return Ask(task) if isinstance(task, ChatTask) else AskVectors(task)


def frame(message: Wire) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Wire:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"Malformed message: {error}") from error


class FrameSplitter:
    """Bytes as they arrive → whole messages."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Wire]:
        self._buffer += data
        messages: list[Wire] = []
        begin = 0
        while (end := self._frame_end(begin)) is not None:
            messages.append(decode(bytes(self._buffer[begin + _LENGTH.size : end])))
            begin = end
        del self._buffer[:begin]
        return messages

    def _frame_end(self, begin: int) -> int | None:
        if len(self._buffer) - begin < _LENGTH.size:
            return None
        end = begin + _LENGTH.size + _checked(self._buffer[begin:], self._limit_bytes)
        return end if end <= len(self._buffer) else None


async def read_message(reader: asyncio.StreamReader, limit_bytes: int) -> Wire:
    length = _checked(await reader.readexactly(_LENGTH.size), limit_bytes)
    return decode(await reader.readexactly(length))


def _checked(prefix: bytes | bytearray, limit_bytes: int) -> int:
    (length,) = _LENGTH.unpack_from(prefix)
    if length > limit_bytes:
        raise WireError(f"A message of {length:,} bytes; at most {limit_bytes:,} are accepted.")
    return length


def proof(token: str, nonce: bytes) -> Proof:
    return Proof(hmac.digest(token.encode(), nonce, hashlib.sha256))


def proves(message: Wire, token: str, nonce: bytes) -> bool:
    return isinstance(message, Proof) and hmac.compare_digest(
        message.digest, proof(token, nonce).digest
    )


def failed(error: Exception) -> Failed:
    """What the other side may know of an error: only our own are told in their words."""
    for kind in _TRAVELLING:
        if isinstance(error, kind):
            return Failed(kind.__name__, str(error))
    return Failed(CaravanError.__name__, f"The model replica failed: {type(error).__name__}.")


def error_of(message: Failed) -> CaravanError:
    kinds = {kind.__name__: kind for kind in _TRAVELLING}
    return kinds.get(message.kind, CaravanError)(message.message)
