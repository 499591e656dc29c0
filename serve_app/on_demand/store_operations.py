"""Long operations on a store, such as pulls: clients join them and poll their progress."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from model_zoo.sources.pull import Progress, PullProgress
from runtime.errors import CaravanError, ModelNotFoundError, OverloadedError
from serve_app.logs import get_logger, without_texts
from serve_app.on_demand.report import OperationProgress

MAX_RUNNING = 8
LEASE_S = 15.0

log = get_logger()


class Operations:
    """Runs each operation in a thread.

    An operation whose progress is not polled for `lease_s` seconds is cancelled. A lease, rather
    than a cancellation message, also covers clients whose ingress died. `clock` returns seconds.
    """

    def __init__(
        self,
        *,
        lease_s: float = LEASE_S,
        max_running: int = MAX_RUNNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s, self._clock = lease_s, clock
        self._max_running = max_running
        self._threads = ThreadPoolExecutor(max_running, "operation")
        self._operations: dict[str, _Operation] = {}  # by the ids of the clients that follow them
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        """The number of operations that have not ended."""
        with self._lock:
            return len({each for each in self._operations.values() if not each.done})

    def begin(
        self, id: str, name: str, work: Callable[[Progress], None], *, variant: str = ""
    ) -> None:
        """Starts `work`, or joins the running operation with the same `name` and `variant`, under
        the client's `id`. Logs have the name, which must not contain texts of users.
        OverloadedError when `max_running` operations are running."""
        key = (name, variant)
        with self._lock:
            self._remove_expired()
            running = {each for each in self._operations.values() if not each.done}
            operation = next((each for each in running if each.key == key and each.join()), None)
            if operation is None:
                if len(running) >= self._max_running:
                    raise OverloadedError(
                        f"{len(running)} pulls, pushes and creations are already running, which is "
                        "the limit; try again later"
                    )
                operation = _Operation(key, self._lease_s, self._clock)
                operation.future = self._threads.submit(operation.run, work)
            self._operations[id] = operation

    def follow(self, id: str, after: int) -> OperationProgress:
        """The steps from number `after` on. Renews the operation's lease.

        Raises the operation's error if it failed, ModelNotFoundError for an unknown or expired id.
        """
        operation = self._operations.get(id)
        if operation is None:
            raise ModelNotFoundError(f"operation {id[:40]} is unknown or has expired")
        return operation.progress(after)

    def close(self) -> None:
        """Cancels every operation at its next progress report."""
        with self._lock:
            for operation in self._operations.values():
                operation.lease_s = float("-inf")
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _remove_expired(self) -> None:
        live = {id: each for id, each in self._operations.items() if not each.done or each.leased}
        self._operations = live


class _Cancelled(Exception):
    """The operation's lease has expired."""


class _Operation:
    def __init__(self, key: tuple[str, str], lease_s: float, clock: Callable[[], float]) -> None:
        self.key = key
        self.lease_s = lease_s
        self.future: Future[None] | None = None
        self._clock = clock
        self._renewed_at = clock()
        self._steps: list[PullProgress] = []
        self._cancelled = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def leased(self) -> bool:
        return self._clock() - self._renewed_at <= self.lease_s

    def join(self) -> bool:
        """Renews the lease for a further client; False if the operation is being cancelled."""
        with self._lock:
            self._renewed_at = self._clock()
            return not self._cancelled

    def run(self, work: Callable[[Progress], None]) -> None:
        try:
            work(self._add)
        except _Cancelled:
            log.info("operation cancelled: no client is left", operation=self.key[0])
            raise OverloadedError("cancelled, because no client polled its progress") from None
        except CaravanError:
            raise
        except Exception as error:
            log.error("operation failed", operation=self.key[0], **without_texts(error))
            raise

    def progress(self, after: int) -> OperationProgress:
        self._renewed_at = self._clock()
        done = self.done  # read first; otherwise steps added in between would be missed
        with self._lock:
            steps, count = tuple(self._steps[after:]), len(self._steps)
        if done and self.future is not None:
            self.future.result()
        return OperationProgress(steps, count, done)

    def _add(self, step: PullProgress) -> None:
        """Replaces the last step if it has the same status and digest, to keep the list short."""
        with self._lock:
            if not self.leased:
                self._cancelled = True
            if self._cancelled:
                raise _Cancelled
            last = self._steps[-1] if self._steps else None
            if last is not None and (last.status, last.digest) == (step.status, step.digest):
                self._steps[-1] = step
            else:
                self._steps.append(step)
