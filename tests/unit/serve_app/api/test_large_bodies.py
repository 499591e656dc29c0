"""Work on large bodies happens in a thread, by turns, and with pauses."""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from serve_app.api.fields import INLINE_OBJECTS, MAX_ITEMS
from serve_app.api.large_bodies import LargeBodies, configure_process
from serve_app.api.openai_chat import ChatCompletionBody
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client
from tests.virtual_time import VirtualLoop, in_virtual_time

QUESTION = {"role": "user", "content": "a"}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NATIVE_CALL = {"function": {"name": "f", "arguments": {}}}
TOOL_USE = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
CALL_ITEM = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}


def calling(calls: list[dict[str, object]]) -> dict[str, object]:
    return {"role": "assistant", "content": "", "tool_calls": calls}


SEARCH = {"type": "web_search"}  # is left out
# By path, bodies of two messages or tools for each of `count`.
BODIES: dict[str, Callable[[int], dict[str, object]]] = {
    "/v1/chat/completions": lambda count: {"messages": [QUESTION, calling([CALL])] * count},
    "/api/chat": lambda count: {
        "messages": [QUESTION, calling([NATIVE_CALL])] * count,
        "stream": False,
    },
    "/v1/messages": lambda count: {
        "messages": [{"role": "assistant", "content": [TOOL_USE]}, QUESTION] * count,
        "max_tokens": 5,
    },
    "/v1/responses": lambda count: {"input": [QUESTION, CALL_ITEM] * count},
    "/v1/responses?of=tools": lambda count: {
        "input": "a",
        "tools": [SEARCH] * count + [{"name": f"f{index}"} for index in range(count)],
    },
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_event_loop_calls_no_function_for_each_message_of_a_large_body(path):
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    async def calls_for(size: int) -> int:
        nonlocal calls
        content = json.dumps({"model": "demo"} | BODIES[path](size))
        async with http_client(PretendReplica(), max_body_bytes=2**20) as client:
            calls = 0
            sys.setprofile(count)  # of this thread, in which the replica runs too
            try:
                response = await client.post(path, content=content)
            finally:
                sys.setprofile(None)
        assert response.status_code == 200, response.text
        return calls

    await calls_for(INLINE_OBJECTS)  # what only the first request does
    few = await calls_for(INLINE_OBJECTS)
    assert await calls_for(4 * INLINE_OBJECTS) - few < INLINE_OBJECTS


async def test_a_body_is_finished_before_the_next_and_tenants_have_turns():
    large, order = LargeBodies(), []

    async def answer(tenant: str, name: str) -> None:
        await large.begin(tenant, lambda: order.append(f"{name} begins"))
        await large.proceed(lambda: order.append(f"{name} ends"))

    await asyncio.gather(
        *[answer(tenant, f"{tenant}{n}") for tenant, n in ("a1", "a2", "a3", "b1")]
    )
    expected = [
        f"{name} {does}" for name in ("a1", "a2", "b1", "a3") for does in ("begins", "ends")
    ]
    assert order == expected


class WorkingLoop(VirtualLoop):
    """Does the work of threads at once, so that its clock does not go on meanwhile."""

    def run_in_executor(self, executor: object, work: Callable[..., object], *args: object):
        future = self.create_future()
        future.set_result(work(*args))
        return future


def test_the_thread_pauses_for_as_long_as_it_has_worked():
    begun_s = []

    async def work_on(bodies: int) -> None:
        loop, large = asyncio.get_running_loop(), LargeBodies()
        assert isinstance(loop, WorkingLoop)

        def work() -> None:
            begun_s.append(loop.time())
            loop.skip(2.0)

        async def answer() -> None:
            await large.begin("a", work)
            await large.proceed(work)

        await asyncio.gather(*[answer() for _ in range(bodies)])

    in_virtual_time(work_on(3), loop_factory=WorkingLoop)
    assert begun_s == pytest.approx([0, 2, 8, 10, 16, 18])


@pytest.fixture
def process() -> Iterator[None]:
    """As in a replica of Serve, which freezes the objects that exist at its start.

    They stay frozen, as all objects of imports do in tests (see tests/conftest.py).
    """
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.collect()
    gc.freeze()
    configure_process()
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval_s)


def test_large_bodies_cause_few_collections_of_the_oldest_generation(process):
    def collections() -> int:
        return gc.get_stats()[2]["collections"]

    before = collections()
    body = {"messages": [calling([CALL, CALL])] * MAX_ITEMS}
    kept = [ChatCompletionBody.model_validate(body) for _ in range(10)]
    assert collections() - before <= 1
    assert len(kept) == 10


async def test_failed_and_cancelled_work_gives_its_turn_back():
    large = LargeBodies()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        await large.begin("a", fail)
    cancelled = asyncio.create_task(large.begin("a", lambda: None))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await large.begin("a", lambda: 1) == 1
