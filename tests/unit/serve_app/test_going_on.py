"""Answers of the demo model that one replica begins and another one ends, to the letter."""

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason, SamplingParams
from serve_app.config.settings import ModelSettings
from serve_app.gateway.failover import FailoverRules, FailoverState
from serve_app.gateway.tasks import ChatDelta, ChatTask, Conversation, RawText, merge
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from serve_app.transport.wire import Address
from tests.patience import HANG_S

DEMO = str(Path(__file__).parents[3] / "models" / "demo.gguf")
HOT = SamplingParams(temperature=2.0, top_k=40, top_p=0.95, seed=11)
TASK = ChatTask(
    "t", "demo", Conversation((Message("user", "Tell me about the sea"),)), HOT, max_tokens=40
)
SAMPLINGS = {
    "the most likely": SamplingParams(temperature=0),
    "the top k": HOT,
    "all that lie in top p": dataclasses.replace(HOT, top_k=0, top_p=0.9, temperature=8.0),
    "the whole vocabulary": dataclasses.replace(HOT, top_k=0, top_p=1.0, temperature=8.0),
    "penalised": dataclasses.replace(
        HOT, repeat_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.7, repeat_last_n=32
    ),
    "scored": dataclasses.replace(HOT, logprobs=3, temperature=8.0, top_k=0, top_p=1.0),
}
HERE, THERE = Address("h", 1, "t", "here", "m"), Address("h", 2, "t", "there", "m")
CUTS = 4


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[ModelReplica, ModelReplica]]:
    settings = ModelSettings(
        name="demo", source=DEMO, device="cpu", context_tokens=256, max_sequences=4, threads=1
    )
    loaded = load_replica(settings), load_replica(settings)
    yield loaded
    for replica in loaded:
        replica.close()


async def deltas_of(replica: ModelReplica, task: ChatTask) -> list[ChatDelta]:
    async with asyncio.timeout(HANG_S), aclosing(replica.generate(task)) as deltas:
        return [delta async for delta in deltas]


async def check_cuts(replicas, task: ChatTask) -> ChatDelta:
    """Cut the answer at some of its deltas; the whole one."""
    here, there = replicas
    deltas = await deltas_of(here, task)
    whole = merge(deltas)
    cuts = range(0, len(deltas), -(-len(deltas) // CUTS))
    for cut in cuts:
        failover = FailoverState(task, FailoverRules())
        failover.begin(HERE)
        had = [failover.taken(delta) for delta in deltas[:cut]]
        failover.lost("it is gone", at_work=True)
        failover.begin(THERE)
        rest = [failover.taken(delta) for delta in await deltas_of(there, failover.task)]
        found = merge([*had, *rest])
        assert dataclasses.replace(found, usage=None) == dataclasses.replace(whole, usage=None), cut
        assert found.usage is not None and whole.usage is not None
        assert found.usage.prompt_tokens == whole.usage.prompt_tokens
        assert found.usage.completion_tokens == whole.usage.completion_tokens
    return whole


@pytest.mark.parametrize("how", SAMPLINGS)
async def test_the_answer_is_the_same_however_tokens_are_drawn(replicas, how):
    whole = await check_cuts(replicas, dataclasses.replace(TASK, sampling=SAMPLINGS[how]))
    assert len(whole.tokens) > 10


async def test_penalties_that_look_at_the_answer_alone_know_where_it_begins(replicas):
    sampling = dataclasses.replace(SAMPLINGS["penalised"], presence_penalty=8.0)
    task = dataclasses.replace(TASK, sampling=sampling, penalise_prompt=False)
    other = await check_cuts(replicas, dataclasses.replace(task, penalise_prompt=True))
    assert (await check_cuts(replicas, task)).tokens != other.tokens


async def test_a_stop_string_across_the_cut_ends_the_text(replicas):
    scored = dataclasses.replace(TASK, sampling=SAMPLINGS["scored"])
    text = merge(await deltas_of(replicas[0], scored)).text
    # Bytes that are no text are no stop string either.
    stop = max(re.findall(r"[^\ufffd]+", text[len(text) // 2 :]), key=len)[:6]
    task = dataclasses.replace(scored, stop=(stop, text[len(text) // 3] + "¶"))
    whole = await check_cuts(replicas, task)
    assert whole.finish is FinishReason.STOP
    assert text.startswith(whole.text) and stop not in whole.text


async def test_an_answer_ends_with_the_context_wherever_it_was_begun(replicas):
    hot = SAMPLINGS["the whole vocabulary"]
    for seed in range(20):
        sampling = dataclasses.replace(hot, temperature=1e6, seed=seed)
        task = ChatTask("t", "demo", RawText("a b"), sampling, context_tokens=40)
        whole = await check_cuts(replicas, task)
        assert whole.usage is not None
        if whole.usage.prompt_tokens + len(whole.tokens) == 40:
            return
    raise AssertionError("no answer was long enough")


async def test_what_the_client_gets_back_as_context_is_the_same(replicas):
    whole = await check_cuts(replicas, dataclasses.replace(TASK, prompt_wanted=True))
    assert whole.prompt
