"""Answers of the demo model that a second replica continues, character for character."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason, SamplingParams
from serve_app.gateway.failover import FailoverRules, FailoverState
from serve_app.messages.tasks import ChatDelta, ChatTask, Conversation, EndRules, RawText, merge
from serve_app.replica.replica import ModelReplica
from serve_app.transport.wire import Address
from tests.unit.serve_app.answers import answer_of, deltas_of
from tests.unit.serve_app.loaded_replicas import loaded

HOT = SamplingParams(temperature=2.0, top_k=40, top_p=0.95, seed=11)
TASK = ChatTask(
    "t", "demo", Conversation((Message("user", "Tell me about the sea"),)), HOT, max_tokens=40
)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "top k": HOT,
    "top p": dataclasses.replace(HOT, top_k=0, top_p=0.9, temperature=8.0),
    "the whole vocabulary": dataclasses.replace(HOT, top_k=0, top_p=1.0, temperature=8.0),
    "penalties": dataclasses.replace(
        HOT, repeat_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.7, repeat_last_n=32
    ),
    "logprobs": dataclasses.replace(HOT, logprobs=3, temperature=8.0, top_k=0, top_p=1.0),
}
FIRST, SECOND = Address("h", 1, "t", "here", "m"), Address("h", 2, "t", "there", "m")
CUTS = 3


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[ModelReplica, ModelReplica]]:
    sizes = {"context_tokens": 256, "max_sequences": 4}
    with loaded(**sizes) as first, loaded(**sizes) as second:
        yield first, second


async def check_cuts(replicas, task: ChatTask) -> ChatDelta:
    """Continues the answer from several of its deltas on; returns the uninterrupted one."""
    first, second = replicas
    deltas = await deltas_of(first, task)
    whole = merge(deltas)
    cuts = range(0, len(deltas), -(-len(deltas) // CUTS))
    ignored: dict[str, Any] = {"usage": None, "thinking_tokens": 0}
    for cut in cuts:
        failover = FailoverState(task, FailoverRules())
        failover.begin_attempt(FIRST)
        had = [failover.accept(delta) for delta in deltas[:cut]]
        failover.lose_replica("connection closed", at_work=True)
        failover.begin_attempt(SECOND)
        rest = [failover.accept(delta) for delta in await deltas_of(second, failover.task)]
        found = merge([*had, *rest])
        # How many tokens are thinking is estimated for each delta.
        assert dataclasses.replace(found, **ignored) == dataclasses.replace(whole, **ignored), cut
        assert found.usage is not None and whole.usage is not None
        assert found.usage.prompt_tokens == whole.usage.prompt_tokens
        assert found.usage.completion_tokens == whole.usage.completion_tokens
    return whole


@pytest.mark.parametrize("how", SAMPLINGS)
async def test_the_answer_is_the_same_for_every_kind_of_sampling(replicas, how):
    whole = await check_cuts(replicas, dataclasses.replace(TASK, sampling=SAMPLINGS[how]))
    assert len(whole.tokens) > 10


async def test_penalties_of_the_answer_alone_count_from_its_beginning(replicas):
    sampling = dataclasses.replace(SAMPLINGS["penalties"], presence_penalty=8.0)
    task = dataclasses.replace(TASK, sampling=sampling, penalise_prompt=False)
    other = await check_cuts(replicas, dataclasses.replace(task, penalise_prompt=True))
    assert (await check_cuts(replicas, task)).tokens != other.tokens


async def test_bad_words_of_several_tokens_are_not_completed_afterwards(replicas):
    task = dataclasses.replace(TASK, sampling=SAMPLINGS["greedy"])
    text = (await answer_of(replicas[0], task)).text
    for _ in range(3):
        word = max(text.split(), key=len)
        task = dataclasses.replace(task, bad_words=(*task.bad_words, word, word.strip(".")))
        whole = await check_cuts(replicas, task)
        assert word in text and word not in whole.text
        text = whole.text


async def test_a_stop_string_across_the_interruption_ends_the_text(replicas):
    with_logprobs = dataclasses.replace(TASK, sampling=SAMPLINGS["logprobs"])
    text = (await answer_of(replicas[0], with_logprobs)).text
    # Stop strings cannot contain replacement characters.
    stop = max(re.findall(r"[^\ufffd]+", text[len(text) // 2 :]), key=len)[:6]
    task = dataclasses.replace(with_logprobs, stop=(stop, text[len(text) // 3] + "¶"))
    whole = await check_cuts(replicas, task)
    assert whole.finish is FinishReason.STOP
    assert text.startswith(whole.text) and stop not in whole.text


async def test_a_resumed_answer_ends_with_the_context(replicas):
    hot = SAMPLINGS["the whole vocabulary"]
    for seed in range(20):
        sampling = dataclasses.replace(hot, temperature=1e6, seed=seed)
        task = ChatTask("t", "demo", RawText("a b"), sampling, context_tokens=40)
        whole = await check_cuts(replicas, task)
        assert whole.usage is not None
        if whole.usage.prompt_tokens + len(whole.tokens) == 40:
            return
    raise AssertionError("no answer was long enough")


@pytest.mark.parametrize("how", ["the whole vocabulary", "penalties", "logprobs"])
async def test_an_answer_of_several_contexts_is_the_same(replicas, how):
    ending = EndRules(ignore_model=True)
    task = dataclasses.replace(TASK, sampling=SAMPLINGS[how], max_tokens=100, ending=ending)
    whole = await check_cuts(replicas, dataclasses.replace(task, context_tokens=48, shift_keep=4))
    assert len(whole.tokens) == 100


@pytest.mark.parametrize("thinking_budget", [0, 9])
async def test_thinking_is_cut_off_at_the_same_place(replicas, thinking_budget):
    source = Conversation(
        (Message("user", "Hi"),), template="{{ .Prompt }}<think>", thinking_budget=thinking_budget
    )
    whole = await check_cuts(replicas, dataclasses.replace(TASK, prompt=source))
    thought, end, text = whole.text.partition("</think>")
    assert end and text and bool(thought) == bool(thinking_budget)


async def test_the_returned_context_is_the_same(replicas):
    whole = await check_cuts(replicas, dataclasses.replace(TASK, prompt_wanted=True))
    assert whole.prompt
