"""One end of a connection: messages in frames, and tensors sent and received without copies.

The framing is our own because it is faster: in one run with 64 streams, grpc.aio carried at most
0.6 and ZeroMQ with CURVE at most 0.7 of its deltas per second, and both less than 0.2 of its
feature bytes.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

from serve_app.transport import wire
from serve_app.transport.wire import LENGTH, ConnectionLost, WireError, WireMessage

# With more unsent bytes than this, as on a slow link, senders wait, and the engine merges deltas
# meanwhile. A caller that does not read is no reason to wait; see `MAX_UNREAD_BYTES`.
UNSENT_BYTES = 16 * 1024
PIECE_BYTES = 2**20  # part of a tensor or long message that is sent before the sender waits
BUFFER_BYTES = 16 * 1024
# The connection ends with more unread bytes than this behind a complete message. Reading is not
# paused instead, because that would look like a lost host to the other end (TCP_USER_TIMEOUT) and
# hide the loss of the other end here.
MAX_UNREAD_BYTES = 4 * 2**20
# A silent end counts as lost after this many checks; a single one may only mean that this process
# was delayed.
SILENCE_CHECKS = 4
HOST_LOST = "The other host does not answer."


class FramedConnection(asyncio.BufferedProtocol):
    """One end of a TCP or TLS connection. One task reads at a time, one sends.

    Methods raise ConnectionLost once the connection is broken, and WireError when the other end
    violates the protocol. `max_frame_bytes`: limit of one received message, which is increased
    after authentication. An end that leaves more than MAX_UNREAD_BYTES unread loses the connection
    after the messages that have arrived. `draining`: the listener has announced that it stops.
    `at_work`: the other end may be working on a request; it is copied into ConnectionLost.
    """

    def __init__(self) -> None:
        self.max_frame_bytes = wire.MAX_HANDSHAKE_BYTES
        self.draining = False
        self.at_work = False
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._buffer = bytearray(BUFFER_BYTES)
        self._begin = self._end = 0  # range of the received, unread bytes in the buffer
        self._target: memoryview | None = None  # if set, the next bytes are received into it
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._sends_bytes = False
        self._paused = False
        self._silent_checks = 0

    @property
    def idle(self) -> bool:
        """Whether the connection is open and has no unread bytes."""
        return self._lost is None and self._begin == self._end

    @property
    def can_send(self) -> bool:
        """Whether a message would be sent soon: not within a tensor, nor behind many unsent
        bytes."""
        return (
            self._transport is not None
            and not self._sends_bytes
            and self._transport.get_write_buffer_size() < UNSENT_BYTES
        )

    def send(self, message: WireMessage) -> None:
        """Send a message without waiting; see `drain`."""
        if self._transport is None:
            self._raise_lost()
        self._transport.write(wire.frame(message))

    async def drain(self) -> None:
        """Waits until no more than UNSENT_BYTES are unsent."""
        await self._writable.wait()
        if self._transport is None or self._transport.is_closing():
            self._raise_lost()

    async def send_long(self, message: WireMessage) -> None:
        """Sends a message of any length, and waits as `drain`. Each part of it counts as movement
        for `silence_limit`."""
        await self.send_bytes(memoryview(wire.frame(message)))

    async def send_bytes(self, memory: memoryview) -> None:
        """`memory` must not change while it is sent."""
        self._sends_bytes = True
        try:
            for begin in range(0, len(memory), PIECE_BYTES):
                if self._transport is None:
                    self._raise_lost()
                self._transport.write(memory[begin : begin + PIECE_BYTES])
                await self.drain()
        finally:
            self._sends_bytes = False

    async def receive(self) -> WireMessage:
        while (message := self._next_message()) is None:
            await self._arrival()
        return message

    async def receive_all(self) -> list[WireMessage]:
        """At least one message, and all others that have arrived."""
        messages = [await self.receive()]
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    async def receive_into(self, memory: memoryview) -> None:
        """Fills `memory` with the bytes that follow the last message."""
        count = min(len(memory), self._end - self._begin)
        memory[:count] = memoryview(self._buffer)[self._begin : self._begin + count]
        self._begin += count
        self._target = memory[count:]
        try:
            while self._target:
                await self._arrival()
        finally:
            self._target = None
            self._changed.set()  # more may have been in the buffer

    async def guard(self) -> NoReturn:
        """Waits until the connection is lost, then raises. WireError once there are more unread
        bytes than one message may have. For the answering end, which does not read meanwhile."""
        while self._lost is None:
            if self._end - self._begin > self.max_frame_bytes + LENGTH.size:
                raise WireError("The caller sends further requests before the reply.")
            self._changed.clear()
            await self._changed.wait()
        self._raise_lost()

    def pause_reading(self) -> None:
        """Stop receiving, so that the sender must wait. Neither loss nor silence is detected until
        `resume_reading`."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    @contextmanager
    def silence_limit(self, limit_s: float) -> Iterator[None]:
        """A context in which the connection counts as lost when no byte moves for `limit_s`."""
        checking = asyncio.create_task(self._check_silence(limit_s))
        try:
            yield
        finally:
            checking.cancel()

    def close(self, *, flush: bool = False) -> None:
        """Close the connection. `flush`: unsent bytes are sent first."""
        self._lost = self._lost or "The connection is closed."
        if self._transport is not None:
            (self._transport.close if flush else self._transport.abort)()
            self._transport = None
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of other event loops do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target:
            return self._target
        if self._end == len(self._buffer):
            self._move_unread(2 * (self._end - self._begin))
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._silent_checks = 0
        if self._target:
            self._target = self._target[nbytes:]
            if self._target:
                return
        else:
            self._end += nbytes
            if self._end - self._begin > MAX_UNREAD_BYTES:
                self._limit_unread()
        self._changed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._silent_checks = 0
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # Reported by the kernel, whose keepalive probes the other host did not answer.
        gone = isinstance(exc, TimeoutError)
        self._lose(HOST_LOST if gone else "The other end closed the connection.")

    def _next_message(self) -> WireMessage | None:
        """The next message, if all of it has arrived."""
        body = self._begin + LENGTH.size
        if body > self._end:
            return None
        (length,) = LENGTH.unpack_from(self._buffer, self._begin)
        if length > self.max_frame_bytes:
            raise WireError(
                f"A message of {length:,} bytes; at most {self.max_frame_bytes:,} are accepted."
            )
        if body + length > self._end:
            return None
        message = wire.decode(memoryview(self._buffer)[body : body + length])
        self._begin = body + length
        if self._begin == self._end:
            self._move_unread(0)
        return message

    def _limit_unread(self) -> None:
        """Ends the connection if the reader is far behind, which is no failure of the other end.
        A single message may be longer than the limit."""
        (length,) = LENGTH.unpack_from(self._buffer, self._begin)
        if self._end - self._begin - LENGTH.size - length > MAX_UNREAD_BYTES:
            self.at_work = False
            self._lose("Too many bytes were not read in time.")

    def _move_unread(self, size: int) -> None:
        """Makes room behind the unread bytes in a new buffer. The old one is never resized, because
        the event loop may still hold a view of it."""
        unread = memoryview(self._buffer)[self._begin : self._end]
        size = max(BUFFER_BYTES, size)
        if unread or len(self._buffer) != size:
            buffer = bytearray(size)
            buffer[: len(unread)] = unread
            self._buffer = buffer
        self._begin, self._end = 0, len(unread)

    async def _arrival(self) -> None:
        """Waits until more bytes have arrived."""
        if self._lost is not None:
            self._raise_lost()
        self._changed.clear()
        await self._changed.wait()

    async def _check_silence(self, limit_s: float) -> None:
        self._silent_checks = 0
        while self._silent_checks <= SILENCE_CHECKS:
            await asyncio.sleep(limit_s / SILENCE_CHECKS)
            self._silent_checks += not self._paused
        self._lose(f"The other end was silent for {limit_s:g} seconds.")

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.close()

    def _wake(self) -> None:
        self._changed.set()
        self._writable.set()

    def _raise_lost(self) -> NoReturn:
        raise ConnectionLost(self._lost or "The connection is closed.", at_work=self.at_work)
