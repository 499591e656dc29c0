"""Responses of the running application: continued by the official client, kept by two processes."""

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


def test_responses_survive_the_loss_of_one_process_after_the_other(oai):
    def kept_by_two() -> bool:
        kept = call_replicas("ids", deployment=STORE)
        return len(kept) == 2 and all(made.id in ids for ids in kept)

    made = oai.responses.create(model="demo", input="Hi", max_output_tokens=4)
    assert kept_by_two()
    # Of this cluster only: other tests start clusters meanwhile, with such processes too.
    actors = list_named_actors(all_namespaces=True)
    processes = [actor for actor in actors if STORE in actor["name"]]
    assert len(processes) == 2
    for process in processes:
        kill_and_await(ray.get_actor(**process))
        eventually(kept_by_two)  # the new process has copied it from the other one
    assert oai.responses.retrieve(made.id).id == made.id
