"""Streams that continue on other replicas: what clients get, and when a task fails."""

import asyncio
import dataclasses
import time
from contextlib import aclosing

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason, ResumeState, Usage
from runtime.errors import (
    EngineDeadError,
    ModelUnavailableError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from serve_app.gateway.failover import FailoverRules, FailoverState
from serve_app.messages.tasks import (
    Candidate,
    ChatDelta,
    Conversation,
    EchoedPrompt,
    EmbeddingTask,
    RawText,
    TokenLogprob,
    merge,
)
from serve_app.transport import connection
from serve_app.transport.wire import Address, ConnectionLost
from tests.patience import HANG_S, settled, until
from tests.unit.serve_app.answers import TASK, answer_of
from tests.unit.serve_app.gateway.resumable_replicas import (
    TEXT,
    WORDS,
    ResumableReplica,
    serving,
    usage,
)

UNREACHABLE = Address("127.0.0.1", 1, "token", "unreachable", "one")


@pytest.mark.parametrize("dies_at", range(len(WORDS)))
async def test_another_replica_continues_a_stream_from_its_tokens(dies_at):
    first, second = ResumableReplica(dies_at=dies_at), ResumableReplica()
    async with serving(first, second) as (backend, _):
        answer = await answer_of(backend)
    assert answer.text == TEXT
    assert answer.tokens == tuple(range(len(WORDS)))
    (again,) = second.tasks
    said = "".join(WORDS[:dies_at])
    assert again.resume == ResumeState(tuple(range(dies_at)), len(said))


class PacedReplica(ResumableReplica):
    async def before(self, task, index):
        await asyncio.sleep(0.01)


async def test_a_client_that_falls_behind_gets_the_rest_when_it_reads_again(monkeypatch):
    """Also if no replica may be lost, because none is."""
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 100)
    first, second = PacedReplica(), ResumableReplica()
    async with (
        serving(first, second, rules=FailoverRules(max_retries=0)) as (backend, _),
        aclosing(backend.generate(TASK)) as deltas,
    ):
        parts = [await anext(deltas)]
        await until(lambda: not first.running)
        parts += [delta async for delta in deltas]
    assert merge(parts).text == TEXT
    (again,) = second.tasks
    assert again.resume and 1 < len(again.resume.tokens) < len(WORDS)


async def test_another_replica_gets_the_same_task():
    first, second = ResumableReplica(dies_at=3), ResumableReplica()
    variables = {"enable_thinking": False, "tools_in_user_message": True}
    prompt = Conversation((Message("user", "hi", name="Ann"),), variables=variables)
    async with serving(first, second) as (backend, _):
        await answer_of(backend, dataclasses.replace(TASK, prompt=prompt))
    (one,), (two,) = first.tasks, second.tasks
    assert one.prompt == prompt
    assert one.now is not None, "templates may ask for the time"
    assert dataclasses.replace(two, resume=None) == one


async def test_usage_counts_one_prompt_and_the_whole_time():
    first, second = ResumableReplica(dies_at=3), ResumableReplica()
    async with serving(first, second) as (backend, _):
        begun_ns = time.monotonic_ns()
        usage = (await answer_of(backend)).usage
        took_ns = time.monotonic_ns() - begun_ns
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (5, 4)
    assert usage.completion_tokens == len(WORDS)
    assert usage.prompt_ns == 2_000, "of the first replica"
    assert 1_000 <= usage.queue_ns < took_ns
    assert 3_000 < usage.decode_ns < took_ns


def test_the_time_before_the_first_token_is_not_decoding():
    times = iter((0, 10, 30, 70, 200))  # arrival, attempt, first token, second attempt, end
    failover = FailoverState(TASK, FailoverRules(), clock=lambda: next(times))
    told = Usage(5, 4, 1, queue_ns=1, prompt_ns=2, decode_ns=3)
    for finish in (None, FinishReason.STOP):
        failover.begin_attempt(UNREACHABLE)
        last = failover.accept(ChatDelta(usage=told, finish=finish)).usage
    assert last is not None and (last.queue_ns, last.prompt_ns, last.decode_ns) == (11, 2, 170)


async def test_waiting_for_a_replica_to_start_is_queueing_time():
    """The request starts the first replica and waits until the model is loaded."""
    replica = ResumableReplica()
    async with serving(replica) as (backend, replica_set):
        address = replica_set.addresses.pop()
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: replica_set.choices)
        waited_ns = await some_time()
        replica_set.addresses.append(address)
        usage = (await answer).usage
    assert usage is not None and usage.queue_ns > waited_ns
    assert (usage.prompt_ns, usage.decode_ns) == (2_000, 3_000), "as the replica measured them"


async def some_time() -> int:
    """The nanoseconds that it took to return."""
    begun_ns = time.monotonic_ns()
    await settled()
    return time.monotonic_ns() - begun_ns


async def test_time_on_a_replica_that_died_before_the_first_token_is_queueing_time():
    first, second = ResumableReplica(dies_at=0, halts_at=0), ResumableReplica()
    async with serving(first, second) as (backend, _):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        waited_ns = await some_time()
        first.resume.set()
        usage = (await answer).usage
    assert usage is not None and usage.queue_ns > waited_ns


async def test_log_probabilities_that_the_client_lacks_are_computed_again():
    """Three tokens were sampled and two were delivered: the second replica samples the third
    again."""
    shown = TokenLogprob(Candidate("a", b"a", -0.5))
    first, second = ResumableReplica(), ResumableReplica()
    seen: list[ResumeState | None] = []

    async def dies_holding_back(task):
        yield ChatDelta("ab", (0, 1, 2), (shown, shown))
        raise ConnectionLost("the process ended")

    async def continues(task):
        seen.append(task.resume)
        yield ChatDelta("", (2,))
        yield ChatDelta("c", (3,), (shown, shown))
        yield ChatDelta(finish=FinishReason.STOP, tokens=(4,))

    first.generate, second.generate = dies_holding_back, continues
    task = dataclasses.replace(TASK, sampling=dataclasses.replace(TASK.sampling, logprobs=0))
    async with serving(first, second) as (backend, _):
        answer = await answer_of(backend, task)
    assert seen == [ResumeState((0, 1), 2)]
    assert answer.tokens == (0, 1, 2, 3, 4)
    assert (answer.text, len(answer.logprobs)) == ("abc", 4)


@pytest.mark.parametrize("echoed_first", [False, True])
async def test_a_prompt_is_echoed_once_and_tokens_of_thinking_are_summed(echoed_first):
    prompt = EchoedPrompt("hi")
    first, second = ResumableReplica(), ResumableReplica()
    seen: list[bool] = []

    async def dies(task):
        if echoed_first:
            yield ChatDelta("ab", (0, 1, 2), echo=prompt, thinking_tokens=2)
        raise ConnectionLost("the process ended")

    async def continues(task):
        seen.append(task.echo)
        echo = prompt if task.echo else None
        yield ChatDelta("c", (3,), echo=echo, thinking_tokens=1, usage=usage(1))
        yield ChatDelta(finish=FinishReason.STOP, usage=usage(4), tokens=(4,))

    first.generate, second.generate = dies, continues
    async with serving(first, second) as (backend, _):
        answer = await answer_of(backend, dataclasses.replace(TASK, echo=True))
    assert seen == [not echoed_first]
    assert answer.echo == prompt
    assert answer.usage is not None
    assert answer.usage.thinking_tokens == answer.thinking_tokens == (3 if echoed_first else 1)


async def test_max_retries_limits_the_losses_in_a_row():
    replicas = [ResumableReplica(dies_at=2), ResumableReplica(dies_at=3), ResumableReplica()]
    async with serving(*replicas, rules=FailoverRules(max_retries=2)) as (backend, _):
        assert (await answer_of(backend)).text == TEXT
    replicas = [ResumableReplica(dies_at=2), ResumableReplica(dies_at=3), ResumableReplica()]
    async with serving(*replicas, rules=FailoverRules(max_retries=1)) as (backend, _):
        with pytest.raises(ReplicaLostError, match=r"lost 2 replicas.*`failover.max_retries` is 1"):
            await answer_of(backend)
    assert not replicas[2].tasks


async def test_unreachable_replicas_are_not_charged_as_retries():
    replica = ResumableReplica()
    rules = FailoverRules(max_retries=0)
    async with serving(replica, rules=rules) as (backend, replica_set):
        replica_set.addresses[:0] = [
            dataclasses.replace(UNREACHABLE, replica=name) for name in ("one", "two", "three")
        ]
        assert (await answer_of(backend)).text == TEXT


async def test_a_task_waits_until_its_only_replica_is_replaced():
    first, later = ResumableReplica(dies_at=4), ResumableReplica()
    async with serving(first) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.dying)
        await settled()
        replica_set.addresses.append(await later.start())
        assert (await answer).text == TEXT
        await later.server.close(drain_s=0)


async def test_waiting_for_a_replacement_times_out():
    first = ResumableReplica(dies_at=4)
    async with serving(first, start_timeout_s=0.3) as (backend, _):
        with pytest.raises(OverloadedError, match="no replica of model 'demo' has answered"):
            await answer_of(backend)


async def test_an_engine_that_fails_during_a_task_is_a_lost_replica():
    first, second = (
        ResumableReplica(error=ReplicaLostError("the engine has failed")),
        ResumableReplica(),
    )
    async with serving(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        with pytest.raises(ReplicaLostError, match="max_retries"):
            await answer_of(backend)
    async with serving(ResumableReplica(error=first.error), ResumableReplica()) as (backend, _):
        assert (await answer_of(backend)).text == TEXT


async def test_an_engine_that_failed_before_is_not_charged_as_a_retry():
    first, second = ResumableReplica(error=EngineDeadError("dead")), ResumableReplica()
    async with serving(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        assert (await answer_of(backend)).text == TEXT


async def test_a_silent_replica_is_lost(monkeypatch):
    """If its machine is lost or its process is stopped, no connection breaks."""
    first, second = ResumableReplica(dies_at=5, heartbeat_s=60), ResumableReplica()
    monkeypatch.setattr(first, "die", lambda: None)
    async with serving(first, second, rules=FailoverRules(silence_s=0.2)) as (backend, _):
        assert (await answer_of(backend)).text == TEXT
    assert second.tasks[0].resume == ResumeState(tuple(range(5)), len("".join(WORDS[:5])))


async def test_a_slow_replica_that_sends_heartbeats_is_not_lost(heartbeats):
    """Heartbeats every 0.05 s, four times as often as one is needed."""
    slow, second = ResumableReplica(halts_at=3), ResumableReplica()
    async with serving(slow, second, rules=FailoverRules(silence_s=0.2)) as (backend, _):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: len(heartbeats) > 6)
        slow.resume.set()
        assert (await answer).text == TEXT
    assert not second.tasks


async def test_a_draining_replica_hands_its_streams_over_without_a_retry():
    first, second = ResumableReplica(halts_at=4), ResumableReplica()
    async with serving(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        async with asyncio.timeout(HANG_S):
            await first.server.close(drain_s=60)
        assert (await answer).text == TEXT
    assert second.tasks[0].resume == ResumeState(tuple(range(4)), len("".join(WORDS[:4])))


@pytest.mark.parametrize("problem", [None, ModelUnavailableError("no node can host it")], ids=str)
async def test_a_draining_replica_continues_if_no_other_exists_or_can_be_scheduled(problem):
    first = ResumableReplica(halts_at=4)
    async with serving(first) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        replica_set.problem = problem
        choices = replica_set.choices
        closing = asyncio.create_task(first.server.close(drain_s=60))
        await until(lambda: replica_set.choices > choices)
        first.resume.set()
        assert (await answer).text == TEXT
        await closing
    assert len(first.tasks) == 1


async def test_a_stream_waits_while_no_node_can_host_its_model():
    """For example after the only suitable node was lost, until a new one is added."""
    first, later = ResumableReplica(dies_at=4), ResumableReplica()
    async with serving(first) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.dying)
        replica_set.problem = ModelUnavailableError("no node can host it")
        with pytest.raises(ModelUnavailableError):
            await answer_of(backend)  # a new request does not wait for that
        replica_set.addresses = [await later.start()]
        replica_set.problem = None
        assert (await answer).text == TEXT
        await later.server.close(drain_s=0)
    first = ResumableReplica(dies_at=4)
    async with serving(first, start_timeout_s=0.3) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.dying)
        replica_set.problem = ModelUnavailableError("no node can host it")
        with pytest.raises(OverloadedError, match="no replica of model 'demo' has answered"):
            await answer


async def test_a_queued_task_of_a_draining_replica_is_not_refused_by_a_full_one():
    first, full = ResumableReplica(halts_at=0), ResumableReplica(error=OverloadedError("full"))
    async with serving(first, full) as (backend, _):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        async with asyncio.timeout(HANG_S):
            await first.server.close(drain_s=60)
        await until(lambda: len(full.tasks) > 2)
        full.error = None
        assert (await answer).text == TEXT
    assert full.tasks[0].resume == ResumeState(had_turn=False), "which engines never refuse"


async def test_a_stream_that_outlasts_the_drain_waits_for_the_next_replica():
    first, later = ResumableReplica(halts_at=4), ResumableReplica()
    async with serving(first, rules=FailoverRules(max_retries=0)) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        await first.server.close(drain_s=0.3)
        replica_set.addresses = [await later.start()]
        assert (await answer).text == TEXT
        await later.server.close(drain_s=0)


async def test_a_task_refused_by_a_draining_replica_is_not_charged_a_retry():
    """It is sent over an idle connection to a replica that began to drain since."""
    first, second = ResumableReplica(), ResumableReplica()
    async with serving(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        await answer_of(backend)
        first.server._closing = True
        assert (await answer_of(backend)).text == TEXT
    assert (len(first.tasks), len(second.tasks)) == (1, 1)


async def test_an_answer_is_not_continued_by_another_model():
    first, other, same = (
        ResumableReplica(dies_at=4),
        ResumableReplica(model="two"),
        ResumableReplica(),
    )
    async with serving(first, other, same) as (backend, _):
        assert (await answer_of(backend)).text == TEXT
    assert not other.tasks
    first, other = ResumableReplica(halts_at=4, dies_at=4), ResumableReplica(model="two")
    async with serving(first, other) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        del replica_set.addresses[0]
        first.resume.set()
        with pytest.raises(ReplicaLostError, match="replaced by another one"):
            await answer


class OnceDeadReplica(ResumableReplica):
    """Its first task finds a dead engine, which a retry does not."""

    async def generate(self, task):
        self.error = None if self.tasks else EngineDeadError("dead")
        async for delta in super().generate(task):
            yield delta


async def test_a_replica_that_failed_once_continues_an_answer_beside_another_model():
    first, other = ResumableReplica(halts_at=4, dies_at=4), ResumableReplica(model="two")
    same = OnceDeadReplica()
    async with serving(first, other, same) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        del replica_set.addresses[0]
        first.resume.set()
        assert (await answer).text == TEXT
    assert len(same.tasks) == 2 and not other.tasks


async def test_a_replica_that_failed_once_answers_beside_one_that_could_not_load_the_model():
    unserved = ResumableReplica(model="", error=ModelUnavailableError("cannot be served"))
    async with serving(unserved, OnceDeadReplica()) as (backend, _):
        assert (await answer_of(backend)).text == TEXT
    assert not unserved.tasks


async def test_an_answer_waits_while_the_only_other_replica_could_not_load_the_model():
    first = ResumableReplica(halts_at=4, dies_at=4)
    unserved = ResumableReplica(model="", error=ModelUnavailableError("cannot be served"))
    later = ResumableReplica()
    async with serving(first, unserved) as (backend, replica_set):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: first.halted)
        del replica_set.addresses[0]
        first.resume.set()
        await until(lambda: answer.done() or replica_set.choices > 4)
        replica_set.addresses.append(await later.start())
        try:
            assert (await answer).text == TEXT
        finally:
            await later.server.close(drain_s=0)
    assert not unserved.tasks


async def test_an_answer_without_tokens_may_come_from_another_model():
    first, other = ResumableReplica(dies_at=0), ResumableReplica(model="two")
    async with serving(first, other) as (backend, _):
        assert (await answer_of(backend)).text == TEXT


async def test_a_full_replica_is_skipped():
    full, free = ResumableReplica(error=OverloadedError("full")), ResumableReplica()
    async with serving(full, free) as (backend, _):
        assert (await answer_of(backend)).text == TEXT
    assert (len(full.tasks), len(free.tasks)) == (1, 1)


async def test_the_task_fails_at_once_if_all_replicas_are_full():
    replicas = [ResumableReplica(error=OverloadedError(f"full {index}")) for index in range(3)]
    async with serving(*replicas) as (backend, _):
        with pytest.raises(OverloadedError, match="full 2"):
            await answer_of(backend)
    assert [len(replica.tasks) for replica in replicas] == [1, 1, 1]


async def test_the_number_of_refusals_is_limited():
    replicas = [ResumableReplica(error=OverloadedError("full")) for _ in range(9)]
    async with serving(*replicas) as (backend, _):
        with pytest.raises(OverloadedError):
            await answer_of(backend)
    assert 1 < sum(len(replica.tasks) for replica in replicas) < 9


async def test_a_stream_that_has_begun_waits_for_a_full_replica():
    first, full = ResumableReplica(dies_at=4), ResumableReplica(error=OverloadedError("full"))
    async with serving(first, full) as (backend, _):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: len(full.tasks) > 2)
        full.error = None
        assert (await answer).text == TEXT


async def test_a_request_error_of_a_replica_is_final():
    first, second = ResumableReplica(error=RequestError("no")), ResumableReplica()
    async with serving(first, second) as (backend, _):
        with pytest.raises(RequestError, match="no"):
            await answer_of(backend)
    assert not second.tasks


async def test_embeddings_are_computed_again_by_another_replica():
    first, second = ResumableReplica(), ResumableReplica()

    async def dies(task):
        raise ConnectionLost("the process ended")
        yield

    async def embeds(task):
        yield ChatDelta(finish=FinishReason.STOP, vectors=(b"1234",))

    first.generate, second.generate = dies, embeds
    async with serving(first, second) as (backend, _):
        answer = await answer_of(backend, EmbeddingTask("e", "demo", (RawText("hi"),)))
    assert answer.vectors == (b"1234",)


async def test_cancelling_during_a_second_attempt_aborts_it():
    first, second = ResumableReplica(dies_at=2), ResumableReplica(halts_at=5)
    async with serving(first, second) as (backend, _):
        answer = asyncio.create_task(answer_of(backend))
        await until(lambda: second.halted)
        answer.cancel()
        await until(lambda: not second.running)
