"""The caller's end: requests to replicas and encoders, with a pool of idle connections."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from runtime.errors import CaravanError
from serve_app.messages.tasks import ChatDelta, Task, merge
from serve_app.transport import wire
from serve_app.transport.connection import FramedConnection
from serve_app.transport.sockets import connect
from serve_app.transport.wire import Address, ConnectionLost

IDLE_PER_ADDRESS = 64
IDLE_S = 60.0
SILENCE_S = 10.0
# Handshakes of one client with one listener at a time. A listener computes one after the other, so
# more of them only take longer each, and when a replica is lost, all its streams connect to others.
MAX_HANDSHAKES = 16

AnswerPart = ChatDelta | wire.Heartbeat | wire.Draining


class StreamClient:
    """Sends requests. Leaving one before its end, for any reason, closes its connection.

    `silence_s`: an end that sends nothing for this long, not even a heartbeat, counts as lost.
    """

    def __init__(self, *, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._idle: dict[Address, deque[tuple[float, FramedConnection]]] = {}
        self._handshakes: WeakValueDictionary[Address, _Handshakes] = WeakValueDictionary()

    @asynccontextmanager
    async def exchange(self, address: Address) -> AsyncIterator[FramedConnection]:
        """A connection for one request, which is reused unless the block fails.

        Raises ConnectionLost, also when the other end violates the protocol. A CaravanError is
        treated as the other end's reply and leaves the connection intact.
        """
        connection = self._pooled(address) or await self._connected(address)
        reusable = False
        try:
            with connection.silence_limit(self._silence_s):
                yield connection
            reusable = True
        except CaravanError:
            reusable = True
            raise
        except wire.WireError as error:
            raise ConnectionLost(str(error), at_work=connection.at_work) from error
        finally:
            connection.at_work = False
            if reusable:
                self._keep(address, connection)
            else:
                connection.close()

    async def generate(self, address: Address, task: Task) -> AsyncGenerator[AnswerPart, None]:
        """Deltas up to the one with `finish`; deltas that are not read in time are merged. Also
        yields heartbeats before the first delta, and `Draining` at any time if the replica stops.

        Raises ConnectionLost or the replica's own error.
        """
        async with self.exchange(address) as connection:
            await connection.send_long(wire.request_of(task))
            connection.at_work = True
            answer = _Answer(connection)
            while not answer.finished:
                for part in answer.parts(await connection.receive_all()):
                    yield part
            if connection.draining:
                connection.close()

    def close(self) -> None:
        for connections in self._idle.values():
            for _, connection in connections:
                connection.close()
        self._idle.clear()

    async def _connected(self, address: Address) -> FramedConnection:
        """A new connection, or one that has become idle while this caller waited for its turn."""
        handshakes = self._handshakes.setdefault(address, _Handshakes())
        async with handshakes.turn():
            return self._pooled(address) or await connect(address)

    def _pooled(self, address: Address) -> FramedConnection | None:
        self._drop_stale()
        connections = self._idle.get(address, deque())
        while connections:
            _, connection = connections.pop()
            if connection.idle:
                return connection
            connection.close()
        return None

    def _keep(self, address: Address, connection: FramedConnection) -> None:
        kept = len(self._idle.get(address, ()))
        if connection.idle and kept < IDLE_PER_ADDRESS:
            self._idle.setdefault(address, deque()).append((time.monotonic(), connection))
        else:
            connection.close()

    def _drop_stale(self) -> None:
        """Drop stale connections, oldest first, and addresses without connections."""
        begin = time.monotonic() - IDLE_S
        for address, connections in list(self._idle.items()):
            while connections and (connections[0][0] < begin or not connections[0][1].idle):
                connections.popleft()[1].close()
            if not connections:
                del self._idle[address]


class _Handshakes:
    """Handshakes with one listener, at most MAX_HANDSHAKES at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_HANDSHAKES)
        self._failures = 0
        self._reason = ""  # of the latest failure

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a place. If a handshake fails meanwhile, so does this one: if each had to fail
        by its own timeout, the last of many would wait for minutes."""
        failures = self._failures
        async with self._places:
            if self._failures > failures:
                raise ConnectionLost(self._reason)
            try:
                yield
            except ConnectionLost as lost:
                self._failures += 1
                self._reason = str(lost)
                raise


class _Answer:
    """One answer as its messages arrive."""

    def __init__(self, connection: FramedConnection) -> None:
        self.finished = False
        self._started = False
        self._connection = connection

    def parts(self, messages: Sequence[wire.WireMessage]) -> Iterator[AnswerPart]:
        """The content of messages: their merged deltas; then `Draining` or a heartbeat; then the
        error."""
        deltas = [message.delta for message in messages if isinstance(message, wire.DeltaMessage)]
        events = [self._event(each) for each in messages if not isinstance(each, wire.DeltaMessage)]
        if deltas:
            merged = merge(deltas)
            self._started, self.finished = True, merged.finish is not None
            yield merged
        if self.finished:
            return
        if any(isinstance(event, wire.Draining) for event in events):
            yield wire.Draining()
        elif wire.Heartbeat() in events and not self._started:
            yield wire.Heartbeat()
        for event in events:
            if isinstance(event, wire.Failed):
                raise wire.error_of(event)

    def _event(self, message: wire.WireMessage) -> wire.WireMessage:
        match message:
            case wire.Draining():
                self._connection.draining, self._connection.at_work = True, False
            case wire.Heartbeat() | wire.Failed():
                pass
            case _:
                raise wire.WireError(f"Expected a delta, received {type(message).__name__}.")
        return message
