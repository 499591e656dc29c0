"""Settings of every test: one thread per parallel region, the patient event loop, leak checks."""

import gc
import logging
import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.leak_checks import LeakChecks
from tests.patience import PatientLoop
from tests.skips import skip_lines

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the machine may be shared
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
# Neither an example nor the making of examples may fail for being slow.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile("thorough", settings.get_profile("patient"), max_examples=10_000)
settings.load_profile("patient")


_leak_checks = LeakChecks()
_passed = pytest.StashKey[bool]()


def pytest_asyncio_loop_factories() -> dict[str, type[PatientLoop]]:
    return {"patient": PatientLoop}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _leak_checks.watch_engines()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    found = yield
    item.stash[_passed] = True
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Checks for leaks once the test's fixtures have ended."""
    found = yield
    if item.stash.get(_passed, False):
        mark = item.get_closest_marker("unfinished")
        assert mark is None or mark.args, "the reason is missing"
        _leak_checks.check(unfinished=mark is not None)
    else:
        _leak_checks.forget()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """No garbage is collected until all tests are imported, nor ever among what that leaves: each
    time would take a second, such as whenever a test unloads a model. Then it is collected seldom,
    since collections took 3 % of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 20)
        gc.enable()
        _let_all_loggers_propagate()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in skip_lines(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)


def _let_all_loggers_propagate() -> None:
    """pytest adds its handlers to loggers that do not, six times a test: torch has sixty of them,
    which would take as long as most tests. The handlers get the same records from the root."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
