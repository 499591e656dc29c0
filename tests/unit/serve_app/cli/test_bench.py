"""`caravan bench` against the whole ingress with a fake model."""

import asyncio
import json
from xml.etree import ElementTree

import pytest

from runtime.errors import GenerationFailedError
from tests.unit.serve_app.cli.cli_runs import run
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening


async def bench(replica, *arguments, **options):
    async with ingress(replica) as app, listening(app) as port:
        host = f"http://127.0.0.1:{port}"
        return await asyncio.to_thread(run, "bench", "--host", host, "demo", *arguments, **options)


async def test_a_server_is_measured(tmp_path):
    replica = PretendReplica()
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
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


async def test_errors_are_shown_and_no_answer_is_a_failure():
    replica = PretendReplica()
    replica.error = GenerationFailedError("the engine\x1b[2J broke")
    result = await bench(replica, "--requests", 3, "--warm-up", 0, status=1)
    assert "0 complete of 3" in result.stdout
    assert "3 × " in result.stderr and "\\x1b[2J broke" in result.stderr


def test_a_server_that_cannot_be_reached_is_an_error():
    refused = run("bench", "--host", "127.0.0.1:1", "demo", "--requests", 1, status=1)
    assert "1 × " in refused.stderr


@pytest.mark.parametrize(
    "wrong", [("--rate", 0), ("--prompt-words", "9-3"), ("--answer-tokens", "x"), ("--requests", 0)]
)
def test_wrong_options_are_refused(wrong):
    run("bench", "demo", *wrong, status=2)
