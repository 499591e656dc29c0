"""A caller's kernel detects a lost host, and distinguishes it from a process that is only busy."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import pytest

from runtime.engine.request import SamplingParams
from serve_app.messages.tasks import ChatDelta, ChatTask, RawText
from serve_app.transport.client import StreamClient
from serve_app.transport.connection import HOST_LOST
from serve_app.transport.wire import Address, ConnectionLost
from tests.checkout import ROOT
from tests.hosts.hosts import hosts, possible
from tests.patience import HANG_S

pytestmark = pytest.mark.skipif(
    not possible(), reason="hosts cannot be made here: no root, or no `ip`"
)
TASK = ChatTask("t1", "demo", RawText("hi"), SamplingParams())
# Answers with one token and then with heartbeats only; says first where.
REPLICA = """
import asyncio, sys
from serve_app.messages.tasks import ChatDelta
from serve_app.transport.generation import generation_server

async def generate(task):
    yield ChatDelta("a", (0,))
    await asyncio.Event().wait()

async def main():
    address = await generation_server(generate).start(sys.argv[1])
    print(address.port, address.token, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def started(host: str, *prefix: str) -> tuple[subprocess.Popen[str], Address]:
    command = [*prefix, sys.executable, "-c", REPLICA, host]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port, token = process.stdout.readline().split()
    return process, Address(host, int(port), token, replica="a")


async def test_a_stream_from_a_lost_host_ends_without_its_silence_limit():
    with hosts(1, {}) as (host,):
        process, address = started(host.address, "ip", "netns", "exec", host.name)
        try:
            async with aclosing(StreamClient(silence_s=HANG_S).generate(address, TASK)) as parts:
                assert isinstance(await anext(parts), ChatDelta)
                host.pull_cable()
                with pytest.raises(ConnectionLost, match=HOST_LOST):
                    await anext(parts)
        finally:
            process.kill()
            process.wait()


async def test_a_process_that_does_nothing_is_not_taken_for_a_lost_host():
    """Until `silence_s`: its kernel answers."""
    process, address = started("127.0.0.1")
    try:
        async with aclosing(StreamClient(silence_s=4.0).generate(address, TASK)) as parts:
            assert isinstance(await anext(parts), ChatDelta)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(ConnectionLost, match="silent for 4 seconds"):
                async with asyncio.timeout(HANG_S):
                    await anext(parts)
    finally:
        process.kill()
        process.wait()
