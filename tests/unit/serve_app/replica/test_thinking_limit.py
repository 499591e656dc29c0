"""Thinking budgets of the demo model's answers."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from model_zoo.chat.messages import Message, ReplyStart
from model_zoo.grammars.constraint import OutputForm, OutputKind
from runtime.engine.request import SamplingParams
from runtime.errors import RequestError
from serve_app.messages.tasks import ChatDelta, ChatTask, Conversation, EndRules
from serve_app.replica.loading import load_replica
from serve_app.replica.model_files import local_files
from serve_app.replica.replica import ModelReplica
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.fake_replicas import clients
from tests.unit.serve_app.loaded_replicas import settings

QUESTION = "What is the opposite of hot?"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if thinking and add_generation_prompt %}<think>{% endif %}"
)
SOURCE = Conversation((Message("user", QUESTION),), thinking=True)
SAMPLING = SamplingParams(temperature=2.0, seed=3, logprobs=0)
TASK = ChatTask("t", "demo", SOURCE, SAMPLING, 40, ending=EndRules(ignore_model=True))


@pytest.fixture(scope="module")
def replica() -> Iterator[ModelReplica]:
    chosen = settings()
    files = local_files(chosen, {})
    assert files is not None
    replica = load_replica(chosen, files=dataclasses.replace(files, template=TEMPLATE))
    yield replica
    replica.close()


async def answered(replica: ModelReplica, task: ChatTask = TASK, **source: Any) -> ChatDelta:
    prompt = msgspec.structs.replace(task.prompt, **source)
    return await answer_of(replica, dataclasses.replace(task, prompt=prompt))


async def test_the_answer_begins_after_the_budget(replica) -> None:
    free = await answered(replica)
    bound = await answered(replica, thinking_budget=10)
    assert "</think>" not in free.text
    assert bound.tokens[:10] == free.tokens[:10]
    thought, end, text = bound.text.partition("</think>")
    assert free.text.startswith(thought) and end and text
    assert len(bound.tokens) == 40
    # Log-probabilities are those of the model, which would not have ended its thinking.
    assert bound.logprobs[10].drawn.logprob < -5


@pytest.mark.parametrize("budget", [39, 400])
async def test_a_budget_that_is_not_used_up_changes_nothing(replica, budget) -> None:
    free, bound = await answered(replica), await answered(replica, thinking_budget=budget)
    assert bound.tokens[:39] == free.tokens[:39]


async def test_a_form_and_a_message(replica) -> None:
    task = dataclasses.replace(TASK, output=OutputForm(OutputKind.REGEX, "yes|no", "f"))
    found = await answered(replica, task, thinking_budget=4, budget_message=" Enough.")
    thought, end, text = found.text.partition(" Enough.</think>")
    assert thought and end and text.strip() in ("yes", "no")
    with pytest.raises(RequestError, match='"reasoning_budget_message" contains a marker'):
        await answered(replica, thinking_budget=4, budget_message="a</think>b")


async def test_a_continued_message_has_used_up_a_part_of_its_budget(replica) -> None:
    messages = (*SOURCE.messages, Message("assistant", "<think>abc"))
    source: dict[str, Any] = {"messages": messages, "reply": ReplyStart.CONTINUED}
    early, late = [
        (await answered(replica, **source, thinking_budget=budget)).text.index("</think>")
        for budget in (1, 12)
    ]
    assert early == 0 < late


async def test_a_model_without_thinking_keeps_every_budget(replica) -> None:
    source: dict[str, Any] = {"template": "ab{{ .Prompt }}", "thinking": None}
    free = await answered(replica, **source)
    assert (await answered(replica, **source, thinking_budget=2)).tokens == free.tokens


async def test_official_clients_limit_the_thinking(replica) -> None:
    """From the request to the parts of the reply, with and without streaming."""
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}]}
    body["max_tokens"] = 24
    extra = {"seed": 1, "thinking_token_budget": 3, "ignore_eos": True}
    chat = body | {"temperature": 0, "reasoning_effort": "high", "logprobs": True}
    async with clients(replica, card=replica.describe()) as to:
        whole = (await to.oai.chat.completions.create(**chat, extra_body=extra)).choices[0]
        stream = await to.oai.chat.completions.create(**chat, extra_body=extra, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        thinking: Any = {"type": "enabled", "budget_tokens": 3}
        greedy = {"temperature": 0}
        message = await to.anthropic.messages.create(**body, thinking=thinking, extra_body=greedy)
    tokens = [entry.token for entry in whole.logprobs.content]
    thought = whole.message.reasoning_content
    assert thought == "".join(tokens[:3]).strip()
    assert "".join(tokens[3:]).startswith("</think>") and whole.message.content
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    first, *_ = message.content
    assert first.type == "thinking" and first.thinking == thought
