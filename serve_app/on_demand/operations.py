"""Work that takes its time, such as pulls: who asks hears how far it is; unasked for, it ends."""

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from model_zoo.sources.pull import Progress, PullProgress
from runtime.errors import CaravanError, ModelNotFoundError, OverloadedError
from serve_app.logs import get_logger
from serve_app.on_demand.commands import Account

MOST_AT_ONCE = 8
LEASE_S = 15.0

log = get_logger()


class Operations:
    """Each runs in a thread. A job whose progress is not requested for `lease_s` is cancelled;
    `clock` gives the seconds."""

    def __init__(
        self,
        *,
        lease_s: float = LEASE_S,
        most_at_once: int = MOST_AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s, self._clock = lease_s, clock
        self._most_at_once = most_at_once
        self._threads = ThreadPoolExecutor(most_at_once, "job")
        self._operations: dict[str, _Operation] = {}
        self._lock = threading.Lock()

    def begin(self, key: str, work: Callable[[Progress], None]) -> str:
        """The job's id: that of one at work on the same `key`, where there is one.

        OverloadedError when too many are at work.
        """
        with self._lock:
            self._forget_old()
            running = {
                id: operation for id, operation in self._operations.items() if not operation.done
            }
            for id, operation in running.items():
                if operation.key == key:
                    operation.asked_at = self._clock()
                    return id
            if len(running) >= self._most_at_once:
                raise OverloadedError(
                    f"{len(running)} pulls and the like are at work already; try again later"
                )
            id, operation = uuid.uuid4().hex, _Operation(key, self._lease_s, self._clock)
            self._operations[id] = operation
            operation.future = self._threads.submit(operation.run, work)
            return id

    def follow(self, id: str, after: int) -> Account:
        """Its steps from number `after` on, and the one before, which may have changed.

        Raises what the work has raised. ModelNotFoundError: nobody has followed it for too long.
        """
        operation = self._operations.get(id)
        if operation is None:
            raise ModelNotFoundError(f"job {id[:40]} is not known here")
        return operation.account(after)

    def close(self) -> None:
        """What is at work ends at its next step."""
        with self._lock:
            for operation in self._operations.values():
                operation.lease_s = float("-inf")
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget_old(self) -> None:
        old = [
            id
            for id, operation in self._operations.items()
            if operation.done and operation.abandoned
        ]
        for id in old:
            del self._operations[id]


class _Abandoned(Exception):
    """Nobody waits for the job any more."""


class _Operation:
    def __init__(self, key: str, lease_s: float, clock: Callable[[], float]) -> None:
        self.key = key
        self.lease_s = lease_s
        self.asked_at = clock()
        self.future: Future[None] | None = None
        self._clock = clock
        self._steps: list[PullProgress] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def abandoned(self) -> bool:
        return self._clock() - self.asked_at > self.lease_s

    def run(self, work: Callable[[Progress], None]) -> None:
        try:
            work(self._note)
        except _Abandoned:
            log.info("given up, as nobody waits", operation=self.key)
            raise OverloadedError("it was given up, as nobody asked how it goes") from None
        except CaravanError:
            raise
        except Exception as error:
            log.error("a job failed", operation=self.key, reason=repr(error))
            raise

    def account(self, after: int) -> Account:
        self.asked_at = self._clock()
        done = self.done
        with self._lock:
            first = max(0, min(after, len(self._steps)) - 1)
            told = tuple(self._steps[first:])
        if done and self.future is not None:
            self.future.result()
        return Account(told, first, done)

    def _note(self, step: PullProgress) -> None:
        """Steps of the same kind are one, so that there are few of them."""
        if self.abandoned:
            raise _Abandoned
        with self._lock:
            last = self._steps[-1] if self._steps else None
            if last is not None and (last.status, last.digest) == (step.status, step.digest):
                self._steps[-1] = step
            else:
                self._steps.append(step)
