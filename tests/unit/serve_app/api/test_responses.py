"""OpenAI's /v1/responses in front of a fake model, with plain HTTP and the official client."""

import base64
import dataclasses
import json
from itertools import groupby
from typing import Any

import openai
import pytest
from openai.types import responses as types
from openai.types.responses import custom_tool_param, namespace_tool_param, response_create_params
from openai.types.shared_params import Reasoning
from pydantic import BaseModel, TypeAdapter

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.grammars.constraint import CallRule
from runtime.engine.request import FinishReason
from runtime.errors import GenerationFailedError, OverloadedError, PromptTooLongError
from serve_app.api.refusals import refusal
from serve_app.api.reply_reader import ReplyReader
from serve_app.api.responses_body import (
    ReasoningSettings,
    ResponsesBody,
    TextSettings,
)
from serve_app.api.responses_reply import ResponseEncoder
from serve_app.api.responses_tools import ResponseTool
from serve_app.config.options import Options
from serve_app.messages.tasks import ChatDelta, ReplyOpening, Truncation
from tests.unit.serve_app.fake_replicas import (
    CARD,
    USAGE,
    PretendReplica,
    http_client,
    openai_client,
)
from tests.vision_prompts import png

PATH = "/v1/responses"
QWEN3 = ReplyOpening(format_of("tools <tool_call> <think> </think>"))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "It.", "parameters": SCHEMA}
CALLING = (
    "<think>\nI ",
    "call.\n</think>\n\nLet me look.\n<tool_c",
    'all>\n{"name": "weather", "arguments": {"city": "Par',
    'is"}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
)
BROKEN = ('<tool_call>{"name": "weather", "arguments": {"city": ', "Paris}}</tool_call>")
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision"))
PICTURE = png(4, 6)
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
NAMED = {"type": "function", "name": "weather"}
EVENTS = TypeAdapter(types.ResponseStreamEvent)


async def post(replica: PretendReplica | None = None, *, access: Any = None, **body: Any):
    async with http_client(replica or PretendReplica(), **(access or {})) as client:
        return await client.post(PATH, json={"model": "demo", "input": "Hi"} | body)


async def task_of(*, access: Any = None, **body: Any):
    replica = PretendReplica()
    response = await post(replica, access=access, **body)
    assert response.status_code == 200, response.text
    (task,) = replica.tasks
    return task


def events(text: str, *, strict: bool = True) -> list[dict[str, Any]]:
    """The events of a stream, each as the official client's strict types have it."""
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if strict:
            EVENTS.validate_python(found[-1])
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def outline(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The type of each item, and its text or arguments."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in output
    ]


PARTS = [
    ("reasoning", "I call."),
    ("message", "Let me look."),
    ("function_call", '{"city": "Paris"}'),
    ("function_call", '{"city": "Rome"}'),
]


async def test_a_reply_is_a_complete_response_object():
    reply = (await post(metadata={"a": "b"}, instructions="Be brief.")).json()
    types.Response.model_validate(reply, strict=True)
    assert reply["id"].startswith("resp_")
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "demo")
    assert (reply["error"], reply["incomplete_details"]) == (None, None)
    (item,) = reply["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    assert reply["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    assert (reply["metadata"], reply["instructions"]) == ({"a": "b"}, "Be brief.")
    assert (reply["temperature"], reply["top_p"], reply["tool_choice"]) == (1.0, 1.0, "auto")
    assert reply["store"] is False  # nothing is stored in this test


async def test_a_stream_has_the_events_of_one_message():
    response = await post(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    kinds = [each["type"].removeprefix("response.") for each in found]
    assert [kind for kind, _ in groupby(kinds)] == [  # deltas may be merged
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(each["delta"] for each in found if "delta" in each) == "Hello, world"
    created, last = found[0]["response"], found[-1]["response"]
    assert (created["status"], created["output"]) == ("in_progress", [])
    assert created["id"] == last["id"]
    assert last["output"] == [found[-2]["item"]]
    assert last["usage"]["total_tokens"] == 10


async def test_a_stream_of_reasoning_text_and_calls_adds_up_to_the_whole_reply():
    whole = (await post(PretendReplica(CALLING, QWEN3), tools=[TOOL])).json()
    assert outline(whole["output"]) == PARTS
    assert whole["tools"] == [TOOL | {"strict": False}]
    found = events((await post(PretendReplica(CALLING, QWEN3), tools=[TOOL], stream=True)).text)
    assert outline(found[-1]["response"]["output"]) == PARTS
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    texts: dict[str, str] = {}
    for each in found:
        if "delta" in each:
            texts[each["item_id"]] = texts.get(each["item_id"], "") + each["delta"]
    assert list(texts.values()) == [text for _, text in PARTS]
    kinds = [each["type"] for each in found]
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert f"response.{kind}.delta" in kinds and f"response.{kind}.done" in kinds
    first, second = done[2:]
    assert first["call_id"] != second["call_id"]


@pytest.mark.parametrize("asked", [{"summary": "auto"}, {"generate_summary": "detailed"}])
async def test_reasoning_is_reported_once_as_its_summary_if_one_is_requested(asked):
    (summary,) = asked.values()
    async with openai_client(PretendReplica(CALLING, QWEN3)) as client:
        given = {"model": "demo", "input": "Hi", "reasoning": asked, "tools": [TOOL]}
        whole = await client.responses.create(**given)
        stream = await client.responses.create(**given, stream=True)
        found = [event async for event in stream]
    for reply in (whole, found[-1].response):
        item = reply.output[0]
        assert isinstance(item, types.ResponseReasoningItem)
        assert ([part.text for part in item.summary], item.content) == (["I call."], [])
        assert reply.reasoning is not None and reply.reasoning.summary == summary
    kinds = [event.type.removeprefix("response.") for event in found]
    assert [kind for kind, _ in groupby(kinds)][2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    thought = [e for e in found if isinstance(e, types.ResponseReasoningSummaryTextDeltaEvent)]
    assert "".join(event.delta for event in thought) == "I call."
    assert not any("reasoning_text" in kind for kind in kinds)
    events((await post(PretendReplica(CALLING, QWEN3), stream=True, reasoning=asked)).text)


async def test_an_unknown_summary_is_refused_by_name():
    response = await post(reasoning={"summary": "long"})
    assert response.status_code == 400
    assert "reasoning.summary" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_functions_of_a_namespace_keep_their_own_names(stream):
    calling = '<tool_call>{"name": "sky.weather", "arguments": {"city": "Rome"}}</tool_call>'
    replica = PretendReplica((calling,), QWEN3)
    space = {"type": "namespace", "name": "sky", "description": "It.", "tools": [TOOL]}
    response = await post(replica, tools=[space, TOOL], stream=stream)
    reply = events(response.text)[-1]["response"] if stream else response.json()
    names = [tool["function"]["name"] for tool in replica.tasks[0].prompt.tools]
    assert names == ["sky.weather", "weather"]
    (item,) = reply["output"]
    assert (item["namespace"], item["name"]) == ("sky", "weather")
    assert reply["tools"][0] == space | {"tools": [TOOL | {"strict": False}]}
    task = await task_of(input=[item, {**answered_by(item), "output": "Hot."}])
    assert task.prompt.messages[0].tool_calls[0].name == "sky.weather"


def answered_by(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"]}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_malformed_call_is_text(stream):
    response = await post(PretendReplica(BROKEN, QWEN3), tools=[TOOL], stream=stream)
    reply = events(response.text)[-1]["response"] if stream else response.json()
    assert outline(reply["output"]) == [("message", "".join(BROKEN))]


async def test_a_reply_without_text_has_no_items():
    assert (await post(PretendReplica(()))).json()["output"] == []
    found = events((await post(PretendReplica(()), stream=True)).text)
    assert [each["type"] for each in found][2:] == ["response.completed"]


def encoder() -> ResponseEncoder:
    facts = {"id": "resp_" + "0" * 32, "reasoning": {"summary": None}}
    return ResponseEncoder(facts, ReplyReader(), {})


def test_a_reply_that_reaches_its_limit_is_incomplete():
    usage = dataclasses.replace(USAGE, thinking_tokens=2)
    delta = ChatDelta("Hello", (1,), finish=FinishReason.LENGTH, usage=usage)
    reply = json.loads(encoder().whole(delta))
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert (reply["status"], reply["output"][0]["status"]) == ("incomplete", "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    lines = encoder().piece(delta).decode().split("\n")
    assert lines[-4] == "event: response.incomplete"


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_of_the_text_are_included_on_request(stream):
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [TOOL]}
    calling = '<tool_call>{"name": "weather", "arguments": {"city": "lo "}}</tool_call>'
    said = ("Hel", "lo ", "<to", "ol", "\U0001f600")
    words = ("<think>", "Hel", "</think>", *said, calling)
    response = await post(PretendReplica(words, QWEN3), stream=stream, **body)
    if stream:
        found = events(response.text)
        pieces = [each for each in found if each["type"] == "response.output_text.delta"]
        reply, streamed = found[-1]["response"], [e for each in pieces for e in each["logprobs"]]
    else:
        reply, streamed = response.json(), None
    (part,) = reply["output"][1]["content"]
    assert part["text"] == "Hello <tool\U0001f600"
    assert [entry["token"] for entry in part["logprobs"]] == [
        "Hel",
        "lo ",
        "<to",
        "ol",
        "\U0001f600",
    ]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert reply["top_logprobs"] == 2
    assert streamed in (None, part["logprobs"])


async def test_options_reach_the_engine():
    task = await task_of(temperature=0.5, top_p=0.8, max_output_tokens=9, seed=3, top_k=7)
    sampling = task.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.8, 7)
    assert (sampling.seed, task.max_tokens) == (3, 9)
    options = Options(top_k=5, num_predict=3)
    task = await task_of(access={"options": options})
    assert (task.sampling.temperature, task.sampling.top_k, task.max_tokens) == (1.0, 5, 3)


async def test_only_declared_fields_change_the_sampling():
    plain = await task_of(seed=1)
    extended = await task_of(seed=1, typical_p=0.5, dry_multiplier=1, stop="end")
    assert extended.sampling == plain.sampling
    assert (plain.stop, extended.stop) == ((), ("end",))  # of vLLM


@pytest.mark.parametrize(
    ("truncation", "turns"), [("disabled", None), ("auto", Truncation(turns=True))]
)
async def test_truncation_leaves_out_turns(truncation, turns):
    replica = PretendReplica()
    reply = (await post(replica, truncation=truncation)).json()
    assert (replica.tasks[0].truncation, reply["truncation"]) == (turns, truncation)


async def test_fields_without_effect_here_are_accepted():
    await task_of(
        reasoning={"effort": "none", "context": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=True,
        background=False,
        prompt_cache_key="k",
        stream_options={"include_obfuscation": False},
        service_tier="auto",
        user="u",
        previous_response_id=None,
    )


def test_every_field_of_the_official_client_is_known():
    for known, *kinds in (
        (ResponsesBody, response_create_params.ResponseCreateParamsStreaming),
        (ReasoningSettings, Reasoning),
        (TextSettings, types.ResponseTextConfigParam),
        (
            ResponseTool,
            types.FunctionToolParam,
            custom_tool_param.CustomToolParam,
            namespace_tool_param.NamespaceToolParam,
            namespace_tool_param.ToolFunction,
        ),
    ):
        names = {field.alias or name for name, field in known.model_fields.items()}
        for kind in kinds:
            assert not kind.__annotations__.keys() - names


@pytest.mark.parametrize(
    ("effort", "thinking"), [(None, None), ("none", False), ("minimal", "low"), ("xhigh", "max")]
)
async def test_the_effort_reaches_the_template(effort, thinking):
    assert (await task_of(reasoning={"effort": effort})).prompt.thinking == thinking


# The fields of the schemas of two tools.
SCHEMAS = (("weather", "tools[0].parameters"), ("time", "tools[1].parameters"))


async def test_tool_choice_none_hides_the_tools():
    assert (await task_of(tools=[TOOL], tool_choice="none")).prompt.tools == ()
    (tool,) = (await task_of(tools=[TOOL])).prompt.tools
    assert tool["function"] == {"name": "weather", "description": "It.", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("auto", None),
        (
            "required",
            CallRule(
                ("weather", "time"), ("weather", "time"), True, True, "tool_choice", (), SCHEMAS
            ),
        ),
        (NAMED, CallRule(("weather",), ("weather",), True, True, "tool_choice", (), SCHEMAS[:1])),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
            CallRule(("weather",), (), False, True, "tool_choice"),
        ),
    ],
)
async def test_a_tool_choice_reaches_the_replica_and_is_shown(given, rule):
    replica = PretendReplica()
    tools = [TOOL, TOOL | {"name": "time"}]
    reply = (await post(replica, tools=tools, tool_choice=given)).json()
    assert replica.tasks[0].calls == rule
    assert reply["tool_choice"] == given
    types.Response.model_validate(reply, strict=True)


async def test_strict_tools_and_single_calls_are_a_rule():
    tools = [TOOL | {"strict": True}, TOOL | {"name": "time"}]
    task = await task_of(tools=tools, parallel_tool_calls=False)
    assert task.calls == CallRule(
        ("weather", "time"), ("weather",), False, False, "tools", (), SCHEMAS[:1]
    )


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ({"type": "object"}, "text.format")),
        (
            {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True},
            (SCHEMA, "text.format.schema"),
        ),
    ],
)
async def test_a_text_format_reaches_the_replica_and_is_shown(given, form):
    replica = PretendReplica()
    body = given | {"ignored": 2**70}
    reply = (await post(replica, text={"format": body})).json()
    output = replica.tasks[0].output
    assert (output and (json.loads(output.source), output.field)) == form
    shown = reply["text"]["format"]
    assert {name: value for name, value in shown.items() if value is not None} == given
    types.Response.model_validate(reply, strict=True)


class Weather(BaseModel):
    city: str


async def test_the_official_client_parses_structured_output():
    replica = PretendReplica(('{"city": ', '"Paris"}'))
    async with openai_client(replica) as client:
        reply = await client.responses.parse(model="demo", input="Hi", text_format=Weather)
    assert reply.output_parsed == Weather(city="Paris")
    assert json.loads(replica.tasks[0].output.source)["required"] == ["city"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OverloadedError("full"), openai.InternalServerError),
        (GenerationFailedError("broken"), openai.InternalServerError),
    ],
)
async def test_errors_before_the_stream_are_the_official_clients_exceptions(error, raised):
    replica = PretendReplica()
    replica.error = error
    async with openai_client(replica) as client:
        for stream in (False, True):
            with pytest.raises(raised, match=str(error)):
                await client.responses.create(model="demo", input="Hi", stream=stream)
        with pytest.raises(openai.NotFoundError, match="model 'other' not found"):
            await client.responses.create(model="other", input="Hi")


async def test_a_stream_that_fails_later_ends_with_a_failed_response():
    replica = PretendReplica()
    replica.fails_after = 1
    found = events((await post(replica, stream=True)).text)
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert (response["id"], response["status"]) == (found[0]["response"]["id"], "failed")
    assert response["error"]["code"] == "server_error"
    assert "the engine broke" in response["error"]["message"]
    assert outline(response["output"]) == [("message", "Hello")]


@pytest.mark.parametrize(
    ("error", "code", "reported"),
    [
        (OverloadedError("full"), "server_error", []),
        (PromptTooLongError("long"), "context_length_exceeded", ["error"]),
    ],
)
def test_a_stream_that_fails_before_its_first_delta_has_begun_too(error, code, reported):
    # The status of a stream that waits is sent with its first heartbeat.
    found = events(encoder().broken(refusal(error)).decode(), strict=False)
    assert found[-1]["response"]["error"]["code"] == code
    assert [each["type"] for each in found] == [
        "response.created",
        "response.in_progress",
        *reported,
        "response.failed",
    ]
