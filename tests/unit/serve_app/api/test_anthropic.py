"""Anthropic's protocol in front of a fake model, with plain HTTP and the official client."""

import base64
import dataclasses
import json
from typing import Any

import anthropic
import pytest

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import ImagePart, Message, ReplyStart, ToolCall
from runtime.engine.request import FinishReason
from runtime.errors import CaravanError, GenerationFailedError, OverloadedError
from serve_app.api.anthropic_reply import MessageEncoder
from serve_app.api.keys import ApiKey
from serve_app.api.reply_reader import ReplyReader
from serve_app.config.options import Options
from serve_app.messages.tasks import ChatDelta, ReplyOpening
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import (
    CARD,
    USAGE,
    PretendReplica,
    anthropic_client,
    http_client,
)
from tests.vision_prompts import png

PATH = "/v1/messages"
USER = [{"role": "user", "content": "How is it in Paris?"}]
QWEN3 = ReplyOpening(format_of("tools <tool_call> <think> </think>"))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CALLING = (
    "<think>\nI ",
    "call.\n</think>\n\nLet me look.\n<tool_c",
    'all>\n{"name": "weather", "arguments": {"city": "Par',
    'is"}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
)
BROKEN = ('<tool_call>{"name": "weather", "arguments": {"city": ', "Paris}}</tool_call>")
PARTS = [
    {"type": "thinking", "thinking": "I call.", "signature": "unsigned"},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
    {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
]
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision"))
PICTURE = png(4, 6)
IMAGE = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(PICTURE).decode(),
    },
}


async def post(
    replica: PretendReplica | None = None, *, path: str = PATH, access: Any = None, **body
):
    async with http_client(replica or PretendReplica(), **(access or {})) as client:
        given = {"model": "demo", "max_tokens": 64, "messages": USER} | body
        return await client.post(PATH, json=given)


async def task_of(*, access: Any = None, **body: Any):
    replica = PretendReplica()
    response = await post(replica, access=access, **body)
    assert response.status_code == 200, response.text
    (task,) = replica.tasks
    return task


def asked(**change: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 64, "messages": USER} | change


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are the types in their data."""
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "id"} for each in blocks]


async def test_a_reply_is_whole_by_default():
    reply = (await post()).json()
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_a_stream_has_the_events_of_one_text_block():
    response = await post(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    start, begin, *deltas, end, last, stop = events(response.text)
    assert start["type"] == "message_start"
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    block = {"type": "text", "text": ""}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": block}
    assert "".join(each["delta"]["text"] for each in deltas) == "Hello, world"
    assert end == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (last["usage"]["cache_read_input_tokens"], last["usage"]["output_tokens"]) == (4, 3)
    assert stop == {"type": "message_stop"}


async def test_a_reply_without_text_has_no_blocks():
    assert (await post(PretendReplica(()))).json()["content"] == []
    streamed = events((await post(PretendReplica(()), stream=True)).text)
    assert [each["type"] for each in streamed] == ["message_start", "message_delta", "message_stop"]


async def test_a_whole_reply_has_its_blocks_in_the_order_of_the_output():
    reply = (await post(PretendReplica(CALLING, QWEN3), tools=[TOOL])).json()
    assert without_ids(reply["content"]) == PARTS
    assert reply["stop_reason"] == "tool_use"
    first, second = reply["content"][2:]
    assert first["id"] != second["id"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_malformed_call_is_text(stream):
    response = await post(PretendReplica(BROKEN, QWEN3), tools=[TOOL], stream=stream)
    if stream:
        found = [e for e in events(response.text) if e["type"] == "content_block_delta"]
        text = "".join(each["delta"]["text"] for each in found)
        assert events(response.text)[-2]["delta"]["stop_reason"] == "end_turn"
    else:
        (block,) = response.json()["content"]
        text = block["text"]
    assert text == "".join(BROKEN)


@pytest.mark.parametrize(
    ("most", "reason"), [(3, "max_tokens"), (4, "model_context_window_exceeded")]
)
def test_a_reply_that_reaches_its_limit_or_fills_the_context_says_so(most, reason):
    delta = ChatDelta("Hello", (1,), finish=FinishReason.LENGTH, usage=USAGE)

    def encoder() -> MessageEncoder:
        return MessageEncoder("demo", ReplyReader(), max_tokens=most)

    whole = json.loads(encoder().whole(delta))
    assert whole["stop_reason"] == reason
    streamed = events(encoder().piece(delta).decode())
    assert streamed[-2]["delta"]["stop_reason"] == reason
    assert streamed[0]["message"]["usage"]["cache_read_input_tokens"] == 4


def test_the_usage_has_the_tokens_of_the_thinking():
    usage = dataclasses.replace(USAGE, thinking_tokens=2)
    delta = ChatDelta("Hello", (1,), finish=FinishReason.STOP, usage=usage)
    whole = json.loads(MessageEncoder("demo", ReplyReader()).whole(delta))
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    streamed = events(MessageEncoder("demo", ReplyReader()).piece(delta).decode())
    assert streamed[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


async def test_options_reach_the_engine():
    task = await task_of(
        temperature=0.5, top_p=0.8, top_k=7, stop_sequences=["end"], metadata={"user_id": "u"}
    )
    sampling = task.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.8, 7)
    assert (task.max_tokens, task.stop) == (64, ("end",))


async def test_defaults_are_the_models_own_and_then_ollamas():
    options = Options(top_k=5, num_predict=3, stop=("x",))
    task = await task_of(access={"options": options})
    assert (task.sampling.temperature, task.sampling.top_k) == (0.8, 5)
    assert (task.max_tokens, task.stop) == (64, ("x",))


async def test_a_turn_without_content_is_kept():
    messages = [*USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": []}]
    assert (await task_of(messages=messages)).prompt.messages[2] == Message("user", "")


async def test_a_history_with_calls_and_images_reaches_the_template():
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I call.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let "},
                {"type": "text", "text": "me look.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And "},
                {"type": "text", "text": "this: "},
                IMAGE,
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "See "}, IMAGE],
                },
                {"type": "tool_result", "tool_use_id": "t2", "content": "Fine.", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    access = {"card": SEEING}
    prompt = (await task_of(messages=messages, system=system, tools=[TOOL], access=access)).prompt
    call = ToolCall("weather", {"city": "Paris"}, "t1")
    picture = ImagePart(PICTURE)
    assert prompt.messages == (
        Message("system", "Be brief."),
        Message("user", "How is it in Paris?"),
        Message("assistant", "Let me look.", thinking="I call.", tool_calls=(call,)),
        Message("tool", ("See ", picture), tool_call_id="t1"),
        Message("tool", "Fine.", tool_call_id="t2"),
        Message("tool", "", tool_call_id="t3"),
        Message("user", ("And this: ", picture)),
    )
    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    assert prompt.tools == ({"type": "function", "function": function},)


async def test_the_answer_continues_a_last_message_of_the_assistant():
    begun = {"role": "assistant", "content": [{"type": "text", "text": "{"}]}
    prompt = (await task_of(messages=[*USER, begun])).prompt
    assert prompt.messages[-1] == Message("assistant", "{")
    assert prompt.reply is ReplyStart.CONTINUED
    assert (await task_of(messages=[begun, *USER])).prompt.reply is ReplyStart.NEW


async def test_system_messages_stay_at_their_place():
    change = {"role": "system", "content": [{"type": "text", "text": "Be long."}]}
    messages = [*USER, {"role": "assistant", "content": "Fine."}, change, *USER]
    prompt = (await task_of(system="Be brief.", messages=messages)).prompt
    assert [(each.role, each.text) for each in prompt.messages] == [
        ("system", "Be brief."), ("user", "How is it in Paris?"), ("assistant", "Fine."),
        ("system", "Be long."), ("user", "How is it in Paris?"),
    ]  # fmt: skip


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}, *USER]}


BAD = [
    ({"model": ""}, "model is required"),
    ({"max_tokens": None}, "max_tokens is required and must be positive"),
    ({"max_tokens": 0}, "max_tokens is required and must be positive"),
    ({"max_tokens": "9"}, 'field "max_tokens" must be of type integer'),
    ({"messages": []}, "messages is required"),
    ({"messages": [{"role": "tool", "content": "x"}, *USER]}, '"messages[0].role" is "tool"'),
    (blocks(IMAGE, role="system"), '"messages[0].content[0]" is of type "image"'),
    ({"temperature": "hot"}, 'field "temperature" must be of type float32'),
    ({"stop_sequences": [""]}, 'field "stop_sequences" has an empty string'),
    ({"stop_sequences": "x"}, 'field "stop_sequences" must be of type array'),
    ({"thinking": {"type": "hard"}}, 'field "thinking.type" is "hard"'),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, '"thinking.budget_tokens" is 0'),
    ({"thinking": {"type": "enabled", "budget_tokens": 64}}, 'field "max_tokens" is 64; it must'),
    ({"thinking": {"type": "enabled", "display": "x"}}, 'field "thinking.display" is "x"'),
    ({"output_config": {"effort": "huge"}}, 'field "output_config.effort" is "huge"'),
    ({"mcp_servers": [{"url": "x"}]}, 'field "mcp_servers" is not served yet'),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        '"tools[0].type" is "web_',
    ),
    ({"tools": [{"name": "f"}]}, 'field "tools[0].input_schema" is required'),
    ({"tools": [{**TOOL, "name": "a b"}]}, 'field "tools[0].name" must match'),
    ({"tools": [TOOL, TOOL]}, 'field "tools" has the name "weather" twice'),
    ({"tool_choice": "auto"}, 'field "tool_choice" must be an object'),
    ({"tool_choice": {"type": "most"}}, '"tool_choice.type" is "most"; it must be one of'),
    ({"system": [IMAGE]}, 'field "system[0]" is of type "image"'),
    (blocks({"type": "container_upload"}), 'content[0]" is of type "container_upload"'),
    (blocks("x"), 'field "messages[0].content[0]" must be an object with a type'),
    (blocks({"type": "text"}), 'field "messages[0].content[0].text" must be a string'),
    (blocks(IMAGE, role="assistant"), 'content[0]" is of type "image"'),
    (blocks({"type": "image"}), 'field "messages[0].content[0].source" must be an object'),
    (
        blocks({"type": "image", "source": {"type": "file", "file_id": "f"}}),
        "invalid image source type: file. Only base64 images",
    ),
    (
        blocks({"type": "image", "source": {"type": "url", "url": "http://a.test/x.png"}}),
        "image URLs are not currently supported",
    ),
    (blocks({"type": "tool_result"}), '"messages[0].content[0].tool_use_id" must be a string'),
    (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "video"}]}),
        '"messages[0].content[0].content[0]" is of type "video"',
    ),
    (
        blocks({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}, role="assistant"),
        '"messages[0].content[0].input" must be an object',
    ),
    (
        blocks({"type": "tool_use", "name": "f", "input": {}}, role="assistant"),
        '"messages[0].content[0].id" must be a string',
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
async def test_bad_requests_are_refused_by_name_in_the_protocols_shape(change, message):
    response = await post(access={"card": SEEING}, stream=True, **change)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]  # which is in the logs


async def test_images_are_refused_for_a_model_without_vision():
    response = await post(**blocks(IMAGE))
    assert (response.status_code, response.json()["type"]) == (400, "error")
    assert "data required for image input" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("POST", f"{PATH}/count_tokens", 400, "invalid_request_error"),
    ],
)
async def test_paths_below_messages_have_the_protocols_errors(method, path, status, kind):
    async with http_client(PretendReplica()) as client:
        response = await client.request(method, path)
        other = await client.post("/v1/nothing")
    assert response.status_code == status
    assert (response.json()["type"], response.json()["error"]["type"]) == ("error", kind)
    assert "type" not in other.json()
    assert PATH in other.json()["error"]["message"]


async def test_the_heartbeat_of_a_stream_is_a_ping():
    assert events(MessageEncoder("demo", ReplyReader()).heartbeat.decode()) == [{"type": "ping"}]


async def test_the_official_client_streams_thinking_text_and_tools():
    replica = PretendReplica(CALLING, QWEN3)
    async with (
        anthropic_client(replica) as client,
        client.messages.stream(**asked(tools=[TOOL])) as stream,
    ):
        seen = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert seen.count("content_block_stop") == 4
    found = [block.model_dump() for block in message.content]
    shown = [{name: b[name] for name in part} for b, part in zip(found, PARTS, strict=True)]
    assert shown == PARTS
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == USAGE.completion_tokens


async def test_the_official_client_sends_calls_and_results_back():
    replica = PretendReplica(CALLING, QWEN3)
    async with anthropic_client(replica) as client:
        reply = await client.messages.create(**asked(tools=[TOOL]))
        calls = [block for block in reply.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "Fine."} for call in calls
        ]
        answered = [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results},
        ]
        await client.messages.create(**asked(tools=[TOOL], messages=[*USER, *answered]))
    _, first, *shown = replica.tasks[1].prompt.messages
    assert (first.text, first.thinking) == ("Let me look.", "I call.")
    assert [(call.id, call.arguments["city"]) for call in first.tool_calls] == [
        (calls[0].id, "Paris"),
        (calls[1].id, "Rome"),
    ]
    assert shown == [Message("tool", "Fine.", tool_call_id=call.id) for call in calls]


async def test_the_official_client_sends_images():
    replica = PretendReplica()
    content = [IMAGE, {"type": "text", "text": "What is it?"}]
    async with anthropic_client(replica, card=SEEING) as client:
        await client.messages.create(**asked(messages=[{"role": "user", "content": content}]))
    (message,) = replica.tasks[0].prompt.messages
    assert message.content == (ImagePart(PICTURE), "What is it?")


async def test_the_official_clients_beta_is_the_same_endpoint():
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "Be brief.", **cached}]
    body = asked(system=system, tools=[{**TOOL, **cached}], metadata={"user_id": "u"})
    replica = PretendReplica(CALLING, QWEN3)
    async with anthropic_client(replica, strict_fields=True) as client:
        plain = await client.messages.create(**body)
        beta = await client.beta.messages.create(
            **body,
            betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        )
    shown = [block.to_dict() for block in beta.content]
    assert without_ids(shown) == PARTS
    assert [block.type for block in plain.content] == [part["type"] for part in PARTS]
    first, second = replica.tasks
    assert first.prompt == second.prompt


KEYS: tuple[ApiKey, ...] = (api_key("good"), api_key("slow", requests_per_minute=1))


@pytest.mark.parametrize(
    ("key", "change", "error", "raised"),
    [
        ("bad", {}, None, anthropic.AuthenticationError),
        ("good", {"model": "other"}, None, anthropic.NotFoundError),
        ("good", {"tools": [{"name": "f"}]}, None, anthropic.BadRequestError),
        ("good", {"system": "x" * 100_000}, None, anthropic.RequestTooLargeError),
        ("good", {}, OverloadedError("full"), anthropic.ServiceUnavailableError),
        ("good", {}, GenerationFailedError("broken"), anthropic.InternalServerError),
    ],
)
async def test_errors_are_the_official_clients_exceptions(
    key: str, change: Any, error: CaravanError | None, raised: type[anthropic.APIStatusError]
):
    replica = PretendReplica()
    replica.error = error
    async with anthropic_client(replica, key=key, api_keys=KEYS) as client:
        with pytest.raises(raised) as whole:
            await client.messages.create(**asked(**change))
        with pytest.raises(raised) as streamed:
            await client.messages.create(**asked(**change), stream=True)
    for caught in (whole, streamed):
        assert type(caught.value) is raised
        assert caught.value.body["type"] == "error"
        assert caught.value.body["request_id"] == caught.value.request_id


async def test_requests_beyond_the_limits_of_their_key_are_refused():
    async with anthropic_client(PretendReplica(), key="slow", api_keys=KEYS) as client:
        await client.messages.create(**asked())
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**asked())
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_stream_that_fails_later_raises_in_the_official_client():
    replica = PretendReplica()
    replica.fails_after = 1
    text = ""
    async with anthropic_client(replica) as client:
        stream = await client.messages.create(**asked(stream=True))
        with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
            async for event in stream:
                text += event.delta.text if event.type == "content_block_delta" else ""
    assert text == "Hello"
