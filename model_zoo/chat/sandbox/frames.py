"""Messages between a process and the processes that render its templates."""

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

# Headers of requests and replies; each begins with the length of the body.
_REQUEST = struct.Struct("<QdQQ")
_REPLY = struct.Struct("<QB")
_AT_ONCE = 1 << 14
# The reply of the fork server: the id of the new process.
PID = struct.Struct("<q")


class Outcome(IntEnum):
    """The outcome of a request. The reply's text is the result for DONE, otherwise an
    explanation."""

    DONE = 0
    REFUSED = 1  # refused by the template itself
    FORBIDDEN = 2  # forbidden by the sandbox
    TOO_MUCH_MEMORY = 3
    TOO_MUCH_TEXT = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one request: processor time, memory beyond the idle process, bytes of the reply."""

    seconds: float
    memory_bytes: int
    reply_bytes: int

    def within(self, most: "RenderLimits") -> "RenderLimits":
        """These limits, each at most the other one."""
        return RenderLimits(
            min(self.seconds, most.seconds),
            min(self.memory_bytes, most.memory_bytes),
            min(self.reply_bytes, most.reply_bytes),
        )


@dataclass(frozen=True, slots=True)
class RenderReply:
    outcome: Outcome
    text: str


def send_request(connection: socket.socket, limits: RenderLimits, body: bytes) -> None:
    header = _REQUEST.pack(len(body), limits.seconds, limits.memory_bytes, limits.reply_bytes)
    _send(connection, header, body)


def receive_request(connection: socket.socket) -> tuple[RenderLimits, bytes | bytearray] | None:
    """None if the connection is closed."""
    received = _receive(connection, _REQUEST, most=None)
    return None if received is None else (RenderLimits(*received[0]), received[1])


def send_reply(connection: socket.socket, outcome: Outcome, text: bytes) -> None:
    _send(connection, _REPLY.pack(len(text), outcome), text)


def receive_reply(connection: socket.socket, limits: RenderLimits) -> RenderReply | None:
    """None if the connection is closed or the reply exceeds its limit."""
    received = _receive(connection, _REPLY, most=limits.reply_bytes)
    if received is None:
        return None
    (outcome,), body = received
    return RenderReply(Outcome(outcome), body.decode("utf-8", "surrogatepass"))


def _send(connection: socket.socket, header: bytes, body: bytes) -> None:
    if len(body) < _AT_ONCE:
        connection.sendall(header + body)
    else:
        connection.sendall(header)
        connection.sendall(body)


def _receive(
    connection: socket.socket, header: struct.Struct, *, most: int | None
) -> tuple[list[Any], bytes | bytearray] | None:
    """The fields of the header after the length, and the body.

    Only one frame is in flight at a time, so a short one is received by a single `recv`.
    """
    begun = b""
    while len(begun) < header.size:
        more = connection.recv(_AT_ONCE)
        if not more:
            return None
        begun += more
    length, *fields = header.unpack_from(begun)
    if most is not None and length > most:
        return None
    body = begun[header.size :]
    return (fields, body) if len(body) == length else _completed(connection, fields, body, length)


def _completed(
    connection: socket.socket, fields: list[Any], begun: bytes, length: int
) -> tuple[list[Any], bytearray] | None:
    body = bytearray(length)
    count = len(begun)
    view = memoryview(body)
    view[:count] = begun
    while count < length:
        size = connection.recv_into(view[count:])
        if not size:
            return None
        count += size
    return fields, body
