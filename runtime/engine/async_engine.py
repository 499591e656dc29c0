"""The engine seen from asyncio: a thread runs the loop, requests and deltas cross over."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from runtime.engine.engine import Deliver, Engine, EngineLimits, EngineStatistics, admissible, dead
from runtime.engine.request import Delta, GenerationRequest
from runtime.errors import (
    CaravanError,
    EngineDeadError,
    GenerationFailedError,
    ReplicaLostError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    deliver: Deliver
    arrived: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class Peers(Protocol):
    """Other processes that the engine needs: `check` raises what has become of one, and `watch`
    hears of it on any thread. They end when they are closed, which may happen twice."""

    watch: Callable[[], None]

    def check(self) -> None: ...

    def close(self) -> None: ...


class AsyncEngine:
    """Runs an engine on a thread of its own. Any number of event loops may stream from it.

    `stall_s`: with work at hand and no step finished, or no image encoded, for so long, `check`
    calls the engine dead, by the `clock`, which is that of the engine's features too. `peers`: with
    them it lives and dies.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stall_s: float = 300.0,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._stall_s, self._clock = stall_s, clock
        self._changed = threading.Condition()
        self._inbox: list[_Submit | _Abort] = []
        self._open_streams: Counter[str] = Counter()  # of each tenant
        self._closing = False
        self._woken = False
        self._death: str | None = None
        self._busy_since: float | None = None  # when it last got on, while busy
        self._snapshot = engine.statistics()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._features = engine.features
        if self._features is not None:
            self._features.wake = self._wake
        if peers is not None:
            peers.watch = self._wake

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the loop after its current step; requests still live end with FAILED.

        Images that are being encoded are waited for.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._features is not None:
            self._features.close()
        if self._peers is not None:
            self._peers.close()

    def check(self) -> None:
        """Raise EngineDeadError unless the loop lives and makes progress."""
        if self._death is not None:
            raise dead(self._death)
        if self._peers is not None:
            self._peers.check()
        if not self._thread.is_alive():
            raise EngineDeadError("The engine is not running.")
        stalled = self._clock() - self._stall_s
        busy_since = self._busy_since
        if busy_since is not None and busy_since < stalled:
            raise dead(f"no step has finished for {self._stall_s:.0f} seconds.")
        encoding_since = self._features.waiting_since if self._features else None
        if encoding_since is not None and encoding_since < stalled:
            raise dead(f"no image has been encoded for {self._stall_s:.0f} seconds.")

    def statistics(self) -> EngineStatistics:
        return self._snapshot

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of one request; the last has `finish`. Leaving for any reason aborts it.

        Whatever was produced since the last read comes as one delta. Raises RequestError,
        OverloadedError or EngineDeadError before the first one.
        """
        mailbox = _Mailbox(asyncio.get_running_loop())
        self._submit(request, mailbox.put)
        ended = False
        try:
            while not ended:
                delta = await mailbox.take()
                ended = delta.finish is not None
                yield delta
        finally:
            self._leave(request, ended=ended)

    def _submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        with self._changed:
            self.check()
            if self._closing:
                raise EngineDeadError("The engine is closing.")
            request = admissible(
                request,
                self._engine.limits,
                live=self._open_streams.total(),
                own=self._open_streams[request.tenant],
            )
            self._open_streams[request.tenant] += 1
            self._inbox.append(_Submit(request, deliver, time.monotonic_ns()))
            self._changed.notify()

    def _leave(self, request: GenerationRequest, *, ended: bool) -> None:
        with self._changed:
            self._open_streams[request.tenant] -= 1
            if not self._open_streams[request.tenant]:
                del self._open_streams[request.tenant]
            if not ended:
                self._inbox.append(_Abort(request.id))
                self._changed.notify()

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._peers is not None:
                    self._peers.check()
                self._busy_since = self._clock()
                busy = self._engine.step()
                self._snapshot = self._engine.statistics()
                self._busy_since = self._clock() if busy else None
                if not busy:
                    self._sleep()
            self._die("it was closed.")
        except Exception as error:
            logger.exception("the engine loop failed")
            self._die(f"{type(error).__name__}: {error}")

    def _take_commands(self) -> bool:
        with self._changed:
            commands, self._inbox = self._inbox, []
            closing, self._woken = self._closing, False
        for command in commands:
            match command:
                case _Submit(request, deliver, arrived):
                    self._engine.add(request, deliver, arrived=arrived)
                case _Abort(request_id):
                    self._engine.abort(request_id)
        return not closing

    def _sleep(self) -> None:
        with self._changed:
            while not self._inbox and not self._closing and not self._woken:
                self._changed.wait()

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _die(self, reason: str) -> None:
        """End everything that is live or queued; nothing can be queued afterwards."""
        with self._changed:
            self._death = reason
            commands, self._inbox = self._inbox, []
        for command in commands:
            if isinstance(command, _Submit):
                self._engine.add(command.request, command.deliver, arrived=command.arrived)
        self._engine.fail(str(dead(reason)))
        self._busy_since = None
        if self._peers is not None:
            self._peers.close()


def failure(engine: AsyncEngine, delta: Delta) -> CaravanError:
    """What a delta with FAILED means: that request alone has failed, or the engine under it."""
    try:
        engine.check()
    except EngineDeadError as dead:
        return ReplicaLostError(str(dead))
    return GenerationFailedError(delta.error or "The model could not go on.")


class _Mailbox:
    """One reader's deltas, merged while it is not looking."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._delta: Delta | None = None
        self._filled = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """From the engine's thread. A reader whose event loop is gone hears nothing."""
        with self._lock:
            wake = self._delta is None
            self._delta = delta if self._delta is None else self._delta.merged(delta)
        if wake:
            with contextlib.suppress(RuntimeError):  # the loop is closed, maybe just now
                self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> Delta:
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            delta, self._delta = self._delta, None
        assert delta is not None
        return delta
