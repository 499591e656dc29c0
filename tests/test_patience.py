"""Tests fail for what is wrong, however busy the machine: the clock of event loops, and limits."""

import ast
import asyncio
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import HANG_S, until

TESTS = Path(__file__).parent
# What gives up after so many seconds: by its first argument, and by a keyword.
BY_ARGUMENT = {"timeout", "wait", "join", "result", "acquire", "Timeout"}
KEYWORDS = {"timeout", "timeout_s"}
# Shorter times are for what shall be given up, or shall not happen; so are settings under test.
NEAR_S = 0.5


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """The line and the seconds of each call that gives up after a number of seconds."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        given = [word.value for word in call.keywords if word.arg in KEYWORDS]
        if getattr(call.func, "attr", None) in BY_ARGUMENT:
            given += call.args[:1]
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield call.lineno, float(value.value)


def test_no_test_gives_up_on_what_a_busy_machine_does_late() -> None:
    near = [
        f"{path.relative_to(TESTS)}:{line}: {seconds:g} s"
        for path in sorted(TESTS.rglob("*.py"))
        for line, seconds in limits(ast.parse(path.read_text()))
        if NEAR_S < seconds < HANG_S
    ]
    assert near == []


def test_a_test_ends_only_long_after_all_that_it_waits_for() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    assert project["tool"]["pytest"]["ini_options"]["timeout"] > 3 * HANG_S


async def test_time_in_which_the_process_stands_still_is_not_counted() -> None:
    """As on a machine that does something else: a peer that answers at once is not silent."""
    answered = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        time.sleep(1.0)  # the whole process stands still
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


async def test_time_in_which_nothing_happens_is_counted() -> None:
    loop = asyncio.get_running_loop()
    began, began_here = time.monotonic(), loop.time()
    await asyncio.sleep(0.2)
    assert loop.time() - began_here >= 0.2 and time.monotonic() - began >= 0.2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()


async def test_what_never_holds_is_told_by_a_timeout(monkeypatch) -> None:
    monkeypatch.setattr("tests.patience.HANG_S", 0.05)
    with pytest.raises(TimeoutError):
        await until(lambda: False)
