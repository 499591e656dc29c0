"""No test fails because the machine is busy: tests of wait limits, and of the event loops'
clock."""

import ast
import asyncio
import time
import tomllib
from collections.abc import Iterator

import pytest

from tests.checkout import ROOT
from tests.patience import HANG_S, until

TESTS = ROOT / "tests"
# Calls that time out after their first argument, and keywords that state a timeout.
BY_ARGUMENT = {"timeout", "wait", "join", "result", "acquire", "Timeout"}
KEYWORDS = {"timeout", "timeout_s"}
# Shorter times are timeouts under test, or for events that must not happen.
NEAR_S = 0.5


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """The line and the seconds of each call with a literal timeout."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        given = [word.value for word in call.keywords if word.arg in KEYWORDS]
        if getattr(call.func, "attr", None) in BY_ARGUMENT:
            given += call.args[:1]
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield call.lineno, float(value.value)


def test_no_test_times_out_on_a_busy_machine() -> None:
    near = [
        f"{path.relative_to(TESTS)}:{line}: {seconds:g} s"
        for path in sorted(TESTS.rglob("*.py"))
        for line, seconds in limits(ast.parse(path.read_text()))
        if NEAR_S < seconds < HANG_S
    ]
    assert near == []


def test_the_timeout_of_a_test_is_longer_than_its_waits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["pytest"]["ini_options"]["timeout"] > 3 * HANG_S


async def test_time_while_the_process_is_stalled_is_not_counted() -> None:
    """A peer that answers at once does not time out on a busy machine."""
    answered = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        time.sleep(1.0)  # stalls the whole process
        writer.write(b"1")

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with asyncio.timeout(0.5):
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read(1) == b"1"
        answered.set()
    writer.close()
    server.close()
    assert answered.is_set()


async def test_idle_time_is_counted() -> None:
    loop = asyncio.get_running_loop()
    began, began_here = time.monotonic(), loop.time()
    await asyncio.sleep(0.2)
    assert loop.time() - began_here >= 0.2 and time.monotonic() - began >= 0.2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()


async def test_a_condition_that_never_holds_times_out(monkeypatch) -> None:
    monkeypatch.setattr("tests.patience.HANG_S", 0.05)
    with pytest.raises(TimeoutError):
        await until(lambda: False)
