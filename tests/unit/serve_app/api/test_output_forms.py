"""Fields of all protocols that demand a form of the reply, or calls of tools."""

import dataclasses
import json
from typing import Any

import pytest

from model_zoo.grammars.constraint import CallRule, OutputForm, OutputKind
from runtime.errors import RequestError
from serve_app.api.output_forms import openai_form
from serve_app.messages.tasks import ChatTask
from tests.unit.serve_app.api.operations import SHORTEST
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

CHAT, TEXT, NATIVE, RAW, CLAUDE = (
    "/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate", "/v1/messages",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
RESPONSES = "/v1/responses"


async def post(path: str, replica: PretendReplica, **more: Any) -> Any:
    async with http_client(replica) as client:
        return await client.post(
            path, json={"model": "demo", "stream": False} | SHORTEST[path] | more
        )


async def task_of(path: str, **more: Any) -> ChatTask:
    replica = PretendReplica()
    response = await post(path, replica, **more)
    assert response.status_code == 200, response.text
    (task,) = replica.tasks
    return task


async def refusal(path: str, **more: Any) -> str:
    """The message of a 400 in the protocol's own shape."""
    replica = PretendReplica()
    response = await post(path, replica, **more)
    assert response.status_code == 400, response.text
    assert not replica.tasks
    error = response.json()["error"]
    if path in (NATIVE, RAW):
        return error
    assert error["type"] == "invalid_request_error"
    return error["message"]


def in_format(schema: Any, **more: Any) -> dict[str, Any]:
    described = {"name": "reply", "strict": True, "schema": schema} | more
    return {"response_format": {"type": "json_schema", "json_schema": described}}


OBJECT = {"type": "object"}
PLACE = "response_format.json_schema.schema"
FLAT = {"type": "json_schema", "name": "reply", "schema": SCHEMA, "strict": True}
JSON_FORMS = [
    (RESPONSES, {"text": {"format": FLAT}}, SCHEMA, "text.format.schema"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, OBJECT, "text.format"),
    (NATIVE, {"format": "json"}, OBJECT, "format"),
    (NATIVE, {"format": SCHEMA}, SCHEMA, "format"),
    (RAW, {"format": SCHEMA}, SCHEMA, "format"),
    (RAW, {"format": SCHEMA, "raw": True}, SCHEMA, "format"),
    (CHAT, {"response_format": {"type": "json_object"}}, OBJECT, "response_format"),
    (
        CHAT,
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        SCHEMA,
        "response_format.schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object", "schema": {}}},
        OBJECT,
        "response_format.schema",
    ),
    (CHAT, in_format(SCHEMA), SCHEMA, PLACE),
    (CHAT, in_format(SCHEMA, strict=False), SCHEMA, PLACE),
    (TEXT, in_format(SCHEMA), SCHEMA, PLACE),
    (CHAT, {"guided_json": SCHEMA}, SCHEMA, "guided_json"),
    (TEXT, {"guided_json": json.dumps(SCHEMA)}, SCHEMA, "guided_json"),
    (CHAT, {"json_schema": SCHEMA}, SCHEMA, "json_schema"),
    (CHAT, {"structured_outputs": {"json": SCHEMA}}, SCHEMA, "structured_outputs.json"),
    (
        TEXT,
        {"structured_outputs": {"json_object": True, "whitespace_pattern": None}},
        OBJECT,
        "structured_outputs.json_object",
    ),
    (
        CLAUDE,
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        SCHEMA,
        "output_config.format.schema",
    ),
    (
        CLAUDE,
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        SCHEMA,
        "output_format.schema",
    ),
]


@pytest.mark.parametrize(("path", "given", "schema", "field"), JSON_FORMS)
async def test_schemas_reach_the_replica_with_the_name_of_their_field(path, given, schema, field):
    output = (await task_of(path, **given)).output
    assert output is not None
    assert (output.kind, output.field) == (OutputKind.JSON_SCHEMA, field)
    assert list(json.loads(output.source).items()) == list(schema.items())


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("name", "value", "kind", "source"),
    [
        ("regex", "a+", OutputKind.REGEX, "a+"),
        ("choice", ["a", 'b"'], OutputKind.LARK, 'start: "a" | "b\\""'),
        ("grammar", 'start: "a"', OutputKind.LARK, 'start: "a"'),
        ("grammar", 'root ::= "a"', OutputKind.GBNF, 'root ::= "a"'),
    ],
)
async def test_the_forms_of_vllm_reach_the_replica(path, name, value, kind, source):
    guided = await task_of(path, **{f"guided_{name}": value})
    assert guided.output == OutputForm(kind, source, f"guided_{name}")
    structured = await task_of(path, structured_outputs={name: value})
    assert structured.output == OutputForm(kind, source, f"structured_outputs.{name}")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_grammar_of_llama_cpp_reaches_the_replica(path):
    task = await task_of(path, grammar="root ::= [a-z]+")
    assert task.output == OutputForm(OutputKind.GBNF, "root ::= [a-z]+", "grammar")


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"response_format": {"type": "text"}}), (CHAT, {"structured_outputs": {}}),
        (CHAT, {"grammar": ""}),
        (TEXT, {"guided_json": None}), (NATIVE, {"format": ""}), (NATIVE, {"format": None}),
        (CLAUDE, {"output_config": {"effort": "low"}}), (RESPONSES, {"text": {"verbosity": "low"}}),
    ],
)  # fmt: skip
async def test_free_text_is_the_default(path, given):
    task = await task_of(path, **given)
    assert (task.output, task.calls) == (None, None)


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


REMOTE = {"properties": {"a": {"$ref": "http://x/y"}}}
BAD = [
    (NATIVE, {"format": "xml"}, 'invalid format: "xml"; expected "json" or a valid JSON Schema'),
    (NATIVE, {"format": 5}, "invalid format: 5; expected"),
    (RAW, {"format": ["json"]}, 'invalid format: ["json"]; expected'),
    (NATIVE, {"format": REMOTE}, '"$ref" at "/properties/a" is \'http://x/y\''),
    (NATIVE, {"format": nested(40)}, 'field "format" is nested more than 32 deep'),
    (CHAT, {"response_format": "json"}, '"response_format.type" must be text, json_object'),
    (CHAT, {"response_format": {"type": "grammar"}}, '"response_format.type" must be text'),
    (CHAT, {"response_format": {"type": "json_schema"}}, 'json_schema" must be an object'),
    (CHAT, in_format(None), f'field "{PLACE}" must be a JSON schema, an object'),
    (CHAT, in_format({"maximum": 2**70}), "more than 64 bits"),
    (CHAT, {"guided_json": "{"}, '"guided_json" is a text that is not JSON'),
    (CHAT, {"guided_json": '{"const": "\\ud800"}'}, "\\ud800 (byte 11) is half of a UTF-16"),
    (TEXT, {"guided_json": "5"}, '"guided_json" must be a JSON schema'),
    (CHAT, {"guided_regex": ["a"]}, '"guided_regex" must be a text that is not empty'),
    (TEXT, {"guided_choice": []}, '"guided_choice" must be a list of texts'),
    (TEXT, {"guided_choice": ["a", 5]}, '"guided_choice" must be a list of texts'),
    (TEXT, {"guided_choice": ["a"] * 1025}, '"guided_choice" has more than 1,024 items'),
    (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, '"guided_regex" and "guided_choice"'),
    (CHAT, {"grammar": "x", "json_schema": SCHEMA}, '"grammar" and "json_schema" both'),
    (TEXT, {"grammar": {"root": 1}}, '"grammar" must be a text that is not empty'),
    (TEXT, {"structured_outputs": {"grammar": ""}}, 'grammar" must be a text that is not empty'),
    (CHAT, {"guided_regex": "a", **in_format(SCHEMA)}, f'"{PLACE}" and "guided_regex" both'),
    (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "both demand a form"),
    (CHAT, {"structured_outputs": []}, '"structured_outputs" must be an object'),
    (CHAT, {"structured_outputs": {"xml": 1}}, '"structured_outputs.xml" is not known'),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, 'structural_tag" is not served'),
    (CLAUDE, {"output_config": {"format": {"type": "x"}}}, '"output_config.format.type" must be'),
    (RESPONSES, {"text": {"format": {"type": "x"}}}, '"text.format.type" must be text, json_obj'),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, '"text.format.schema" must be a'),
    (CLAUDE, {"output_format": {"type": "json_schema"}}, '"output_format.schema" must be a JSON'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given", "reported"), BAD)
async def test_bad_forms_are_refused_by_name(path, given, reported):
    assert reported in await refusal(path, **given)


@pytest.mark.parametrize(
    ("guided", "reported"),
    [
        ({"guided_json": {"enum": ["x" * 140_000]}}, "at most 131,072 are accepted"),
        ({"guided_json": " " * 140_000}, '"guided_json" has more than 131,072'),
        ({"guided_regex": "a" * 70_000}, "at most 65,536 are accepted"),
        ({"guided_choice": ["a" * 70_000]}, "at most 65,536 are accepted"),
    ],
)
def test_large_forms_are_refused(guided, reported):
    with pytest.raises(RequestError, match=reported):
        openai_form(None, None, guided)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | more}


def claude_tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA} | more


AB = {"tools": [tool("a"), tool("b")]}
CLAUDE_AB = {"tools": [claude_tool("a"), claude_tool("b")]}
NAMED = {"type": "function", "function": {"name": "b"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    }


def rule(tools: str, strict: str, *, required=True, parallel=True) -> CallRule:
    field = "tool_choice" if required or tools != "ab" else "tools"
    return CallRule(tuple(tools), tuple(strict), required, parallel, field)


def choosing(kind: str, **more: Any) -> dict[str, Any]:
    return CLAUDE_AB | {"tool_choice": {"type": kind, **more}}


ALONE = {"disable_parallel_tool_use": True}
RULES = [
    (CHAT, AB, None),
    (CHAT, {**AB, "tool_choice": "auto"}, None),
    (CHAT, {**AB, "tool_choice": "none"}, None),
    (CHAT, {**AB, "tool_choice": "required"}, rule("ab", "ab")),
    (CHAT, {**AB, "tool_choice": NAMED}, rule("b", "b")),
    (CHAT, AB | allowed("required", NAMED), rule("b", "b")),
    (CHAT, AB | allowed("auto", NAMED), rule("b", "", required=False)),
    (CHAT, AB | allowed("auto", NAMED, NAMED), rule("b", "", required=False)),
    (CHAT, {**AB, "parallel_tool_calls": False}, rule("ab", "", required=False, parallel=False)),
    (CHAT, {"tools": [tool("a", strict=True), tool("b")]}, rule("ab", "a", required=False)),
    (CHAT, {"parallel_tool_calls": False}, None),
    (NATIVE, AB, None),
    (NATIVE, {**AB, "tool_choice": "none"}, None),
    (NATIVE, {**AB, "tool_choice": "required"}, rule("ab", "ab")),
    (NATIVE, {**AB, "tool_choice": NAMED}, rule("b", "b")),
    (NATIVE, {"tools": [tool("a", strict=True), tool("b")]}, rule("ab", "a", required=False)),
    (CLAUDE, CLAUDE_AB, None),
    (CLAUDE, choosing("none"), None),
    (CLAUDE, choosing("auto", **ALONE), rule("ab", "", required=False, parallel=False)),
    (CLAUDE, choosing("any"), rule("ab", "ab")),
    (CLAUDE, choosing("tool", name="a", **ALONE), rule("a", "a", parallel=False)),
    (
        CLAUDE,
        {"tools": [claude_tool("a", strict=True), claude_tool("b")]},
        rule("ab", "a", required=False),
    ),
]


@pytest.mark.parametrize(("path", "given", "expected"), RULES)
async def test_the_choice_of_tools_reaches_the_replica(path, given, expected):
    task = await task_of(path, **given)
    field = "input_schema" if path == CLAUDE else "function.parameters"
    if expected is not None:
        schemas = tuple((name, f"tools[{'ab'.index(name)}].{field}") for name in expected.strict)
        expected = dataclasses.replace(expected, schemas=schemas)
    assert task.calls == expected
    hidden = given.get("tool_choice") in ("none", {"type": "none"})
    assert len(task.prompt.tools) == (0 if hidden else len(given.get("tools", [])))


STRAY = {"tools": [tool("a", strict=True, parameters=REMOTE)]}
BAD_CHOICES = [
    (CHAT, {"tool_choice": "required"}, '"tool_choice" requires a call, but "tools" declares no'),
    (CHAT, {**AB, "tool_choice": "sometimes"}, 'field "tool_choice" must be none, auto, required'),
    (CHAT, {**AB, "tool_choice": {"type": "custom"}}, 'field "tool_choice" must be none, auto'),
    (CHAT, {**AB, "tool_choice": {"type": "function", "function": {"name": "c"}}}, 'the tool "c"'),
    (CHAT, AB | allowed("auto", {"type": "mcp"}), "allowed_tools.tools[0]\" must name a tool"),
    (CHAT, AB | allowed("required"), "requires a call"),
    (CHAT, AB | allowed("auto", *[5] * 2049), "has more than 2,048 items"),
    (
        CHAT,
        {"tools": [tool("b"), *STRAY["tools"]]},
        'tool "a": field "tools[1].function.parameters": "$ref" at "/properties/a"',
    ),
    (CHAT, {"tools": [tool("a", strict="yes")]}, 'field "tools[0].function.strict" must be'),
    (CHAT, {**AB, "parallel_tool_calls": "no"}, 'field "parallel_tool_calls" must be'),
    (NATIVE, {"tool_choice": "required"}, '"tool_choice" requires a call'),
    (NATIVE, {**AB, "tool_choice": "sometimes"}, 'field "tool_choice" must be none, auto'),
    (CLAUDE, {"tool_choice": {"type": "any"}}, '"tool_choice" requires a call'),
    (CLAUDE, {**CLAUDE_AB, "tool_choice": {"type": "tool"}}, '"tool_choice.name" is required'),
    (CLAUDE, {**CLAUDE_AB, "tool_choice": {"type": "tool", "name": "c"}}, 'the tool "c"'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given", "reported"), BAD_CHOICES)
async def test_bad_choices_of_tools_are_refused_by_name(path, given, reported):
    assert reported in await refusal(path, **given)
