"""The caller's end of the direct stream, with a small pool of idle connections."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast

from runtime import tls
from runtime.errors import CaravanError
from serve_app.gateway.tasks import ChatDelta, Task, merge
from serve_app.transport import handshake, wire
from serve_app.transport.sockets import CONNECT_TIMEOUT_S, connected_protocol

IDLE_PER_REPLICA = 64
IDLE_S = 60.0
SILENCE_S = 10.0
LOOKS = 4


class ConnectionLost(Exception):
    """The connection failed. `at_work`: the other side may have been at work on what was asked."""

    def __init__(self, message: str, *, at_work: bool = False) -> None:
        super().__init__(message)
        self.at_work = at_work


class StreamClient:
    """Asks replicas. Leaving `generate` early, for any reason, closes its connection.

    `silence_s`: a replica that says nothing for so long, not even that it lives, is lost.
    """

    def __init__(self, *, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._idle: dict[wire.Address, deque[_Connection]] = {}

    async def generate(
        self, address: wire.Address, task: Task, *, trial_tokens: int = 0
    ) -> AsyncGenerator[ChatDelta | wire.Heartbeat | wire.Draining, None]:
        """Deltas up to the one with `finish`. Before the first, again and again, that it is waited
        for; among them, again and again, that the replica leaves.

        Raises ConnectionLost or the replica's own error.
        """
        connection = self._pooled(address) or await _Connection.open(address)
        reusable = False
        try:
            connection.ask(task, trial_tokens, self._silence_s)
            ended = False
            while not ended:
                told = await connection.receive()
                ended = isinstance(told, ChatDelta) and told.finish is not None
                reusable = ended
                yield told
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
        connection.rest()
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
    """One connection. Deltas that arrive between two calls of `receive` are merged by the second:
    each is copied once, however many there are."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._splitter = wire.FrameSplitter(wire.MAX_HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._accepted = False  # both ends have proved that they know the token
        self._greeting: wire.Wire | None = None
        self._deltas: list[ChatDelta] = []
        self._heartbeat: wire.Heartbeat | None = None
        self._waiting = False  # for the first delta
        self._draining: wire.Draining | None = None
        self._departing = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._at_work = False  # what was asked, as far as is known here
        self._quiet_looks = 0
        self._next_look: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, address: wire.Address) -> "_Connection":
        try:
            _, connection = await connected_protocol(
                cls, address.host, address.port, timeout_s=CONNECT_TIMEOUT_S
            )
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"No connection to the replica: {error}") from error
        try:
            await connection._shake_hands(address.token)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def alive(self) -> bool:
        return self._error is None and self._transport is not None and not self._departing

    def send(self, message: wire.Wire) -> None:
        assert self._transport is not None
        self._transport.write(wire.frame(message))

    def ask(self, task: Task, trial_tokens: int, silence_s: float) -> None:
        self._at_work = not trial_tokens  # else it is told when its turn comes
        self._waiting, self._heartbeat = True, None
        self.send(wire.asking(task, trial_tokens=trial_tokens))
        self._quiet_looks = 0
        self._look_later(silence_s / LOOKS)

    async def receive(self) -> ChatDelta | wire.Heartbeat | wire.Draining:
        """What was told since the last time; deltas first, then that the replica leaves."""
        while not self._deltas and self._draining is None and self._heartbeat is None:
            if self._error is not None:
                error, self._error = self._error, self._lasting(self._error)
                raise error
            self._changed.clear()
            await self._changed.wait()
        if self._deltas:
            deltas, self._deltas, self._heartbeat = self._deltas, [], None
            return merge(deltas)
        told, self._draining, self._heartbeat = self._draining or self._heartbeat, None, None
        assert told is not None
        return told

    def rest(self) -> None:
        """Nothing is asked; the other side may be silent."""
        self._at_work = False
        self._draining = None
        if self._next_look is not None:
            self._next_look.cancel()

    def close(self) -> None:
        self.rest()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not every loop's transports derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._quiet_looks = 0
        try:
            for message in self._splitter.feed(data):
                (self._take if self._accepted else self._greet)(message)
        except wire.WireError as error:
            self._lose(str(error))
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._accepted and tls.configured():  # asyncio's listeners send no TLS alert
            self._lose(
                "The replica closed the connection in the handshake. If its log says that it "
                "refuses this host's certificate, both need certificates of one CA "
                "(`RAY_TLS_CA_CERT`)."
            )
        else:
            self._lose("The replica closed the connection.")

    def _lose(self, reason: str) -> None:
        self._error = self._error or ConnectionLost(reason, at_work=self._at_work)
        self.close()
        self._changed.set()

    def _look_later(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(pause_s, self._look, pause_s)

    def _look(self, pause_s: float) -> None:
        """Several looks must find silence: one alone may only show that this process was late."""
        self._quiet_looks += 1
        if self._quiet_looks > LOOKS:
            self._lose(f"The replica was silent for {LOOKS * pause_s:g} seconds.")
        else:
            self._look_later(pause_s)

    def _take(self, message: wire.Wire) -> None:
        match message:
            case wire.DeltaMessage(delta):
                self._deltas.append(delta)
                self._waiting = False
            case wire.Failed():
                self._error = wire.error_of(message)
            case wire.Heartbeat():
                self._heartbeat = message if self._waiting else None
            case wire.Draining():
                self._draining = message
                self._departing, self._at_work = True, False
            case wire.TrialStarted():
                self._at_work = not self._departing
            case _:
                raise wire.WireError(f"{type(message).__name__} where Told was due.")

    async def _shake_hands(self, token: str) -> None:
        async def send(message: wire.Wire) -> None:
            if self._error is not None:
                raise self._error
            self.send(message)

        try:
            await handshake.prove(send, self._next_greeting, token=token, purpose=wire.PURPOSE)
        except TimeoutError:
            raise ConnectionLost("The replica has not finished the handshake.") from None
        except wire.WireError as error:
            raise ConnectionLost(f"No replica of ours listens there: {error}") from error
        self._accepted = True
        self._splitter.limit_bytes = wire.MAX_TOLD_BYTES

    def _greet(self, message: wire.Wire) -> None:
        if self._greeting is not None:
            raise wire.WireError("Two messages where one was due in the handshake.")
        self._greeting = message

    async def _next_greeting(self) -> wire.Wire:
        while self._greeting is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        greeting, self._greeting = self._greeting, None
        return greeting

    @staticmethod
    def _lasting(error: Exception) -> Exception | None:
        """An answer that failed leaves a good connection; a lost connection stays lost."""
        return error if isinstance(error, ConnectionLost) else None
