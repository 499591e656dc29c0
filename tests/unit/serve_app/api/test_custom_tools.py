"""Custom tools of OpenAI's protocols: declarations, calls and results, streamed and whole."""

from typing import Any

import openai
import pytest
from openai.types import responses as types

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ToolCall
from model_zoo.grammars.constraint import CallRule, OutputForm, OutputKind
from serve_app.messages.tasks import ReplyOpening
from tests.unit.serve_app.api.test_response_input import answered
from tests.unit.serve_app.api.test_responses import TOOL, events, post
from tests.unit.serve_app.api.test_tools import TOOL as FUNCTION
from tests.unit.serve_app.api.test_tools import chunks, posted
from tests.unit.serve_app.fake_replicas import PretendReplica, openai_client
from tests.unit.serve_app.responses.fake_processes import one_process

TAGS = ReplyOpening(format_of("tools <tool_call>"))
LARK = 'start: "a" | "b"'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": LARK}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR}
NESTED = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}},
    },
}
ANY = {"type": "custom", "name": "python"}
CALLING = (
    'Yes. <tool_call>{"name": "patch", "argum',
    'ents": {"input": "a\\n',
    '\\"b\\""}}</tool_call>',
)
INPUT = 'a\n"b"'
BROKEN = ('<tool_call>{"name": "patch", "arguments": {"input": a', "}}</tool_call>")


async def test_a_call_of_a_custom_tool_has_its_input_as_text() -> None:
    reply = (await post(PretendReplica(CALLING, TAGS), tools=[PATCH, TOOL])).json()
    types.Response.model_validate(reply, strict=True)
    text, call = reply["output"]
    assert text["content"][0]["text"] == "Yes."
    assert call.pop("id").startswith("ctc_") and call.pop("call_id")
    called = {"type": "custom_tool_call", "status": "completed", "name": "patch"}
    assert call == called | {"input": INPUT}
    assert reply["tools"][0] == PATCH


async def test_a_stream_reports_the_input_by_its_own_events() -> None:
    response = await post(PretendReplica(CALLING, TAGS), tools=[PATCH], stream=True)
    found = events(response.text)
    kinds = [each["type"].removeprefix("response.") for each in found]
    begin = kinds.index("output_item.added", kinds.index("output_item.done"))
    assert kinds[begin:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    added, delta, done, item, _ = found[begin:]
    assert (added["item"]["input"], delta["delta"], done["input"]) == ("", INPUT, INPUT)
    assert item["item"] == added["item"] | {"input": INPUT, "status": "completed"}
    assert {each["output_index"] for each in (added, delta, done, item)} == {1}


@pytest.mark.parametrize(
    "arguments", ['{"text": "a"}', '{"input": 5}', '{"input":"a","b":1}', '{"n": 1e999}', "{}"]
)
async def test_arguments_of_another_form_are_the_input(arguments: str) -> None:
    words = (f'<tool_call>{{"name": "python", "arguments": {arguments}}}</tool_call>',)
    reply = (await post(PretendReplica(words, TAGS), tools=[ANY])).json()
    assert reply["output"][0]["input"] == arguments


async def test_the_official_client_continues_after_the_result() -> None:
    replica = PretendReplica(CALLING, TAGS)
    stored = {"stored": one_process()}
    async with openai_client(replica, **stored) as client:
        given: dict[str, Any] = {"model": "demo", "input": "Go", "tools": [PATCH]}
        first = await client.responses.create(**given)
        call = first.output[-1]
        assert call.type == "custom_tool_call" and call.input == INPUT
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        await client.responses.create(
            model="demo", input=[result], tools=[PATCH], previous_response_id=first.id
        )
        # Clients without stored responses send the items back.
        items = [{"role": "user", "content": "Go"}, *map(openai_item, first.output), result]
        await client.responses.create(model="demo", input=items, tools=[PATCH])
    _, continued, sent = (task.prompt.messages for task in replica.tasks)
    assert continued == sent
    called = ToolCall("patch", {"input": INPUT}, call.call_id)
    assert continued[1:] == (
        Message("assistant", "Yes.", tool_calls=(called,)),
        Message("tool", "Done.", tool_call_id=call.call_id),
    )


def openai_item(item: Any) -> dict[str, Any]:
    return item.to_dict()


async def test_tools_and_choices_reach_the_replica_and_are_shown() -> None:
    replica = PretendReplica()
    space = {"type": "namespace", "name": "n", "description": "", "tools": [PATCH]}
    named = {"type": "custom", "name": "python"}
    reply = (await post(replica, tools=[ANY, space, TOOL], tool_choice=named)).json()
    types.Response.model_validate(reply, strict=True)
    assert reply["tool_choice"] == named
    (task,) = replica.tasks
    python, patch, _ = (tool["function"] for tool in task.prompt.tools)
    assert (python["name"], patch["name"]) == ("python", "n.patch")
    assert patch["description"] == f"Edits.\n\nThe input must match this Lark grammar:\n{LARK}"
    assert python["parameters"]["required"] == ["input"]
    assert task.calls == CallRule(("python",), ("python",), True, True, "tool_choice")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named, TOOL]}
    reply = (await post(tools=[ANY, TOOL], tool_choice=allowed)).json()
    named_tools = [named, {"type": "function", "name": "weather"}]
    assert reply["tool_choice"] == allowed | {"tools": named_tools}


@pytest.mark.parametrize("chat", [False, True])
async def test_a_grammar_holds_the_input(chat: bool) -> None:
    replica = PretendReplica()
    if chat:
        await posted("/v1/chat/completions", replica, tools=[NESTED, FUNCTION])
    else:
        await post(replica, tools=[PATCH, TOOL])
    rule = replica.tasks[0].calls
    assert rule is not None
    assert (rule.tools, rule.strict, rule.required) == (("patch", "weather"), ("patch",), False)
    place = "tools[0].custom.format.grammar" if chat else "tools[0].format"
    form = OutputForm(OutputKind.LARK, LARK, f"{place}.definition")
    assert rule.inputs == (("patch", form),)


async def test_a_chat_completion_has_calls_of_custom_tools() -> None:
    tools = [NESTED, FUNCTION]
    whole = await posted("/v1/chat/completions", PretendReplica(CALLING, TAGS), tools=tools)
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id")
    assert call == {"type": "custom", "custom": {"name": "patch", "input": INPUT}}
    replica = PretendReplica(CALLING, TAGS)
    stream = await posted("/v1/chat/completions", replica, tools=tools, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(stream)]
    (sent,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert sent[0].pop("id")
    assert sent == [{"index": 0, **call}]
    assert chunks(stream)[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_call_of_a_custom_tool_is_text(stream: bool) -> None:
    replica = PretendReplica(BROKEN, TAGS)
    response = await posted("/v1/chat/completions", replica, tools=[NESTED], stream=stream)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(response)]
        assert "".join(delta.get("content", "") for delta in deltas) == "".join(BROKEN)
        assert not any("tool_calls" in delta for delta in deltas)
    else:
        assert response.json()["choices"][0]["message"]["content"] == "".join(BROKEN)


async def test_a_chat_with_calls_of_custom_tools_goes_on() -> None:
    replica = PretendReplica()
    async with openai_client(replica) as client:
        called = {"type": "custom", "id": "1", "custom": {"name": "patch", "input": INPUT}}
        messages: list[Any] = [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "Done."},
        ]
        tools: list[Any] = [NESTED]
        choice: Any = {"type": "custom", "custom": {"name": "patch"}}
        await client.chat.completions.create(
            model="demo", messages=messages, tools=tools, tool_choice=choice
        )
        with pytest.raises(openai.BadRequestError, match=r'"tools\[0\].custom" is required'):
            bad: list[Any] = [{"type": "custom"}]
            await client.chat.completions.create(model="demo", messages=messages, tools=bad)
    (task,) = replica.tasks
    assert task.prompt.messages[1].tool_calls == (ToolCall("patch", {"input": INPUT}, "1"),)
    assert task.calls is not None and task.calls.required


BAD = [
    ({"format": {"type": "json"}}, 'field "tools[0].format.type" must be text or grammar'),
    ({"format": {"type": "grammar", "syntax": "gbnf"}}, '"tools[0].format.syntax" must be lark or'),
    ({"format": GRAMMAR | {"definition": 5}}, '"tools[0].format.definition" must be a text'),
    ({"name": None}, 'field "tools[0].name" is required'),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
async def test_bad_tools_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    response = await post(tools=[PATCH | change])
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_result_may_have_parts() -> None:
    replica = PretendReplica()
    call = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "a"}
    parts = [{"type": "input_text", "text": "See."}]
    result = answered("1", parts) | {"type": "custom_tool_call_output"}
    assert (await post(replica, input=[call, result])).status_code == 200
    assert replica.tasks[0].prompt.messages[-1] == Message("tool", "See.", tool_call_id="1")
