"""At the end of each test: engines have ended all requests, and no page or slot is lost.

All schedulers, cache managers and draft models of the test's process are checked, those that live
longer after each test. What a test of a scheduler or of a cache manager alone leaves unfinished is
ended first; engines must have ended it themselves, unless the test is marked with `unfinished` and
a reason.
"""

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from runtime.engine.drafter import Drafter
from runtime.engine.scheduler import Scheduler
from runtime.kv.cache_manager import KVCacheManager
from tests.patience import wait_until

# Not imported here, since they import torch, which not all tests do.
_ENGINES = {"runtime.engine.engine": "Engine", "runtime.engine.async_engine": "AsyncEngine"}
_MANY = 100  # objects left by tests


class LeakChecks:
    """Records what is built; `check` is to be called at the end of each test."""

    def __init__(self) -> None:
        self._new: list[Scheduler | KVCacheManager | Drafter] = []  # in this test
        self._old: WeakSet[Scheduler | KVCacheManager | Drafter] = WeakSet()
        self._engines: WeakSet[Any] = WeakSet()
        self._driven: WeakSet[Scheduler] = WeakSet()  # by an engine
        self._watched: set[str] = set()
        self._many = _MANY  # old objects, after which garbage is collected
        for kind in (Scheduler, KVCacheManager, Drafter):
            _record(kind, self._new.append)

    def watch_engines(self) -> None:
        """Record engines, too, from when their modules are imported."""
        for module, name in _ENGINES.items():
            if module in sys.modules and module not in self._watched:
                self._watched.add(module)
                _record(getattr(sys.modules[module], name), self._add_engine)

    def _add_engine(self, engine: Any) -> None:
        if hasattr(engine, "_scheduler"):
            self._driven.add(engine._scheduler)
        else:
            self._engines.add(engine)

    def forget(self) -> None:
        """After a test that has failed."""
        self._new.clear()
        self._old, self._engines = WeakSet(), WeakSet()

    def check(self, *, unfinished: bool) -> None:
        """AssertionError if something has leaked. `unfinished`: engines may have requests."""
        made, engines = [*self._new, *self._old], list(self._engines)
        self.forget()  # a leak is reported once
        if not unfinished:
            for engine in engines:
                wait_until(lambda engine=engine: _is_idle(engine))
        used = set[KVCacheManager]()
        for scheduler in (each for each in made if isinstance(each, Scheduler)):
            driven = scheduler in self._driven and not unfinished
            _check_scheduler(scheduler, driven=driven)
            used.add(scheduler.cache_manager)
        for drafter in (each for each in made if isinstance(each, Drafter)):
            drafter.keep([])  # as before the next step
            drafter.cache_manager.check_idle()
            used.add(drafter.cache_manager)
        for manager in (each for each in made if isinstance(each, KVCacheManager)):
            if manager not in used:
                _check_manager(manager)
        self._old.update(made)
        self._engines.update(engines)
        del made, engines
        self._collect()

    def _collect(self) -> None:
        """Garbage is collected seldom (conftest.py), and would be checked after each test."""
        if len(self._old) > self._many:
            gc.collect()
            self._many = len(self._old) + _MANY


def _is_idle(engine: Any) -> bool:
    """Whether the thread of an engine has nothing to do, or has ended."""
    scheduler = engine._engine._scheduler
    busy = engine._inbox or engine._busy_since is not None
    return not (engine._thread.is_alive() and (busy or scheduler.running or scheduler.waiting))


def _check_scheduler(scheduler: Scheduler, *, driven: bool) -> None:
    left = [*scheduler.running, *scheduler.waiting]
    names = [sequence.request.id for sequence in left]
    assert not (names and driven), f"the engine has not ended these requests: {names}"
    for sequence in left:
        scheduler.finish(sequence)
    scheduler.check_idle()


def _check_manager(manager: KVCacheManager) -> None:
    owners = [*manager._reserved, *(owner for group in manager._groups for owner in group.held)]
    if manager.checkpoints is not None:
        owners += manager.checkpoints._records
    for owner in owners:
        manager.release(owner)
    manager.check_idle()


def _record(kind: type, record: Callable[[Any], None]) -> None:
    """Call `record` with all objects of a class that are made from now on."""
    init = kind.__init__

    @functools.wraps(init)
    def recording(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        record(self)

    kind.__init__ = recording
