"""Streams that outlive replicas: what their readers see, and when it is enough."""

import asyncio
import dataclasses
import time

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason, ResumeState
from runtime.errors import (
    EngineDeadError,
    ModelUnavailableError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from serve_app.gateway.failover import FailoverRules
from serve_app.gateway.tasks import (
    Candidate,
    ChatDelta,
    Conversation,
    EmbeddingTask,
    RawText,
    TokenLogprob,
)
from serve_app.transport.wire import Address
from tests.patience import HANG_S, until
from tests.unit.serve_app.speakers import (
    TASK,
    TEXT,
    WORDS,
    Speaker,
    answered,
    following,
)

NOBODY = Address("127.0.0.1", 1, "token", "nobody", "one")


@pytest.mark.parametrize("dies_at", range(len(WORDS)))
async def test_a_stream_goes_on_elsewhere_from_its_tokens(dies_at):
    first, second = Speaker(dies_at=dies_at), Speaker()
    async with following(first, second) as (backend, _):
        answer = await answered(backend)
    assert answer.text == TEXT
    assert answer.tokens == tuple(range(len(WORDS)))
    (again,) = second.tasks
    said = "".join(WORDS[:dies_at])
    assert again.begun == ResumeState(tuple(range(dies_at)), len(said))


async def test_everything_else_that_decides_an_answer_is_the_same_elsewhere():
    first, second = Speaker(dies_at=3), Speaker()
    variables = {"enable_thinking": False, "tools_in_user_message": True}
    prompt = Conversation((Message("user", "hi", name="Ann"),), variables=variables)
    async with following(first, second) as (backend, _):
        await answered(backend, dataclasses.replace(TASK, prompt=prompt))
    (one,), (two,) = first.tasks, second.tasks
    assert one.prompt == prompt
    assert one.now is not None, "templates may ask for the time"
    assert dataclasses.replace(two, begun=None) == one


async def test_it_costs_one_prompt_and_the_time_it_took():
    first, second = Speaker(dies_at=3), Speaker()
    async with following(first, second) as (backend, _):
        begun_ns = time.monotonic_ns()
        usage = (await answered(backend)).usage
        took_ns = time.monotonic_ns() - begun_ns
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (5, 4)
    assert usage.completion_tokens == len(WORDS)
    assert usage.prompt_ns == 2_000, "of the first replica"
    assert 1_000 <= usage.queue_ns < took_ns
    assert 3_000 < usage.decode_ns < took_ns


async def test_waiting_until_there_is_a_replica_is_queueing():
    """A model with no replica is started by the request, which waits until it is loaded."""
    speaker = Speaker()
    async with following(speaker) as (backend, directory):
        address = directory.addresses.pop()
        answer = asyncio.create_task(answered(backend))
        await asyncio.sleep(0.1)
        directory.addresses.append(address)
        usage = (await answer).usage
    assert usage is not None and usage.queue_ns > 0.05e9
    assert (usage.prompt_ns, usage.decode_ns) == (2_000, 3_000), "as the replica measured them"


async def test_waiting_for_a_replica_that_died_before_it_began_is_queueing():
    first, second = Speaker(dies_at=0, halts_at=0), Speaker()
    async with following(first, second) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        await asyncio.sleep(0.1)
        first.goes_on.set()
        usage = (await answer).usage
    assert usage is not None and usage.queue_ns > 0.1e9


async def test_log_probabilities_that_the_reader_lacks_are_drawn_again():
    """Three tokens were drawn and two of them shown: the second replica draws the third again."""
    shown = TokenLogprob(Candidate("a", b"a", -0.5))
    first, second = Speaker(), Speaker()
    seen: list[ResumeState | None] = []

    async def dies_holding_back(task):
        yield ChatDelta("ab", (0, 1, 2), (shown, shown))
        raise ConnectionResetError

    async def goes_on(task):
        seen.append(task.begun)
        yield ChatDelta("", (2,))
        yield ChatDelta("c", (3,), (shown, shown))
        yield ChatDelta(finish=FinishReason.STOP, tokens=(4,))

    first.server._generate, second.server._generate = dies_holding_back, goes_on
    task = dataclasses.replace(TASK, sampling=dataclasses.replace(TASK.sampling, logprobs=0))
    async with following(first, second) as (backend, _):
        answer = await answered(backend, task)
    assert seen == [ResumeState((0, 1), 2)]
    assert answer.tokens == (0, 1, 2, 3, 4)
    assert (answer.text, len(answer.logprobs)) == ("abc", 4)


async def test_as_many_replicas_may_be_lost_as_the_configuration_says():
    speakers = [Speaker(dies_at=2), Speaker(dies_at=7), Speaker()]
    async with following(*speakers, rules=FailoverRules(max_retries=2)) as (backend, _):
        assert (await answered(backend)).text == TEXT
    speakers = [Speaker(dies_at=2), Speaker(dies_at=7), Speaker()]
    async with following(*speakers, rules=FailoverRules(max_retries=1)) as (backend, _):
        with pytest.raises(ReplicaLostError, match=r"lost 2 replicas.*`failover.max_retries` is 1"):
            await answered(backend)
    assert not speakers[2].tasks


async def test_replicas_that_cannot_be_reached_cost_no_retry():
    speaker = Speaker()
    rules = FailoverRules(max_retries=0)
    async with following(speaker, rules=rules) as (backend, directory):
        directory.addresses[:0] = [
            dataclasses.replace(NOBODY, replica=name) for name in ("one", "two", "three")
        ]
        assert (await answered(backend)).text == TEXT


async def test_a_replica_that_comes_back_alone_is_waited_for():
    first, later = Speaker(dies_at=4), Speaker()
    async with following(first) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.dying)
        await asyncio.sleep(0.2)
        directory.addresses.append(await later.start())
        assert (await answer).text == TEXT
        await later.server.close(drain_s=0)


async def test_waiting_for_one_to_come_back_ends():
    first = Speaker(dies_at=4)
    async with following(first, start_timeout_s=0.3) as (backend, _):
        with pytest.raises(OverloadedError, match="no replica of model 'demo' has answered"):
            await answered(backend)


async def test_an_engine_that_dies_at_work_is_a_lost_replica():
    first, second = Speaker(error=ReplicaLostError("the engine has failed")), Speaker()
    async with following(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        with pytest.raises(ReplicaLostError, match="max_retries"):
            await answered(backend)
    async with following(Speaker(error=first.error), Speaker()) as (backend, _):
        assert (await answered(backend)).text == TEXT


async def test_an_engine_that_was_dead_before_costs_no_retry():
    first, second = Speaker(error=EngineDeadError("dead")), Speaker()
    async with following(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        assert (await answered(backend)).text == TEXT


async def test_a_silent_replica_is_lost(monkeypatch):
    """As when its machine is gone, or the process stands still: no connection breaks."""
    first, second = Speaker(dies_at=5, heartbeat_s=60), Speaker()
    monkeypatch.setattr(first, "die", lambda: None)
    async with following(first, second, rules=FailoverRules(silence_s=0.2)) as (backend, _):
        assert (await answered(backend)).text == TEXT
    assert second.tasks[0].begun == ResumeState(tuple(range(5)), len("".join(WORDS[:5])))


async def test_a_slow_replica_that_gives_signs_of_life_is_not_lost():
    slow, second = Speaker(halts_at=3), Speaker()
    async with following(slow, second, rules=FailoverRules(silence_s=0.4)) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await asyncio.sleep(1.0)
        slow.goes_on.set()
        assert (await answer).text == TEXT
    assert not second.tasks


async def test_a_replica_that_leaves_hands_its_streams_over_at_no_charge():
    first, second = Speaker(halts_at=4), Speaker()
    async with following(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        async with asyncio.timeout(HANG_S):
            await first.server.close(drain_s=60)
        assert (await answer).text == TEXT
    assert second.tasks[0].begun == ResumeState(tuple(range(4)), len("".join(WORDS[:4])))


async def test_a_replica_that_leaves_answers_on_where_there_is_no_other():
    first = Speaker(halts_at=4)
    async with following(first) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        closing = asyncio.create_task(first.server.close(drain_s=60))
        await asyncio.sleep(0.3)
        first.goes_on.set()
        assert (await answer).text == TEXT
        await closing
    assert len(first.tasks) == 1


async def test_where_there_is_no_place_for_another_the_one_that_leaves_answers_on():
    first = Speaker(halts_at=4)
    async with following(first) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        directory.problem = ModelUnavailableError("it has no place")
        closing = asyncio.create_task(first.server.close(drain_s=60))
        await asyncio.sleep(0.3)
        first.goes_on.set()
        assert (await answer).text == TEXT
        await closing
    assert len(first.tasks) == 1


async def test_a_stream_outlasts_the_time_in_which_the_cluster_has_no_place_for_its_model():
    """As when the only node for it is lost, and the next one has yet to come."""
    first, later = Speaker(dies_at=4), Speaker()
    async with following(first) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.dying)
        directory.problem = ModelUnavailableError("it has no place")
        with pytest.raises(ModelUnavailableError):
            await answered(backend)  # a new request does not wait for that
        directory.addresses = [await later.start()]
        directory.problem = None
        assert (await answer).text == TEXT
        await later.server.close(drain_s=0)
    first = Speaker(dies_at=4)
    async with following(first, start_timeout_s=0.3) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.dying)
        directory.problem = ModelUnavailableError("it has no place")
        with pytest.raises(OverloadedError, match="no replica of model 'demo' has answered"):
            await answer


async def test_a_task_that_waited_at_a_replica_that_leaves_is_not_refused_by_a_full_one():
    first, full = Speaker(halts_at=0), Speaker(error=OverloadedError("full"))
    async with following(first, full) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        async with asyncio.timeout(HANG_S):
            await first.server.close(drain_s=60)
        await until(lambda: len(full.tasks) > 2)
        full.error = None
        assert (await answer).text == TEXT
    assert full.tasks[0].begun == ResumeState(had_turn=False), "which engines never refuse"


async def test_what_a_replica_cannot_finish_before_it_goes_waits_for_the_next():
    first, later = Speaker(halts_at=4), Speaker()
    async with following(first, rules=FailoverRules(max_retries=0)) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        await first.server.close(drain_s=0.3)
        directory.addresses = [await later.start()]
        assert (await answer).text == TEXT
        await later.server.close(drain_s=0)


async def test_a_task_that_meets_a_closed_door_goes_elsewhere_at_no_charge():
    """On a connection from before, to a replica that has been told to stop since."""
    first, second = Speaker(), Speaker()
    async with following(first, second, rules=FailoverRules(max_retries=0)) as (backend, _):
        await answered(backend)
        first.server._closing = True
        assert (await answered(backend)).text == TEXT
    assert (len(first.tasks), len(second.tasks)) == (1, 1)


async def test_an_answer_does_not_go_on_with_another_model():
    first, other, same = Speaker(dies_at=4), Speaker(model="two"), Speaker()
    async with following(first, other, same) as (backend, _):
        assert (await answered(backend)).text == TEXT
    assert not other.tasks
    first, other = Speaker(halts_at=4, dies_at=4), Speaker(model="two")
    async with following(first, other) as (backend, directory):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: first.halted)
        del directory.addresses[0]
        first.goes_on.set()
        with pytest.raises(ReplicaLostError, match="replaced by another one"):
            await answer


async def test_an_answer_that_has_not_begun_may_come_from_another_model():
    first, other = Speaker(dies_at=0), Speaker(model="two")
    async with following(first, other) as (backend, _):
        assert (await answered(backend)).text == TEXT


async def test_a_full_replica_is_passed_over():
    full, free = Speaker(error=OverloadedError("full")), Speaker()
    async with following(full, free) as (backend, _):
        assert (await answered(backend)).text == TEXT
    assert (len(full.tasks), len(free.tasks)) == (1, 1)


async def test_when_all_are_full_that_is_told_at_once():
    speakers = [Speaker(error=OverloadedError(f"full {index}")) for index in range(3)]
    async with following(*speakers) as (backend, _):
        with pytest.raises(OverloadedError, match="full 2"):
            await answered(backend)
    assert [len(speaker.tasks) for speaker in speakers] == [1, 1, 1]


async def test_a_request_that_nobody_takes_does_not_ask_everybody():
    speakers = [Speaker(error=OverloadedError("full")) for _ in range(9)]
    async with following(*speakers) as (backend, _):
        with pytest.raises(OverloadedError):
            await answered(backend)
    assert 1 < sum(len(speaker.tasks) for speaker in speakers) < 9


async def test_a_stream_that_has_begun_waits_for_room():
    first, full = Speaker(dies_at=4), Speaker(error=OverloadedError("full"))
    async with following(first, full) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: len(full.tasks) > 2)
        full.error = None
        assert (await answer).text == TEXT


async def test_what_a_replica_refuses_is_refused():
    first, second = Speaker(error=RequestError("no")), Speaker()
    async with following(first, second) as (backend, _):
        with pytest.raises(RequestError, match="no"):
            await answered(backend)
    assert not second.tasks


async def test_vectors_are_asked_for_again():
    first, second = Speaker(), Speaker()

    async def dies(task):
        raise ConnectionResetError
        yield

    async def embeds(task):
        yield ChatDelta(finish=FinishReason.STOP, vectors=(b"1234",))

    first.server._generate, second.server._generate = dies, embeds
    async with following(first, second) as (backend, _):
        answer = await answered(backend, EmbeddingTask("e", "demo", (RawText("hi"),)))
    assert answer.vectors == (b"1234",)


async def test_leaving_in_the_middle_of_a_second_leg_ends_the_work_there():
    first, second = Speaker(dies_at=2), Speaker(halts_at=5)
    async with following(first, second) as (backend, _):
        answer = asyncio.create_task(answered(backend))
        await until(lambda: second.halted)
        answer.cancel()
        await until(lambda: not second.at_work)
