"""The locks of a store: files of which each is locked by one process at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from model_zoo.store.file_access import file_errors
from runtime.errors import StoreError

POLL_S = 0.5
_SUFFIX = ".lock"


class StoreLocks:
    """Locks by name in `folder`, which is created with the first lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def held(self, name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Waits for the lock; calls `waiting` at intervals if another process holds it. StoreError
        if the file system has no locks."""
        lock = self._lock(name)
        while not lock.is_locked:
            if not self._acquired(lock, POLL_S):
                waiting()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def held_at_once(self, name: str) -> Iterator[bool]:
        """False, without the lock, if another process holds it. StoreError as of `held`."""
        lock = self._lock(name)
        acquired = self._acquired(lock, 0)
        try:
            yield acquired
        finally:
            if acquired:
                lock.release()

    def remove(self, prefix: str, unneeded: Callable[[str], bool]) -> None:
        """Removes the locks whose names begin with `prefix` and are `unneeded`, unless they are
        held.

        A lock is removed by its holder only. A process that opened the file before that gets the
        lock of a file without a name; FileLock notices it and opens the path again.
        """
        for path in self.folder.glob(f"{prefix}*{_SUFFIX}"):
            if unneeded(path.stem):
                with self.held_at_once(path.stem) as held:
                    if held:
                        path.unlink(missing_ok=True)

    def _lock(self, name: str) -> FileLock:
        with file_errors("create", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        # A lock by existence instead would outlive a killed process.
        return FileLock(self.folder / f"{name}{_SUFFIX}", fallback_to_soft=False)

    def _acquired(self, lock: FileLock, timeout_s: float) -> bool:
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            return False
        except OSError as error:
            raise StoreError(
                f"{lock.lock_file}: cannot be locked ({error}); the store, CARAVAN_MODELS, must be "
                "on a file system that is writable and supports locks."
            ) from error
        return True
