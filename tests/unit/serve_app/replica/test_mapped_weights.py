"""Weights stay in the mapped file, and replicas of a node share its pages."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.make_model import Shape, ensure_model
from runtime.engine.request import SamplingParams
from serve_app.messages.tasks import ChatTask, TokenIds
from tests.mapped_files import maps_of
from tests.patience import HANG_S
from tests.unit.bench.test_make_model import few_tokens
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.loaded_replicas import loaded

# So large that a copy would stand out from the other memory of a process.
SHAPE = Shape(layers=4, hidden=1024, feed_forward=4096, heads=16, kv_heads=4, head_dim=64)
TYPE = "Q8_0"
TASK = ChatTask("1", "demo", TokenIds((0, 1, 2) * 8), SamplingParams(temperature=0.0), 4)
SERVE = """
import asyncio, json, re, sys
from pathlib import Path
from runtime.kernels.native import library
from runtime.engine.request import SamplingParams
from serve_app.replica.loading import load_replica
from serve_app.config.settings import ModelSettings
from serve_app.messages.tasks import ChatTask, TokenIds

def anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

async def answer(replica):
    task = ChatTask("1", "demo", TokenIds((0, 1, 2) * 8), SamplingParams(temperature=0.0), 4)
    return sum([len(delta.tokens) async for delta in replica.generate(task)])

library()
before = anonymous_bytes()
replica = load_replica(
    ModelSettings(
        name="demo", source=sys.argv[1], device="cpu", threads=1, context_tokens=64,
        max_sequences=2, step_tokens=16,
    )
)
tokens = asyncio.run(answer(replica))
print(json.dumps({"tokens": tokens, "grown": anonymous_bytes() - before}), flush=True)
sys.stdin.read()
asyncio.run(answer(replica))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("models"), TYPE, few_tokens(), SHAPE)


@pytest.fixture(scope="module")
def reported(big) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A process with a replica that has answered once, and answers again when its standard input
    ends, and its report of the first answer."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVE, str(big)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate(timeout=HANG_S)[1]
            yield process, json.loads(line)
        finally:
            process.kill()


async def test_replicas_of_a_node_share_the_pages_of_the_file_and_copy_nothing(big, reported):
    process, report = reported
    size = big.stat().st_size
    assert size > 50_000_000
    assert report["tokens"] == 4
    assert report["grown"] < size / 4
    with loaded(big, step_tokens=16) as replica:
        assert len((await answer_of(replica, TASK)).tokens) == 4
        for pid in (process.pid, os.getpid()):
            [(permissions, counted)] = maps_of(pid, big)
            assert permissions == "r--s"
            assert counted["Rss"] > 0.95 * size
            assert counted["Anonymous"] == counted["Private_Dirty"] == counted["Swap"] == 0
            # Each of two processes counts half of a shared page.
            assert counted["Pss"] < 0.6 * size


def test_a_bus_error_of_a_truncated_file_is_explained_on_standard_error(big, reported):
    """It ends the process, so no other test follows."""
    process, _ = reported
    os.truncate(big, 0)
    _, told = process.communicate(timeout=HANG_S)
    assert process.returncode == -signal.SIGBUS
    assert f"bus error in {big}: a file that is served was shortened in place" in told
