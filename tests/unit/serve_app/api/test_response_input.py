"""Input items of /v1/responses: the messages they become, and refused ones."""

import json
from typing import Any

import pytest

from model_zoo.chat.messages import ImagePart, Message, ToolCall
from serve_app.messages.tasks import Conversation
from tests.unit.serve_app.api.test_responses import IMAGE, PICTURE, SEEING, TOOL, URL, post, task_of
from tests.unit.serve_app.fake_replicas import PretendReplica, openai_client
from tests.unit.serve_app.responses.fake_processes import one_process


def called(id: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {"type": "function_call", "call_id": id, "name": "weather", "arguments": arguments}


def reasoning(text: str, field: str = "content") -> dict[str, Any]:
    kind = {"content": "reasoning_text", "summary": "summary_text"}[field]
    return {"type": "reasoning", "id": "rs_1", "summary": [], field: [{"type": kind, "text": text}]}


def answered(id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}


def call(id: str, city: str) -> ToolCall:
    return ToolCall("weather", {"city": city}, id)


HISTORIES = {
    "a text": ("Hi", [Message("user", "Hi")]),
    "messages": (
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "How "}, IMAGE]},
            {"role": "assistant", "content": "Fine."},
            said("Really."),
            {"type": "message", "role": "user", "content": []},
        ],
        [
            Message("system", "Be brief."),
            Message("user", ("How ", ImagePart(PICTURE))),
            Message("assistant", "Fine."),
            Message("assistant", "Really."),
            Message("user", ""),
        ],
    ),
    "parallel calls": (
        [
            reasoning("I call."),
            said("Let me look."),
            called("1", "Paris"),
            called("2", "Rome"),
            answered("2", "Hot."),
            answered("1", [{"type": "input_text", "text": "See "}, IMAGE]),
            answered("3", "Lost."),
        ],
        [
            Message(
                "assistant",
                "Let me look.",
                thinking="I call.",
                tool_calls=(call("1", "Paris"), call("2", "Rome")),
            ),
            Message("tool", "Hot.", tool_call_id="2"),
            Message("tool", ("See ", ImagePart(PICTURE)), tool_call_id="1"),
            Message("tool", "Lost.", tool_call_id="3"),
        ],
    ),
    "a text between a call and its result": (
        [called("1", "Paris"), said("I look."), answered("1", "Hot.")],
        [
            Message("assistant", "I look.", tool_calls=(call("1", "Paris"),)),
            Message("tool", "Hot.", tool_call_id="1"),
        ],
    ),
    "calls one after the other": (
        [
            reasoning("First.", "summary"),
            called("1", "Paris"),
            answered("1", "Hot."),
            reasoning("Then."),
            called("2", "Rome"),
            answered("2", "Cold."),
            said("Done."),
            reasoning("More."),
            said("Again."),
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        ],
        [
            Message("assistant", thinking="First.", tool_calls=(call("1", "Paris"),)),
            Message("tool", "Hot.", tool_call_id="1"),
            Message("assistant", thinking="Then.", tool_calls=(call("2", "Rome"),)),
            Message("tool", "Cold.", tool_call_id="2"),
            Message("assistant", "Done."),
            Message("assistant", "Again.", thinking="More."),
        ],
    ),
}


@pytest.mark.parametrize(("given", "messages"), HISTORIES.values(), ids=HISTORIES)
async def test_input_items_reach_the_template_as_messages(given, messages):
    prompt = (await task_of(input=given, instructions="Hello.", access={"card": SEEING})).prompt
    assert isinstance(prompt, Conversation)
    assert list(prompt.messages) == [Message("system", "Hello."), *messages]


def update(**settings: Any) -> dict[str, Any]:
    return {"type": "configuration_update", **settings}


async def test_items_update_the_effort_and_the_format_of_later_responses():
    json_format = {"type": "json_object"}
    low = update(reasoning={"effort": "low"}, text={"format": json_format})
    high, plain = update(reasoning={"effort": "high"}), update(text={"format": {"type": "text"}})
    replica = PretendReplica()
    async with openai_client(replica, stored=one_process()) as client:
        asked: Any = {"model": "demo", "reasoning": {"effort": "medium"}}
        say = {"role": "user", "content": "Hi."}
        first = await client.responses.create(**asked, input=[say, low, say])
        later = {"previous_response_id": first.id}
        await client.responses.create(**asked, **later, input=[say])
        await client.responses.create(**asked, **later, input=[high, say])
        given = {"text": {"format": json_format}}
        await client.responses.create(**asked, **given, input=[say, plain])
        listed = await client.responses.input_items.list(first.id, order="asc")
    assert listed.data[1].reasoning.effort == "low"
    found = [(task.prompt.thinking, task.output is not None) for task in replica.tasks]
    assert found == [("low", True), ("low", True), ("high", True), ("medium", False)]
    assert [message.text for message in replica.tasks[0].prompt.messages] == ["Hi.", "Hi."]


STRAY = TOOL | {"strict": True, "parameters": {"$ref": "https://example.org/schema"}}
BAD = [
    ({"model": ""}, "model is required"),
    ({"input": None}, 'field "input" is required'),
    ({"input": []}, 'field "input" has no items'),
    ({"input": 5}, 'field "input" must be a string or a list'),
    ({"input": ["x"]}, 'field "input[0]" must be an object with a type'),
    ({"input": [{"type": "file_search_call"}]}, '"input[0]" is of type "file_search_call", which'),
    ({"input": [{"role": "tool", "content": "x"}]}, 'field "input[0].role" must be one of'),
    ({"input": [{"role": "user"}]}, 'field "input[0].content" must be a string or a list'),
    ({"input": [{"role": "user", "content": [{}] * 2049}]}, "more than 2,048 items"),
    ({"input": [{"role": "user", "content": [5]}]}, '"input[0].content[0]" must be an object'),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        '"input[0].content[0]" is of type "input_file"',
    ),
    ({"input": [{"role": "assistant", "content": [IMAGE]}]}, 'is of type "input_image"'),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        'field "input[0].content[0].image_url" must be a URL',
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        '"input[0].content[0].text" must be a string',
    ),
    ({"input": [{"type": "function_call"}]}, '"input[0].call_id" must be a string'),
    ({"input": [answered("1", {})]}, '"input[0].output" must be a string or a list'),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "Item with id 'x' not found"),
    ({"include": ["everything"]}, 'field "include" has "everything"'),
    ({"top_logprobs": 3}, 'field "top_logprobs" needs'),
    ({"top_logprobs": 30}, 'field "top_logprobs" is 30'),
    ({"temperature": 3}, 'field "temperature" is 3'),
    ({"max_output_tokens": 0}, 'field "max_output_tokens" is 0'),
    ({"max_output_tokens": "9"}, 'field "max_output_tokens" must be of type integer'),
    ({"reasoning": {"effort": "huge"}}, "invalid reasoning value: 'huge'"),
    ({"text": {"format": {"type": "yaml"}}}, 'field "text.format.type" must be text, json_object'),
    ({"text": {"format": {"type": "json_schema"}}}, 'field "text.format.schema" must be a JSON'),
    ({"text": {"format": {"name": "x"}}}, 'field "text.format.type" must be text, json_object'),
    ({"truncation": "some"}, "\"truncation\" is \"some\"; it must be 'auto' or 'disabled'"),
    ({"background": True}, 'field "background" is not served yet'),
    ({"conversation": "conv_1"}, 'field "conversation" is not served yet'),
    ({"prompt": {"id": "p"}}, 'field "prompt" is not served yet'),
    ({"tool_choice": "required"}, 'field "tool_choice" requires a call, but "tools" declares'),
    ({"tool_choice": "most"}, 'field "tool_choice" must be none, auto, required'),
    ({"tool_choice": {"type": "web_search"}}, 'field "tool_choice" must be none, auto, required'),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}},
        'field "tool_choice" must be none, auto, required',
    ),
    ({"tool_choice": {"type": "function", "name": "f"}}, '"tool_choice" names the tool "f"'),
    ({"tools": [{"type": "web_search"}]}, '"tools[0].type" is "web_search", which is not served'),
    ({"tools": [{"type": "function"}]}, 'field "tools[0].name" is required'),
    ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, 'field "tools[0].name" is required'),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
        '"tools[0].tools[0].type" is "web_search", which is not served',
    ),
    (
        {"tools": [{"type": "namespace", "name": "n" * 256, "tools": [TOOL]}]},
        '"tools[0].tools[0].name" has more than 256 characters with its namespace',
    ),
    ({"tools": [TOOL | {"name": "a b"}]}, 'field "tools[0].name" must match'),
    ({"tools": [TOOL, TOOL]}, 'field "tools" has the name "weather" twice'),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [STRAY]}]},
        'tool "n.weather": field "tools[0].tools[0].parameters": "$ref" at ""',
    ),
    (
        {"input": [update(reasoning={"effort": 5})]},
        'field "input[0].reasoning.effort" must be a string',
    ),
    ({"input": [update(reasoning={"effort": "huge"})]}, "invalid reasoning value: 'huge'"),
    ({"input": [update(text={"format": {"type": "x"}})]}, '"input[0].text.format.type" must be'),
    ({"input": [update(text=5)]}, 'field "input[0].text" must be an object'),
    ({"metadata": {str(n): "" for n in range(17)}}, 'field "metadata" has more than 16 entries'),
    ({"metadata": {"k": "v" * 513}}, 'field "metadata" has a key of more than 64'),
    ({"metadata": {"k": 1}}, 'field "metadata.k" must be'),
    ({"previous_response_id": "resp_x"}, "Previous response with id 'resp_x' not found."),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
async def test_bad_requests_are_refused_by_name_in_the_protocols_shape(change, message):
    response = await post(access={"card": SEEING, "stored": one_process()}, stream=True, **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


async def test_an_unknown_field_is_refused_only_with_strict_fields():
    response = await post(access={"strict_fields": True}, colour="red")
    assert 'field "colour" is not known' in response.json()["error"]["message"]
    await task_of(colour="red")


async def test_images_count_as_images_and_texts_as_text():
    limits = {"card": SEEING, "max_body_bytes": 2**20, "max_text_bytes": 4096}
    big = URL + "A" * 8192
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": big}]}]
    assert (await post(access=limits, input=image)).status_code == 200
    assert (await post(access=limits, input="x " * 8192)).status_code == 413
