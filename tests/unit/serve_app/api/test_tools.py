"""Tool calls and thinking over both protocols, streamed and whole."""

import json
from typing import Any

import pytest

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ToolCall
from runtime.engine.request import FinishReason
from runtime.errors import RequestError
from serve_app.api.openai import event
from serve_app.api.openai_chat import ChatChoice
from serve_app.api.reply_reader import ReplyReader
from serve_app.api.tool_choice import ToolChoice, call_rule
from serve_app.messages.tasks import ChatDelta, Conversation, ReplyOpening
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

QWEN3 = ReplyOpening(format_of("tools <tool_call> <think> </think>"))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}
QUESTION = [{"role": "user", "content": "How is it in Paris?"}]
CALLING = (
    "<think>\nI ",
    "call.\n</think>\n\nLet me look.\n<tool_c",
    'all>\n{"name": "weather", "argum',
    'ents": {"city": "Par',
    'is"}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
)
BROKEN = ('<tool_call>{"name": "weather", "arguments": {"city": ', "Paris}}</tool_call>")


async def posted(path: str, replica: PretendReplica, **body: Any) -> Any:
    async with http_client(replica) as client:
        response = await client.post(path, json={"model": "demo", "messages": QUESTION} | body)
    assert response.status_code == 200, response.text
    return response


def chunks(response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def joined(response) -> dict[str, Any]:
    """The message of an OpenAI stream, put together as its clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": {}}
    for chunk in chunks(response):
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for piece in delta.get("tool_calls", []):
            call = message["tool_calls"].setdefault(piece["index"], {"arguments": ""})
            call |= {name: piece[name] for name in ("id", "type") if name in piece}
            call["name"] = piece["function"].get("name", call.get("name"))
            call["arguments"] += piece["function"]["arguments"]
    return message


async def test_openais_single_reply_has_calls_and_reasoning_beside_the_text():
    replica = PretendReplica(CALLING, QWEN3)
    response = await posted("/v1/chat/completions", replica, tools=[TOOL])
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "I call.")
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert json.loads(second["function"]["arguments"]) == {"city": "Rome"}
    assert first["id"] != second["id"]


async def test_openais_stream_adds_up_to_the_same_message():
    replica = PretendReplica(CALLING, QWEN3)
    response = await posted("/v1/chat/completions", replica, tools=[TOOL], stream=True)
    message = joined(response)
    assert (message["content"], message["reasoning"]) == ("Let me look.", "I call.")
    assert [call["name"] for call in message["tool_calls"].values()] == ["weather"] * 2
    assert json.loads(message["tool_calls"][0]["arguments"]) == {"city": "Paris"}
    assert chunks(response)[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks(response)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_openais_stream_sends_arguments_as_they_are_generated():
    choice = ChatChoice(0, ReplyReader([TOOL]))
    deltas = [ChatDelta(CALLING[0], opening=QWEN3), *map(ChatDelta, CALLING[1:])]
    said = [b"".join(map(event, choice.chunks(delta))) for delta in deltas]
    assert b'"function":{"arguments":"{\\"city\\": \\"Par"}' in said[3]
    assert b'"function":{"arguments":"is\\"}"}' in said[4]


@pytest.mark.parametrize("stream", [True, False])
async def test_openais_reply_has_no_reasoning_if_the_request_excludes_it(stream):
    replica = PretendReplica(CALLING, QWEN3)
    response = await posted(
        "/v1/chat/completions", replica, tools=[TOOL], include_reasoning=False, stream=stream
    )
    assert "reasoning" not in response.text.replace("reasoning_tokens", "")
    assert "Let me look." in response.text


async def test_anthropics_omitted_thinking_leaves_an_empty_block_with_a_signature():
    body = {"max_tokens": 64, "thinking": {"type": "adaptive", "display": "omitted"}}
    response = await posted("/v1/messages", PretendReplica(CALLING, QWEN3), **body)
    first, second, *_ = response.json()["content"]
    assert first == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert second["text"].startswith("Let me look.")
    streamed = await posted("/v1/messages", PretendReplica(CALLING, QWEN3), stream=True, **body)
    assert "signature_delta" in streamed.text
    assert "thinking_delta" not in streamed.text


async def test_ollamas_whole_reply_has_calls_with_objects_as_arguments():
    replica = PretendReplica(CALLING, QWEN3)
    response = await posted("/api/chat", replica, tools=[TOOL], stream=False)
    message = response.json()["message"]
    assert (message["content"], message["thinking"]) == ("Let me look.", "I call.")
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Paris"}},
        {"index": 1, "name": "weather", "arguments": {"city": "Rome"}},
    ]
    assert response.json()["done_reason"] == "stop"


async def test_ollamas_stream_sends_each_call_when_it_is_complete():
    replica = PretendReplica(CALLING, QWEN3)
    response = await posted("/api/chat", replica, tools=[TOOL])
    messages = [json.loads(line)["message"] for line in response.text.splitlines()]
    assert "".join(message["content"] for message in messages) == "Let me look."
    assert "".join(message.get("thinking", "") for message in messages) == "I call."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert [call["function"]["arguments"]["city"] for call in calls] == ["Paris", "Rome"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_malformed_call_of_ollama_is_text(stream):
    replica = PretendReplica(BROKEN, QWEN3)
    response = await posted("/api/chat", replica, tools=[TOOL], stream=stream)
    lines = [json.loads(line)["message"] for line in response.text.splitlines()]
    assert "".join(line["content"] for line in lines) == "".join(BROKEN)


async def test_a_malformed_call_in_a_single_reply_of_openai_is_text():
    replica = PretendReplica(BROKEN, QWEN3)
    response = await posted("/v1/chat/completions", replica, tools=[TOOL])
    (choice,) = response.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "".join(BROKEN)}
    assert choice["finish_reason"] == "stop"


async def test_a_malformed_call_in_a_stream_of_openai_is_not_sent_again_as_text():
    replica = PretendReplica(BROKEN, QWEN3)
    response = await posted("/v1/chat/completions", replica, tools=[TOOL], stream=True)
    message = joined(response)
    (call,) = message["tool_calls"].values()
    assert (call["name"], call["arguments"]) == ("weather", '{"city": Paris}')
    assert message["content"] == "}</tool_call>"
    assert chunks(response)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_the_length_cuts_is_sent_once():
    choice = ChatChoice(0, ReplyReader([TOOL]))
    cut = ChatDelta(finish=FinishReason.LENGTH)
    sent = [*choice.chunks(ChatDelta(BROKEN[0], opening=QWEN3)), *choice.chunks(cut)]
    assert [chunk["delta"] for chunk in sent if chunk["delta"].get("content")] == []
    assert sent[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("arguments", ['{"city": ', "{}}", "[1]", "5", '"x"', "", "NaN"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_call_in_the_history_without_a_json_object_has_no_arguments(path, arguments):
    called = {"name": "weather", "arguments": arguments}
    chat = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "a1", "function": called}]},
        {"role": "tool", "tool_call_id": "a1", "content": "Invalid arguments."},
    ]
    items = [
        *QUESTION,
        {"type": "function_call", "call_id": "a1", **called},
        {"type": "function_call_output", "call_id": "a1", "output": "Invalid arguments."},
    ]
    replica = PretendReplica()
    body = {"messages": chat} if path == "/v1/chat/completions" else {"input": items}
    async with http_client(replica) as client:
        response = await client.post(path, json={"model": "demo"} | body)
    assert response.status_code == 200, response.text
    assert replica.tasks[0].prompt.messages[1].tool_calls == (ToolCall("weather", {}, "a1"),)


async def test_without_tools_a_call_is_text():
    replica = PretendReplica(BROKEN, QWEN3)
    response = await posted("/v1/chat/completions", replica)
    assert response.json()["choices"][0]["message"]["content"] == "".join(BROKEN)


async def test_tool_choice_none_hides_the_tools():
    replica = PretendReplica()
    await posted("/v1/chat/completions", replica, tools=[TOOL], tool_choice="none")
    assert replica.tasks[0].prompt.tools == ()


CALL = ToolCall("weather", {"city": "Paris"}, "abcdef123")
HISTORY = (
    Message("user", "How is it?"),
    Message("assistant", "", thinking="I call.", tool_calls=(CALL,)),
    Message("tool", "Fine.", tool_call_id="abcdef123"),
)


async def test_a_history_of_openai_with_calls_reaches_the_template():
    called = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I call.",
            "tool_calls": [{"id": "abcdef123", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "abcdef123", "content": "Fine."},
    ]
    replica = PretendReplica()
    await posted("/v1/chat/completions", replica, messages=messages, tools=[TOOL])
    assert replica.tasks[0].prompt == Conversation(HISTORY, tools=(TOOL,))


@pytest.mark.parametrize("answer", [{"tool_name": "weather"}, {"tool_call_id": "abcdef123"}, {}])
async def test_a_history_of_ollama_with_calls_reaches_the_template(answer):
    called = {"name": "weather", "arguments": {"city": "Paris"}}
    messages = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "thinking": "I call.",
            "tool_calls": [{"id": "abcdef123", "function": called}],
        },
        {"role": "tool", "content": "Fine."} | answer,
    ]
    replica = PretendReplica()
    await posted("/api/chat", replica, messages=messages, tools=[TOOL], think=True)
    (_, _, result) = messages = replica.tasks[0].prompt.messages
    assert messages[:2] == HISTORY[:2]
    assert result == Message("tool", "Fine.", **answer)
    assert replica.tasks[0].prompt.thinking is True


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "xhigh"}, "max"),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, "high"),
    ],
)
async def test_the_effort_of_openai_reaches_the_template(body, thinking):
    replica = PretendReplica()
    await posted("/v1/chat/completions", replica, **body)
    assert replica.tasks[0].prompt.thinking == thinking


def test_the_schemas_of_tools_have_a_limit_together() -> None:
    many = {"properties": {f"a{at}": {} for at in range(300)}}
    further = {"additionalProperties": {"properties": {f"b{at}": {} for at in range(100)}}}
    tools = [
        {"function": {"name": f"f{at}", "parameters": {"allOf": [many, further]}}}
        for at in range(4)
    ]
    names = [tool["function"]["name"] for tool in tools]
    assert call_rule(tools[:3], ToolChoice(), strict=names[:3], parallel=True)
    with pytest.raises(RequestError, match="100,000 parts"):
        call_rule(tools, ToolChoice(), strict=names, parallel=True)
