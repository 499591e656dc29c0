"""What an answer that continues on another replica keeps: its model, its time to wait, and counts
of tokens that are sampled again because the client lacks their log-probabilities."""

import asyncio
import dataclasses

from runtime.engine.request import FinishReason, ResumeState
from serve_app.gateway.failover import FailoverRules, FailoverState
from serve_app.messages.tasks import Candidate, ChatDelta, TokenLogprob
from serve_app.transport.wire import Address
from tests.patience import settled, until
from tests.unit.serve_app.answers import TASK, answer_of
from tests.unit.serve_app.gateway.resumable_replicas import TEXT, ResumableReplica, serving, usage

SHOWN = TokenLogprob(Candidate("a", b"a", -0.5))
TWO_SHOWN = (SHOWN, SHOWN)


async def test_a_draining_replica_continues_if_all_others_have_another_model() -> None:
    first, other = ResumableReplica(halts_at=4), ResumableReplica(model="two")
    async with serving(first, other) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        del replica_set.addresses[0]
        choices = replica_set.choices
        closing = asyncio.create_task(first.server.close(drain_s=60))
        await until(lambda: replica_set.choices > choices)
        first.resume.set()
        assert (await answer).text == TEXT
        await closing
    assert len(first.tasks) == 1 and not other.tasks


async def test_each_wait_after_a_lost_replica_has_the_whole_timeout(monkeypatch) -> None:
    replicas = ResumableReplica(dies_at=2), ResumableReplica(dies_at=5), ResumableReplica()
    async with serving(*replicas, start_timeout_s=100.0) as (backend, replica_set):
        choose = replica_set.choose

        async def choose_late(task, **options):
            asyncio.get_running_loop().advance(60.0)
            await settled()
            return await choose(task, **options)

        monkeypatch.setattr(replica_set, "choose", choose_late)
        assert (await answer_of(backend)).text == TEXT


def on_next_replica(failover: FailoverState, name: str) -> ResumeState | None:
    if failover.replica:
        failover.lose_replica("the process ended", at_work=True)
    failover.begin_attempt(Address("127.0.0.1", 1, "token", name, "one"))
    return failover.task.resume


def test_tokens_of_thinking_are_counted_once() -> None:
    sampling = dataclasses.replace(TASK.sampling, logprobs=0)
    failover = FailoverState(dataclasses.replace(TASK, sampling=sampling), FailoverRules())
    assert on_next_replica(failover, "a") is None
    failover.accept(ChatDelta("ab", (0, 1, 2), TWO_SHOWN, thinking_tokens=3, usage=usage(1)))
    assert on_next_replica(failover, "b") == ResumeState((0, 1), 2)
    repeated = ChatDelta("c", (2, 3), TWO_SHOWN, thinking_tokens=2)
    assert failover.accept(repeated) == ChatDelta("c", (3,), TWO_SHOWN, thinking_tokens=1)
    assert on_next_replica(failover, "c") == ResumeState((0, 1, 2, 3), 3)
    last = failover.accept(ChatDelta(finish=FinishReason.STOP, usage=usage(4)))
    assert last.usage is not None and last.usage.thinking_tokens == 4
