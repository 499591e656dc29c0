"""Weights stay in the mapped file, and replicas of a node share its pages."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.make_model import Shape, ensure_model
from tests.mapped_files import maps_of
from tests.unit.bench.test_make_model import few_tokens

# So large that a copy would stand out from the other memory of a process.
SHAPE = Shape(layers=4, hidden=1024, feed_forward=4096, heads=16, kv_heads=4, head_dim=64)
TYPE = "Q8_0"
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
    task = ChatTask("1", "big", TokenIds((0, 1, 2) * 8), SamplingParams(temperature=0.0), 4)
    return sum([len(delta.tokens) async for delta in replica.generate(task)])

library()
before = anonymous_bytes()
replica = load_replica(
    ModelSettings(
        name="big", source=sys.argv[1], device="cpu", threads=1, context_tokens=64,
        max_sequences=2, step_tokens=16,
    )
)
tokens = asyncio.run(answer(replica))
print(json.dumps({"tokens": tokens, "grown": anonymous_bytes() - before}), flush=True)
sys.stdin.read()
replica.close()
"""


@contextmanager
def serving(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose replica answers once, reports its memory growth, and keeps running."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("models"), TYPE, few_tokens(), SHAPE)


def test_replicas_of_a_node_share_the_pages_of_the_file_and_copy_nothing(big):
    size = big.stat().st_size
    assert size > 50_000_000
    with ExitStack() as stack:
        processes = [stack.enter_context(serving(big)) for _ in range(2)]
        reports = [json.loads(process.stdout.readline()) for process in processes]
        for process, report in zip(processes, reports, strict=True):
            assert report["tokens"] == 4
            assert report["grown"] < size / 4
            [(permissions, counted)] = maps_of(process.pid, big)
            assert permissions == "r--s"
            assert counted["Rss"] > 0.95 * size
            assert counted["Anonymous"] == counted["Private_Dirty"] == counted["Swap"] == 0
            # Each of two processes counts half of a shared page.
            assert counted["Pss"] < 0.6 * size
