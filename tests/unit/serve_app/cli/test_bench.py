"""`caravan bench` against the whole ingress with a fake model."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from xml.etree import ElementTree

import pytest

from runtime.errors import GenerationFailedError
from serve_app.messages.tasks import ChatDelta, ChatTask
from tests.patience import settled
from tests.unit.serve_app.cli.cli_runs import CARAVAN, run
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening


class InParts(PretendReplica):
    """Each part of its answers is sent before there is another, with which it would be merged."""

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        async for delta in super().generate(task):
            yield delta
            await settled()


class FourthWaits(PretendReplica):
    """Its fourth answer does not end."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def generate(self, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        if len(self.tasks) == 3:
            self.waits.clear()
            self.reached.set()
        async for delta in super().generate(task):
            yield delta


async def bench(replica, *arguments, **options):
    async with ingress(replica) as app, listening(app) as port:
        host = f"http://127.0.0.1:{port}"
        return await asyncio.to_thread(run, "bench", "--host", host, "demo", *arguments, **options)


async def test_a_server_is_measured(tmp_path):
    replica = InParts()
    samples, plot = tmp_path / "samples.json", tmp_path / "plot.svg"
    result = await bench(
        replica, "--requests", 6, "--warm-up", 3, "--answer-tokens", "5-9", "--prompt-words", 2,
        "--ignore-eos", "--rate", 1000, "--json", samples, "--plot", plot,
    )  # fmt: skip
    assert len(replica.tasks) == 9
    assert {task.max_tokens for task in replica.tasks} <= set(range(5, 10))
    assert "6 complete of 6" in result.stdout and "█" in result.stdout
    for name in ("first token", "between parts", "per token", "latency"):
        assert any(line.startswith(name) for line in result.stdout.splitlines())
    document = json.loads(samples.read_text())
    assert document["options"]["answer_tokens"] == [5, 9] and document["summary"]["complete"] == 6
    assert [sample["answer_tokens"] for sample in document["samples"]] == [3] * 6
    assert f"seed      {document['options']['seed']}\n" in result.stdout
    assert "were due" in result.stdout and "late start" in document["summary"]["spreads"]
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def prompts(replica: PretendReplica) -> list[str]:
    return [task.prompt.messages[0].content for task in replica.tasks]


async def test_prompts_are_new_each_time():
    """Or the server's prefix cache would have them."""
    replica = InParts()
    for _ in range(2):
        await bench(replica, "--requests", 2, "--warm-up", 0)
    assert len(set(prompts(replica))) == 4


async def test_files_that_cannot_be_written_are_reported_before_the_test(tmp_path):
    samples, kept = tmp_path / "samples.json", tmp_path / "kept.svg"
    kept.write_text("before")
    for files in (
        ("--json", samples, "--plot", tmp_path / "none" / "plot.svg"),
        ("--plot", kept, "--json", kept / "below.json"),
    ):
        replica = PretendReplica()
        result = await bench(replica, *files, "--requests", 1, status=1)
        assert str(files[-1]) in result.stderr and not replica.tasks
        assert not samples.exists() and kept.read_text() == "before"


async def test_errors_are_shown_and_no_answer_is_a_failure():
    replica = PretendReplica()
    replica.error = GenerationFailedError("the engine\x1b[2J broke")
    result = await bench(replica, "--requests", 3, "--warm-up", 0, status=1)
    assert not result.stdout
    assert "3 × " in result.stderr and "\\x1b[2J broke" in result.stderr


@pytest.mark.parametrize(("warm_up", "shown"), [(0, b"3 complete of 4"), (9, b"")])
async def test_an_interrupt_ends_the_test_and_shows_what_was_measured(warm_up, shown):
    replica = FourthWaits()
    async with ingress(replica) as app, listening(app) as port:
        options = ("--host", f"127.0.0.1:{port}", "--concurrency", 1, "--warm-up", warm_up)
        command = map(str, (*CARAVAN, "bench", "demo", *options))
        process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
        await replica.reached.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert shown in out
    assert (process.returncode == 0) == bool(shown)
    assert b"Traceback" not in err and (b"before a request was sent" in err) == (not shown)


def test_a_server_that_cannot_be_reached_is_an_error():
    refused = run("bench", "--host", "127.0.0.1:1", "demo", "--requests", 1, status=1)
    assert "1 × " in refused.stderr and not refused.stdout


@pytest.mark.parametrize(
    "wrong", [("--rate", 0), ("--prompt-words", "9-3"), ("--answer-tokens", "x"), ("--requests", 0)]
)
def test_wrong_options_are_refused(wrong):
    run("bench", "demo", *wrong, status=2)
