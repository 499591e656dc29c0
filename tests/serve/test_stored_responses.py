"""Responses of the running application: continued by the official client, kept by two processes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util import list_named_actors

from tests.serve.application import CALL_TIMEOUT_S, call_replicas, eventually

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
STORE = "Responses:store"


def kill_and_await(actor: ActorHandle) -> None:
    """Kill an actor and wait until calls to it fail: `ray.kill` does not wait for the process."""

    def dead() -> bool:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=CALL_TIMEOUT_S)
        except RayActorError:
            return True
        return False

    ray.kill(actor)
    eventually(dead)


def two_processes() -> list[ActorHandle]:
    """Of this cluster only: other tests start clusters meanwhile, with such processes too."""
    actors = list_named_actors(all_namespaces=True)
    processes = [ray.get_actor(**actor) for actor in actors if STORE in actor["name"]]
    assert len(processes) == 2
    return processes


@contextmanager
def stopped(actor: ActorHandle) -> Iterator[None]:
    """The process of the actor hangs meanwhile."""
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=CALL_TIMEOUT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def both_have_the_same() -> bool:
    one, other = map(set, call_replicas("ids", deployment=STORE))
    return one == other


def chat(oai, messages):
    return oai.chat.completions.create(model="demo", messages=messages, temperature=0)


def test_a_stored_response_is_continued_retrieved_and_deleted(oai):
    first = oai.responses.create(model="demo", input=QUESTION, temperature=0)
    assert first.output_text == chat(oai, QUESTION).choices[0].message.content
    with oai.responses.stream(
        model="demo", input="And of dry?", previous_response_id=first.id, temperature=0
    ) as stream:
        second = stream.get_final_response()
    history = [*QUESTION, {"role": "assistant", "content": first.output_text}]
    reply = chat(oai, [*history, {"role": "user", "content": "And of dry?"}])
    assert second.output_text == reply.choices[0].message.content
    assert second.usage.input_tokens == reply.usage.prompt_tokens
    assert oai.responses.retrieve(first.id).output_text == first.output_text
    assert [item.role for item in oai.responses.input_items.list(second.id)][-1] == "user"
    oai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        oai.responses.create(model="demo", input="Hi", previous_response_id=second.id)


def test_responses_are_kept_and_found_while_one_process_hangs(oai):
    before = oai.responses.create(model="demo", input="Hi", max_output_tokens=4)
    for process in two_processes():
        with stopped(process):
            for _ in range(2):  # when the process begins to hang, and when that is known
                made = oai.responses.create(
                    model="demo", input="Yes", max_output_tokens=4, previous_response_id=before.id
                )
                assert oai.responses.retrieve(made.id).id == made.id
                oai.responses.delete(before.id)
                with pytest.raises(openai.NotFoundError):
                    oai.responses.retrieve(before.id)
                before = oai.responses.create(model="demo", input="Hi", max_output_tokens=4)
        eventually(both_have_the_same)  # it has executed what it missed, in order


def test_responses_survive_the_loss_of_one_process_after_the_other(oai):
    def kept_by_two() -> bool:
        kept = call_replicas("ids", deployment=STORE)
        return len(kept) == 2 and all(made.id in ids for ids in kept)

    made = oai.responses.create(model="demo", input="Hi", max_output_tokens=4)
    assert kept_by_two()
    for process in two_processes():
        kill_and_await(process)
        eventually(kept_by_two)  # the new process has copied it from the other one
    assert oai.responses.retrieve(made.id).id == made.id
