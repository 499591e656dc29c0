"""The caller's end of the direct stream, with a small pool of idle connections."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast

from runtime.errors import CaravanError
from serve_app.stream import wire
from serve_app.task import ChatDelta, Task

CONNECT_TIMEOUT_S = 5.0
IDLE_PER_REPLICA = 64
IDLE_S = 60.0


class ConnectionLost(Exception):
    """The connection failed; what was asked may or may not have been worked on."""


class StreamClient:
    """Asks replicas. Leaving `generate` early, for any reason, closes its connection."""

    def __init__(self) -> None:
        self._idle: dict[wire.Address, deque[_Connection]] = {}

    async def generate(self, address: wire.Address, task: Task) -> AsyncGenerator[ChatDelta, None]:
        """Deltas up to the one with `finish`. Raises ConnectionLost or the replica's own error."""
        connection = self._pooled(address) or await _Connection.open(address)
        reusable = False
        try:
            connection.send(wire.asking(task))
            ended = False
            while not ended:
                delta = await connection.receive()
                ended = delta.finish is not None
                reusable = ended
                yield delta
        except CaravanError:
            reusable = True  # the replica has answered; the connection is fine
            raise
        finally:
            if reusable:
                self._keep(address, connection)
            else:
                connection.close()

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _pooled(self, address: wire.Address) -> "_Connection | None":
        self._drop_stale()
        connections = self._idle.get(address, deque())
        while connections:
            connection = connections.pop()
            if connection.alive:
                return connection
        return None

    def _keep(self, address: wire.Address, connection: "_Connection") -> None:
        connections = self._idle.setdefault(address, deque())
        if not connection.alive or len(connections) >= IDLE_PER_REPLICA:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        connections.append(connection)

    def _drop_stale(self) -> None:
        """Oldest stand first; a replica that is gone leaves no entry behind."""
        begin = time.monotonic() - IDLE_S
        for address, connections in list(self._idle.items()):
            while connections and (connections[0].idle_since < begin or not connections[0].alive):
                connections.popleft().close()
            if not connections:
                del self._idle[address]


class _Connection(asyncio.Protocol):
    """One connection. Deltas that arrive while nobody looks are merged into one."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._splitter = wire.FrameSplitter(wire.MAX_TOLD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._challenge: bytes | None = None
        self._delta: ChatDelta | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @classmethod
    async def open(cls, address: wire.Address) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(cls, address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"No connection to the replica: {error}") from error
        try:
            await connection._prove(address.token)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def alive(self) -> bool:
        return self._error is None and self._transport is not None

    def send(self, message: wire.Wire) -> None:
        assert self._transport is not None
        self._transport.write(wire.frame(message))

    async def receive(self) -> ChatDelta:
        while self._delta is None:
            if self._error is not None:
                error, self._error = self._error, self._lasting(self._error)
                raise error
            self._changed.clear()
            await self._changed.wait()
        delta, self._delta = self._delta, None
        return delta

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not every loop's transports derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._splitter.feed(data):
                self._take(message)
        except wire.WireError as error:
            self._error = ConnectionLost(str(error))
            self.close()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = self._error or ConnectionLost("The replica closed the connection.")
        self._transport = None
        self._changed.set()

    def _take(self, message: wire.Wire) -> None:
        match message:
            case wire.Told(delta):
                self._delta = delta if self._delta is None else self._delta.merged(delta)
            case wire.Failed():
                self._error = wire.error_of(message)
            case wire.Challenge(nonce):
                self._challenge = nonce
            case _:
                raise wire.WireError(f"{type(message).__name__} where Told was due.")

    async def _prove(self, token: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while self._challenge is None and self._error is None:
                    self._changed.clear()
                    await self._changed.wait()
        if self._challenge is None:
            raise self._error or ConnectionLost("The replica sent no challenge.")
        self.send(wire.proof(token, self._challenge))

    @staticmethod
    def _lasting(error: Exception) -> Exception | None:
        """An answer that failed leaves a good connection; a lost connection stays lost."""
        return error if isinstance(error, ConnectionLost) else None
