"""Two real replicas: prefix affinity, load, and a replica that dies."""

import asyncio
import os
import signal
import time

import httpx
from ray import serve

from runtime.engine.engine_statistics import EngineStatistics
from runtime.errors import ReplicaLostError
from serve_app.messages.model_card import ModelCard
from serve_app.routing.named_replicas import NamedReplicas
from serve_app.routing.replica_set import REPORT_EVERY_S
from tests.patience import HANG_S
from tests.serve.application import call_replicas, engine_of, eventually
from tests.serve.pair.application import NAME, pids_of

PAUSE_S = 5 * REPORT_EVERY_S
STEP_S = 0.2  # so a long prompt takes several seconds, in which the next request comes
SYSTEM = "You are a guide in the desert and know all wells between here and the sea. " * 2
GREEDY = {"temperature": 0, "num_predict": 3}


def statistics() -> dict[int, EngineStatistics]:
    """By the process id of each replica."""
    cards: list[ModelCard] = call_replicas("describe", application=NAME)
    engines = map(engine_of, call_replicas("status", application=NAME))
    return dict(zip((card.pid for card in cards), engines, strict=True))


def set_step_time(step_s: float) -> None:
    call_replicas("pace", step_s, application=NAME)


def prompt_tokens() -> dict[int, int]:
    return {pid: each.prompt_tokens_total for pid, each in statistics().items()}


def received_since(before: dict[int, int]) -> dict[int, int]:
    """The number of prompt tokens of each replica's ended requests, where it is not zero."""
    given = {pid: count - before.get(pid, 0) for pid, count in prompt_tokens().items()}
    return {pid: count for pid, count in given.items() if count}


def with_queue() -> list[int]:
    return [pid for pid, each in statistics().items() if each.queued_tokens]


def chat(url: str, messages: list[dict]) -> str:
    body = {"model": "demo", "messages": messages, "stream": False, "options": GREEDY}
    reply = httpx.post(f"{url}/api/chat", json=body, timeout=HANG_S)
    assert reply.status_code == 200, reply.text
    return reply.json()["message"]["content"]


class Conversation:
    """Grows by a question and an answer each turn."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._messages = [{"role": "system", "content": f"{name}: {SYSTEM}"}]

    def turn(self, question: str) -> None:
        """Wait for the replicas' load reports, then ask."""
        time.sleep(PAUSE_S)
        self._messages.append({"role": "user", "content": question})
        answer = chat(self._url, self._messages)
        self._messages.append({"role": "assistant", "content": answer})


def test_a_conversation_stays_on_the_replica_that_has_it_cached(url: str):
    for name in ("Ali", "Badr"):
        before, cached_before = prompt_tokens(), statistics()
        conversation = Conversation(url, name)
        for question in ("Where is water?", "And salt?", "And dates?", "And rest?"):
            conversation.turn(question)
        (holder,) = received_since(before)
        cached = statistics()[holder].cached_tokens_total
        assert cached - cached_before[holder].cached_tokens_total > 150


async def post(client: httpx.AsyncClient, prompt: str) -> None:
    body = {"model": "demo", "prompt": prompt, "raw": True, "stream": False, "options": GREEDY}
    reply = await client.post("/api/generate", json=body)
    assert reply.status_code == 200, reply.text


async def test_a_replica_with_a_long_queue_gets_no_new_requests(url: str):
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        for turn in range(2):
            before = await asyncio.to_thread(prompt_tokens)
            await asyncio.to_thread(set_step_time, STEP_S)
            long = asyncio.create_task(post(client, f"{turn} camels. " * 125))
            while not (queue := await asyncio.to_thread(with_queue)):
                assert not long.done()
            await asyncio.sleep(PAUSE_S)  # until the ingress knows it too
            await post(client, f"Who are you, {turn}?")
            # Of the short prompt, wherever the long one is by now.
            (other,) = before.keys() - set(queue)
            assert 0 < (await asyncio.to_thread(received_since, before)).get(other, 0) < 40
            await asyncio.to_thread(set_step_time, 0.0)
            await long


async def test_a_killed_replica_is_lost_and_its_conversations_continue_on_another(url: str):
    """A call that waits for it fails, and its successor is listed."""
    replicas = NamedReplicas(serve.get_deployment_handle("demo", NAME))
    names = {pid: name for name, pid in (await pids_of(replicas)).items()}
    before = await asyncio.to_thread(prompt_tokens)
    conversation = Conversation(url, "Dalil")
    await asyncio.to_thread(conversation.turn, "Where is water?")
    (holder,) = await asyncio.to_thread(received_since, before)
    (other,) = before.keys() - {holder}
    os.kill(holder, signal.SIGSTOP)
    calling = asyncio.create_task(replicas.call(names[holder], "describe"))
    await replicas.call(names[other], "describe")
    os.kill(holder, signal.SIGKILL)
    for question in ("And salt?", "And dates?", "And rest?"):
        await asyncio.to_thread(conversation.turn, question)
    (lost,) = await asyncio.gather(calling, return_exceptions=True)
    assert isinstance(lost, ReplicaLostError)
    await asyncio.to_thread(eventually, lambda: holder not in prompt_tokens())
    assert (await asyncio.to_thread(received_since, before))[other] > 300
    await asyncio.to_thread(conversation.turn, "And shade?")
    after = await pids_of(replicas)
    assert names[other] in after and names[holder] not in after
