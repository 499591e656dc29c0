"""Stored responses through the official client: continuing, retrieving, listing, deleting."""

import asyncio
import dataclasses
import json
import sys
from types import FrameType
from typing import Any

import openai
import pytest

from model_zoo.chat.messages import ImagePart, Message, ToolCall
from serve_app.api.bodies import BodyLimits
from serve_app.api.fields import INLINE_OBJECTS
from serve_app.api.responses_history import READS_AT_ONCE, ResponseHistory
from serve_app.api.responses_input import new_response_id
from serve_app.responses.response_store import ResponseStore, Selection, StoredResponse, StoreLimits
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.test_request_images import data_uri
from tests.unit.serve_app.api.test_response_input import answered
from tests.unit.serve_app.api.test_responses import (
    CALLING,
    IMAGE,
    PICTURE,
    QWEN3,
    TOOL,
    URL,
)
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, openai_client
from tests.unit.serve_app.responses.fake_processes import (
    LIMITS,
    FakeProcesses,
    one_process,
    stored_by,
)
from tests.vision_prompts import png

HI = {"model": "demo", "input": "Hi"}
MORE = [{"role": "user", "content": "More"}]
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision"))


def messages(replica: PretendReplica) -> list[Message]:
    """Of the last task."""
    return list(replica.tasks[-1].prompt.messages)


async def streamed(client: openai.AsyncOpenAI, **body: Any):
    async with client.responses.stream(**body) as stream:
        return await stream.get_final_response()


async def created(client: openai.AsyncOpenAI, **body: Any):
    return await client.responses.create(**body)


@pytest.mark.parametrize("create", [created, streamed])
async def test_a_response_continues_the_ones_before_it_without_their_instructions(create):
    replica = PretendReplica()
    async with openai_client(replica, stored=one_process()) as client:
        first = await create(client, **HI, instructions="Be brief.")
        second = await create(client, model="demo", input="More", previous_response_id=first.id)
        third = await create(
            client, model="demo", input="Yet more", previous_response_id=second.id, instructions="x"
        )
    assert (first.output_text, third.previous_response_id) == ("Hello, world", second.id)
    answer = Message("assistant", "Hello, world")
    earlier = [Message("user", "Hi"), answer, Message("user", "More"), answer]
    assert messages(replica) == [Message("system", "x"), *earlier, Message("user", "Yet more")]


@pytest.mark.parametrize("create", [created, streamed])
async def test_calls_are_answered_with_their_results_only(create):
    replica = PretendReplica(CALLING, QWEN3)
    async with openai_client(replica, stored=one_process()) as client:
        first = await create(client, **HI, tools=[TOOL])
        calls = [item for item in first.output if item.type == "function_call"]
        results = [answered(item.call_id, json.loads(item.arguments)["city"]) for item in calls]
        await create(
            client, model="demo", tools=[TOOL], input=results, previous_response_id=first.id
        )
    ids = [item.call_id for item in calls]
    cities = dict(zip(ids, ("Paris", "Rome"), strict=True))
    called = tuple(ToolCall("weather", {"city": city}, id) for id, city in cities.items())
    assert messages(replica) == [
        Message("user", "Hi"),
        Message("assistant", "Let me look.", thinking="I call.", tool_calls=called),
        *[Message("tool", city, tool_call_id=id) for id, city in cities.items()],
    ]


async def test_images_are_part_of_the_conversation():
    replica = PretendReplica()
    async with openai_client(replica, stored=one_process(), card=SEEING) as client:
        first = await client.responses.create(
            model="demo", input=[{"role": "user", "content": [IMAGE]}]
        )
        await client.responses.create(**HI, previous_response_id=first.id)
    assert messages(replica)[0].content == (ImagePart(PICTURE),)


@pytest.mark.parametrize(("given", "kept"), [(1, 16), (3, 15)])
async def test_truncation_continues_a_conversation_beyond_the_limit_of_images(given, kept):
    replica, id = PretendReplica(), None
    pictures = [png(4, 6, seed=number) for number in range(18)]
    async with openai_client(replica, stored=one_process(), card=SEEING) as client:
        for turn in range(0, 18, given):
            parts = [IMAGE | {"image_url": data_uri(p)} for p in pictures[turn : turn + given]]
            content = [{"role": "user", "content": parts}]
            body = {"model": "demo", "previous_response_id": id, "instructions": "Look."}
            if turn + given > 16:
                with pytest.raises(openai.BadRequestError, match="images; at most 16 are accepted"):
                    await client.responses.create(**body, input=content)
            made = await client.responses.create(**body, input=content, truncation="auto")
            id, shown = made.id, messages(replica)
            recent = pictures[: turn + given][-kept:]
            assert [image.data for each in shown for image in each.images] == recent
            roles = ["user", "assistant"] * (len(recent) // given)
            assert [each.role for each in shown] == ["system", *roles[:-1]]
        many = [{"role": "user", "content": [IMAGE] * 17}]
        with pytest.raises(openai.BadRequestError, match="17 images; at most 16 are accepted"):
            await client.responses.create(**body, input=many, truncation="auto")


async def test_truncation_of_images_needs_no_message():
    thought = [{"type": "reasoning", "summary": [], "content": []}]
    async with openai_client(PretendReplica()) as client:
        for truncation in ("disabled", "auto"):
            await client.responses.create(model="demo", input=thought, truncation=truncation)


async def test_a_stored_response_is_retrieved_as_it_was_and_deleted_once():
    async with openai_client(PretendReplica(), stored=one_process()) as client:
        whole = await client.responses.create(**HI, metadata={"a": "b"})
        stream = [event async for event in await client.responses.create(**HI, stream=True)]
        for made in (whole, stream[-1].response):
            found = await client.responses.retrieve(made.id)
            assert found.to_dict() == made.to_dict()
            assert found.to_dict()["store"] is True
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.retrieve(made.id)
            assert caught.value.body["type"] == "invalid_request_error"
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError, match=whole.id) as refused:
            await client.responses.create(**HI, previous_response_id=whole.id)
        assert refused.value.code == "previous_response_not_found"


async def test_input_items_are_those_of_the_whole_conversation_in_pages():
    async with openai_client(PretendReplica(), stored=one_process()) as client:
        first = await client.responses.create(**HI)
        last = await client.responses.create(
            model="demo",
            input=[
                {"role": "developer", "content": "x"},
                {"role": "user", "content": [{"type": "input_text", "text": "More"}]},
            ],
            previous_response_id=first.id,
        )
        pages = client.responses.input_items.list(last.id, order="asc", limit=2)
        items = [item async for item in pages]
        newest = await client.responses.input_items.list(last.id)
        cursor = await client.responses.input_items.list(last.id, after=items[1].id, limit=1)
        for query in ({"limit": 0}, {"limit": 101}, {"after": "x"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(query))):
                await client.responses.input_items.list(last.id, extra_query=query)
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "Hi"),
        ("assistant", "Hello, world"),
        ("developer", "x"),
        ("user", "More"),
    ]
    assert [item.id for item in newest.data] == [item.id for item in items[::-1]]
    assert ([item.id for item in cursor.data], cursor.has_more) == ([items[0].id], False)


async def test_items_of_stored_responses_can_be_referred_to():
    replica = PretendReplica()
    async with openai_client(replica, stored=one_process()) as client:
        first = await client.responses.create(**HI)
        reference = {"type": "item_reference", "id": first.output[0].id}
        given = [{"role": "user", "content": "Hi"}, reference, {"role": "user", "content": "More"}]
        last = await client.responses.create(model="demo", input=given)
        listed = await client.responses.input_items.list(last.id)
    assert messages(replica)[1] == Message("assistant", "Hello, world")
    assert listed.data[1].content[0].text == "Hello, world"


async def test_an_item_can_be_referred_to_once():
    """As with OpenAI. Otherwise a short request could repeat a long item thousands of times."""
    async with openai_client(PretendReplica(), stored=one_process()) as client:
        first = await client.responses.create(**HI)
        reference = {"type": "item_reference", "id": first.output[0].id}
        with pytest.raises(openai.BadRequestError, match="Duplicate item found with id msg_"):
            await client.responses.create(model="demo", input=[reference, *MORE, reference])


async def test_the_event_loop_calls_no_function_for_each_item_of_a_long_stored_conversation():
    """Neither for the tools that items declare."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    async def calls_for(size: int) -> int:
        nonlocal calls
        tools = [{"type": "function", "name": "f"}] * size
        given = [*MORE, {"type": "additional_tools", "role": "developer", "tools": tools}]
        async with openai_client(PretendReplica(), stored=one_process()) as client:
            first = await client.responses.create(model="demo", input=given)
            reference = {"type": "item_reference", "id": first.output[0].id}
            calls = 0
            sys.setprofile(count)  # of this thread, in which the replica runs too
            try:
                previous = first.id
                await client.responses.create(**HI, previous_response_id=previous)
                await client.responses.create(model="demo", input=[reference])
            finally:
                sys.setprofile(None)
        return calls

    await calls_for(INLINE_OBJECTS)  # what only the first request does
    few = await calls_for(INLINE_OBJECTS)
    assert await calls_for(4 * INLINE_OBJECTS) - few < INLINE_OBJECTS


async def test_only_finished_responses_are_stored_so_none_can_be_cancelled():
    replica = PretendReplica()
    async with openai_client(replica, stored=one_process()) as client:
        made = await client.responses.create(**HI)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await client.responses.cancel(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel("resp_" + "0" * 32)
        with pytest.raises(openai.BadRequestError, match='"stream" of a stored response'):
            await client.responses.retrieve(made.id, stream=True)
        replica.fails_after = 1
        async with client.responses.stream(**HI) as stream:
            seen = [event async for event in stream]
        assert seen[-1].type == "response.failed"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(seen[0].response.id)


async def test_store_false_and_a_server_without_a_store_keep_nothing():
    for stored, body in ((one_process(), {"store": False}), (None, {})):
        async with openai_client(PretendReplica(), stored=stored) as client:
            made = await client.responses.create(**HI, **body)
            assert made.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_items.list(made.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                await client.responses.create(**HI, previous_response_id=made.id)


async def test_responses_belong_to_the_api_key_that_made_them():
    stored, keys = one_process(), (api_key("alice"), api_key("bob"))
    access = {"stored": stored, "api_keys": keys}
    async with openai_client(PretendReplica(), key="alice", **access) as alice:
        made = await alice.responses.create(**HI)
        async with openai_client(PretendReplica(), key="bob", **access) as bob:
            for attempt in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    await attempt(made.id)
            with pytest.raises(openai.NotFoundError):
                await bob.responses.input_items.list(made.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                await bob.responses.create(**HI, previous_response_id=made.id)
            reference = {"type": "item_reference", "id": made.output[0].id}
            with pytest.raises(openai.BadRequestError, match="not found"):
                await bob.responses.create(model="demo", input=[reference])
        assert (await alice.responses.retrieve(made.id)).output_text == "Hello, world"


async def test_every_ingress_finds_the_responses():
    stored = one_process()
    async with openai_client(PretendReplica(), stored=stored) as one:
        made = await one.responses.create(**HI)
    replica = PretendReplica()
    async with openai_client(replica, stored=stored) as other:
        await other.responses.create(**HI, previous_response_id=made.id)
    assert len(messages(replica)) == 3


async def test_a_lost_store_costs_the_state_but_not_the_answer():
    processes = FakeProcesses(ResponseStore(LIMITS))
    stored = stored_by(processes)
    async with openai_client(PretendReplica(), stored=stored) as client:
        processes.stores.clear()
        made = await client.responses.create(**HI)
        assert made.output_text == "Hello, world"
        with pytest.raises(openai.InternalServerError, match="store of responses") as caught:
            await client.responses.retrieve(made.id)
        assert caught.value.status_code == 503


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_body_bytes": 22_000}, r"at most 22,000 are accepted \(`max_body_bytes`\)"),
        ({"max_text_bytes": 22_000}, r"at most 22,000 are accepted \(`max_text_bytes`, without"),
    ],
)
async def test_conversations_have_the_limits_of_bodies(limits, message):
    image = IMAGE | {"image_url": URL + "A" * 6000}
    parts = [{"type": "input_text", "text": "x" * 6000}, image]
    body = {"model": "demo", "input": [{"role": "user", "content": parts}]}
    access = {"stored": one_process(), "card": SEEING} | limits
    async with openai_client(PretendReplica(), **access) as client:
        made = await client.responses.create(**body)
        if "max_text_bytes" in limits:  # the images do not count
            made = await client.responses.create(**body, previous_response_id=made.id)
        made = await client.responses.create(**body, previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match=message):
            await client.responses.create(**HI, previous_response_id=made.id)


async def test_conversations_are_limited_in_items():
    items = [{"role": "user", "content": ""}] * 1500
    async with openai_client(
        PretendReplica(), stored=one_process(), max_body_bytes=2**20
    ) as client:
        made = await client.responses.create(model="demo", input=items)
        with pytest.raises(openai.BadRequestError, match="at most 2,048 are accepted"):
            await client.responses.create(model="demo", input=items, previous_response_id=made.id)


async def test_an_evicted_response_cannot_be_continued():
    limits = StoreLimits(max_bytes=2**17, tenant_bytes=2**16, max_age_s=60.0)
    stored = stored_by(FakeProcesses(ResponseStore(limits)))
    async with openai_client(PretendReplica(), stored=stored) as client:
        first = await client.responses.create(model="demo", input="x" * 30_000)
        await client.responses.create(model="demo", input="x" * 30_000)
        with pytest.raises(openai.BadRequestError, match="stored for a limited time"):
            await client.responses.create(**HI, previous_response_id=first.id)
        large = await client.responses.create(model="demo", input="x" * 65_000)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(large.id)


class SlowStore:
    """Counts the conversations that are being read."""

    def __init__(self) -> None:
        self.reading = self.most = 0
        self.goes_on = asyncio.Event()

    async def conversation(self, tenant: str, id: str, *, max_bytes: int) -> Selection:
        self.reading += 1
        self.most = max(self.most, self.reading)
        await self.goes_on.wait()
        self.reading -= 1
        return Selection((StoredResponse(id, b'{"output": []}', b"[]"),))


async def test_the_number_of_conversations_read_at_once_is_limited():
    store = SlowStore()
    history = ResponseHistory(store, BodyLimits(2**20))
    reads = [asyncio.create_task(history.before("a", new_response_id())) for _ in range(20)]
    while store.reading < READS_AT_ONCE:
        await asyncio.sleep(0)
    store.goes_on.set()
    assert await asyncio.gather(*reads) == [([], False)] * 20
    assert store.most == READS_AT_ONCE
