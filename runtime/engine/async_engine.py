"""The asyncio interface of the engine, whose loop runs on a thread."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from runtime.engine.engine import Engine, engine_dead
from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.request import Delta, FinishReason, GenerationRequest
from runtime.engine.request_limits import admissible, check_capacity
from runtime.engine.tracing import Deliver
from runtime.errors import CaravanError, EngineDeadError, ReplicaLostError

logger = logging.getLogger(__name__)

STATISTICS_NS = 100_000_000  # between snapshots of a busy engine: they cost time per sequence


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    deliver: Deliver
    arrived: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class Peers(Protocol):
    """Other processes that the engine depends on, such as ranks.

    `watch` is called, on any thread, when one fails; `check` then raises the reason. `close` ends
    them and may be called twice.
    """

    watch: Callable[[], None]

    def check(self) -> None: ...

    def close(self) -> None: ...


class AsyncEngine:
    """Runs an engine on its own thread. Any number of event loops may stream from it.

    `stall_s`: `check` fails if the engine has work but has finished no step, or encoded no part of
    an image, for this long by `clock`, which must be the clock of the engine's features. `peers`:
    closed with the engine; the engine fails if one of them does. The loop computes with as many
    threads as torch uses where the engine is created.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stall_s: float = 300.0,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self.limits = engine, engine.limits
        self._peers = peers
        self._stall_s, self._clock = stall_s, clock
        self._changed = threading.Condition()
        self._inbox: list[_Submit | _Abort] = []
        self._taken: deque[_Submit | _Abort] = deque()  # from the inbox, by the thread
        self._open_streams: Counter[str] = Counter()  # per tenant
        self._closing = False
        self._woken = False
        self._death: str | None = None
        self._busy_since: float | None = None  # start of the current step; None while idle
        self._snapshot, self._counted_ns, self._counted = engine.statistics(), 0, 0
        self._outboxes: dict[asyncio.AbstractEventLoop, _Outbox] = {}
        self._compute_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._features = engine.features
        if self._features is not None:
            self._features.wake = self._wake
        if peers is not None:
            peers.watch = self._wake

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the loop after its current step; unfinished requests end with FAILED.

        Waits for the images that are being encoded.
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
        """EngineDeadError: the loop has ended or makes no progress."""
        if self._death is not None:
            raise engine_dead(self._death)
        if self._peers is not None:
            self._peers.check()
        if not self._thread.is_alive():
            raise EngineDeadError("The engine is not running.")
        stalled = self._clock() - self._stall_s
        busy_since = self._busy_since
        if busy_since is not None and busy_since < stalled:
            raise engine_dead(f"no step has finished for {self._stall_s:.0f} seconds.")
        encoding_since = self._features.waiting_since if self._features else None
        if encoding_since is not None and encoding_since < stalled:
            raise engine_dead(f"no part of an image was encoded for {self._stall_s:.0f} seconds.")

    def statistics(self) -> EngineStatistics:
        """As of the end of a step: the last one with which the number of requests changed, or a
        later one that is at most `STATISTICS_NS` old."""
        return self._snapshot

    def check_room(self, tenant: str) -> None:
        """Raises OverloadedError or EngineDeadError if a request of the tenant would be refused
        now, so that no prompt need be prepared for it."""
        with self._changed:
            self.check()
            check_capacity(
                self.limits, live=self._open_streams.total(), own=self._open_streams[tenant]
            )

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Deltas of one request; the last has `finish`. Leaving for any reason aborts it.

        Output since the last read is merged into one delta. Raises RequestError, OverloadedError or
        EngineDeadError before the first one.
        """
        pending = _PendingDelta()
        outbox = self._outbox_of(asyncio.get_running_loop())
        self._submit(request, partial(outbox.put, pending))
        ended = False
        try:
            while not ended:
                delta = await pending.take()
                ended = delta.finish is not None
                yield delta
        finally:
            self._leave(request, ended=ended)

    def _outbox_of(self, loop: asyncio.AbstractEventLoop) -> "_Outbox":
        with self._changed:
            if loop not in self._outboxes:
                opened = {k: v for k, v in self._outboxes.items() if not k.is_closed()}
                self._outboxes = {**opened, loop: _Outbox(loop)}
            return self._outboxes[loop]

    def _submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        with self._changed:
            self.check()
            if self._closing:
                raise EngineDeadError("The engine is closing.")
            request = admissible(
                request,
                self.limits,
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
        torch.set_num_threads(self._compute_threads)
        try:
            while self._take_commands():
                if self._peers is not None:
                    self._peers.check()
                self._busy_since = self._clock()
                busy = self._engine.step()
                self._send()
                self._count(busy=busy)
                self._busy_since = self._clock() if busy else None
                if not busy:
                    self._sleep()
            self._count(busy=False)
            self._die("it was closed.")
        except Exception as error:
            logger.exception("the engine loop failed")
            self._die(f"{type(error).__name__}: {error}")

    def _send(self) -> None:
        """Send the output of a step to the event loops that read it."""
        for outbox in self._outboxes.values():
            outbox.send()

    def _count(self, *, busy: bool) -> None:
        """Take a snapshot, unless the last one was of a busy engine with as many requests, and is
        new."""
        now, unfinished = time.monotonic_ns(), self._engine.unfinished
        due = now - self._counted_ns >= STATISTICS_NS or unfinished != self._counted
        if due or not busy:
            self._snapshot, self._counted = self._engine.statistics(), unfinished
            self._counted_ns = now if busy else 0

    def _take_commands(self) -> bool:
        with self._changed:
            self._taken.extend(self._inbox)
            self._inbox.clear()
            closing, self._woken = self._closing, False
        while self._taken:
            match self._taken[0]:
                case _Submit(request, deliver, arrived):
                    self._engine.add(request, deliver, arrived=arrived)
                case _Abort(request_id):
                    self._engine.abort(request_id)
            self._taken.popleft()
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
        """Fail all live and queued requests; none can be queued afterwards."""
        with self._changed:
            self._death = reason
            unhandled = [*self._taken, *self._inbox]
            self._taken.clear()
            self._inbox.clear()
        error = str(engine_dead(reason))
        for command in unhandled:
            if isinstance(command, _Submit):
                command.deliver(Delta(finish=FinishReason.FAILED, error=error))
        self._engine.fail(error)
        self._send()
        self._busy_since = None
        if self._peers is not None:
            self._peers.close()


def failure(engine: AsyncEngine, delta: Delta) -> CaravanError:
    """The error of a delta with FAILED: only that request has failed or cannot be satisfied, or the
    whole engine has failed."""
    try:
        engine.check()
    except EngineDeadError as dead:
        return ReplicaLostError(str(dead))
    return delta.error_class(delta.error or "The model could not continue.")


class _Outbox:
    """Output for the streams of one event loop. A step sends all of it by one call to the loop,
    which costs a system call, or by none if the loop has not run since the last one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._put: list[tuple[_PendingDelta, Delta]] = []
        self._sent: list[tuple[_PendingDelta, Delta]] = []

    def put(self, pending: "_PendingDelta", delta: Delta) -> None:
        """Called on the engine's thread, like `send`."""
        self._put.append((pending, delta))

    def send(self) -> None:
        """Dropped if the event loop is closed."""
        if not self._put:
            return
        with self._lock:
            first = not self._sent or self._loop.is_closed()
            self._sent += self._put
        self._put.clear()
        if first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                self._sent = []

    def _deliver(self) -> None:
        with self._lock:
            sent, self._sent = self._sent, []
        for pending, delta in sent:
            pending.put(delta)


class _PendingDelta:
    """Output of one request that its reader has not taken yet, merged into one delta."""

    def __init__(self) -> None:
        self._delta: Delta | None = None
        self._filled = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._delta = delta if self._delta is None else self._delta.merged(delta)
        self._filled.set()

    async def take(self) -> Delta:
        await self._filled.wait()
        self._filled.clear()
        delta, self._delta = self._delta, None
        assert delta is not None
        return delta
