"""Many streams at once, clients that disconnect, and a replica that is killed."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.patience import HANG_S
from tests.serve.application import ENDLESS, Application, eventually

TIMEOUT = httpx.Timeout(HANG_S)
FULL_STEPS = 450  # an endless answer fills the context, which takes more than so many
STEP_S = 0.2  # where an answer must not end before its client has left: minutes for the whole


def body(index: int) -> dict:
    return {
        "model": "demo",
        "prompt": f"What is {index} plus {index + 7}?" if index % 2 else "Tell me about the sea",
        "raw": index % 3 == 0,
        "options": {**ENDLESS, "temperature": 3.0, "seed": index, "num_predict": 8 + index},
    }


def text_of(text: str) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["done"]
    return "".join(line["response"] for line in lines)


async def answers(url: str, indices: range, *, at_once: int) -> list[str]:
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:

        async def one(index: int) -> str:
            async with gate:
                return text_of((await client.post("/api/generate", json=body(index))).text)

        return await asyncio.gather(*map(one, indices))


@pytest.fixture(scope="module")
def endless(application: Application) -> dict:
    """Options with which the answer to a raw "a" fills the context."""
    url = f"{application.url}/api/generate"
    for seed in range(50):
        options = {**ENDLESS, "seed": seed}
        request = {"model": "demo", "prompt": "a", "raw": True, "stream": False, "options": options}
        if httpx.post(url, json=request, timeout=TIMEOUT).json()["eval_count"] > FULL_STEPS:
            return options
    raise AssertionError("no seed gives a long answer")


async def test_concurrent_streams_give_the_answers_of_sequential_requests(application: Application):
    indices = range(32)
    sequential = await answers(application.url, indices, at_once=1)
    concurrent = await answers(application.url, indices, at_once=32)
    assert concurrent == sequential
    assert len(set(sequential)) > 16


def steps_at_rest(application: Application) -> int:
    """Steps done so far, once no sequence and no page is in use."""

    def quiet() -> bool:
        now = application.statistics()
        return now.running == now.waiting == now.pages_owned == 0

    eventually(quiet)
    return application.statistics().steps_total


def test_a_client_that_disconnects_frees_its_sequence(application: Application, endless: dict):
    request = {"model": "demo", "prompt": "a", "raw": True, "options": endless}
    before = steps_at_rest(application)
    url = f"{application.url}/api/generate"
    with application.paced(STEP_S):
        with httpx.stream("POST", url, json=request, timeout=TIMEOUT) as response:
            next(response.iter_lines())
        assert 0 < steps_at_rest(application) - before < FULL_STEPS


def test_a_client_that_disconnects_before_an_answer_frees_its_sequence(
    application: Application, endless: dict
):
    request = {"model": "demo", "prompt": "a", "raw": True, "stream": False, "options": endless}
    before = steps_at_rest(application)
    with application.paced(STEP_S):
        with sent(f"{application.url}/api/generate", request):
            eventually(lambda: application.statistics().running == 1)
        assert 0 < steps_at_rest(application) - before < FULL_STEPS


@contextmanager
def sent(url: str, request: dict) -> Iterator[None]:
    """Send a request as a client that disconnects without waiting for an answer."""
    parts, content = httpx.URL(url), json.dumps(request).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.host}\r\ncontent-length: {len(content)}"
    with socket.create_connection((parts.host, parts.port)) as line:
        line.sendall(head.encode() + b"\r\ncontent-type: application/json\r\n\r\n" + content)
        yield


def test_a_stream_whose_only_replica_is_killed_continues_on_the_next_one(
    application: Application, endless: dict
):
    first = application.card().pid
    request = {"model": "demo", "prompt": "a", "raw": True, "options": endless}
    url = f"{application.url}/api/generate"
    undisturbed = text_of(httpx.post(url, json=request, timeout=TIMEOUT).text)
    application.pace(STEP_S)  # of this replica alone, which will be gone
    with httpx.stream("POST", url, json=request, timeout=TIMEOUT) as response:
        lines = response.iter_lines()
        begin = next(lines)
        assert json.loads(begin)["done"] is False
        os.kill(first, signal.SIGKILL)
        assert text_of("\n".join([begin, *lines])) == undisturbed
    assert application.card().pid != first
