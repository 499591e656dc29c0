"""Typed tools of /v1/responses: shells, patches, computers, searches for tools."""

import json
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types import responses as types
from openai.types.responses import function_shell_tool_param, tool_param
from openai.types.responses.local_environment_param import LocalEnvironmentParam

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import ImagePart, Message, ToolCall
from serve_app.api.offered_tools import TYPES, OfferedTools
from serve_app.api.responses_tools import ResponseTool, ShellEnvironment, ShellSkill
from serve_app.messages.tasks import Conversation, ReplyOpening
from tests.unit.serve_app.api.test_responses import (
    PICTURE,
    SEEING,
    TOOL,
    URL,
    events,
    post,
    task_of,
)
from tests.unit.serve_app.fake_replicas import PretendReplica, openai_client
from tests.unit.serve_app.responses.fake_processes import one_process

TAGS = ReplyOpening(format_of("tools <tool_call>"))
COMMANDS = ["ls", 'echo "a"']
EXEC = {"command": ["ls", "-l"], "working_directory": "/tmp", "timeout_ms": 5}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}
GONE = {"type": "delete_file", "path": "a.py"}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
# The tool, the arguments of the function, and the fields of the call's item.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "shell": (
        {"type": "shell"},
        {"commands": COMMANDS, "timeout_ms": 5},
        {"action": {"commands": COMMANDS, "timeout_ms": 5, "max_output_length": None}},
    ),
    "local_shell": (
        {"type": "local_shell"},
        EXEC,
        {"action": EXEC | {"type": "exec", "env": {}}},
    ),
    "apply_patch": ({"type": "apply_patch"}, PATCH, {"operation": PATCH}),
    "tool_search": (
        SEARCH,
        {"query": "mail"},
        {"arguments": {"query": "mail"}, "execution": "client"},
    ),
}
ENDED = [
    {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "", "stderr": "No b.", "outcome": {"type": "exit", "exit_code": 2}},
    {"stdout": "c", "stderr": "", "outcome": {"type": "timeout"}},
]
FOUND = [TOOL, {"type": "namespace", "name": "sky", "description": "", "tools": [TOOL]}]
# Fields of results, and the text that the model sees.
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "shell": ({"output": ENDED}, "a\nexit code: 0\nNo b.\nexit code: 2\nc\ntimed out"),
    "local_shell": ({"output": '{"stdout": "a"}'}, '{"stdout": "a"}'),
    "apply_patch": ({"status": "failed", "output": "No such line."}, "failed\nNo such line."),
    "tool_search": (
        {"execution": "client", "tools": FOUND},
        "Tools that can be called now:\nweather\nsky.weather",
    ),
}
TYPED = list(CALLS)


def calling(name: str, arguments: dict[str, Any]) -> PretendReplica:
    call = json.dumps({"name": name, "arguments": arguments})
    return PretendReplica((f"<tool_call>{call}</tool_call>",), TAGS)


def output_type(name: str) -> str:
    return "tool_search_output" if name == "tool_search" else f"{name}_call_output"


@pytest.mark.parametrize("name", TYPED)
async def test_a_call_is_an_item_of_the_type(name: str) -> None:
    tool, arguments, fields = CALLS[name]
    reply = (await post(calling(name, arguments), tools=[tool])).json()
    types.Response.model_validate(reply, strict=True)
    (item,) = reply["output"]
    assert item.pop("id") and item.pop("call_id")
    assert item == {"type": f"{name}_call", "status": "completed"} | fields
    assert reply["tools"][0] == {**tool, **reply["tools"][0]}


@pytest.mark.parametrize("name", TYPED)
async def test_a_stream_reports_the_item(name: str) -> None:
    tool, arguments, fields = CALLS[name]
    response = await post(calling(name, arguments), tools=[tool], stream=True)
    _, _, added, *between, done, _ = events(response.text)
    kinds = [each["type"].removeprefix("response.") for each in (added, done)]
    assert kinds == ["output_item.added", "output_item.done"]
    assert done["item"] == done["item"] | fields | {"status": "completed"}
    assert added["item"]["status"] == "in_progress"
    if name == "shell":
        assert added["item"]["action"]["commands"] == []
        parts = [each["type"].rpartition(".")[2] for each in between]
        assert parts == ["added", "delta", "done"] * 2
        assert [each.get("command") or each.get("delta") for each in between[1:3]] == ["ls"] * 2
        assert {each["command_index"] for each in between[3:]} == {1}
    else:
        assert between == []


@pytest.mark.parametrize("name", TYPED)
async def test_the_official_client_continues_after_the_result(name: str) -> None:
    tool, arguments, _ = CALLS[name]
    fields, text = RESULTS[name]
    replica = calling(name, arguments)
    given: Any = {"model": "demo", "tools": [tool]}
    async with openai_client(replica, stored=one_process()) as client:
        first = await client.responses.create(**given, input="Go")
        call: Any = first.output[0]
        result: Any = {"type": output_type(name), "call_id": call.call_id, **fields}
        await client.responses.create(**given, input=[result], previous_response_id=first.id)
        items: Any = [{"role": "user", "content": "Go"}, call.to_dict(), result]
        last = await client.responses.create(**given, input=items)
        listed = await client.responses.input_items.list(last.id, order="asc")
    assert [each.type for each in listed.data] == ["message", f"{name}_call", output_type(name)]
    _, continued, sent = (task.prompt.messages for task in replica.tasks)
    assert continued == sent
    assert continued[1:] == (
        Message("assistant", tool_calls=(ToolCall(name, arguments, call.call_id),)),
        Message("tool", text, tool_call_id=call.call_id),
    )


@pytest.mark.parametrize("named", ["call_id", "id"])
async def test_a_result_of_the_local_shell_names_its_call_by_the_field_id(named: str) -> None:
    replica = calling("local_shell", EXEC)
    tools = [{"type": "local_shell"}]
    call = (await post(replica, tools=tools)).json()["output"][0]
    result = {"type": "local_shell_call_output", "id": call[named], "output": "a"}
    assert (await post(replica, input=[call, result], tools=tools)).status_code == 200
    assert replica.tasks[1].prompt.messages[-1].tool_call_id == call["call_id"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", {"commands": "ls"}),
        ("local_shell", {"command": "ls"}),
        ("apply_patch", {"type": "move_file", "path": "a"}),
        ("computer", {"actions": [{"type": "fly"}]}),
        ("computer", {}),
    ],
)
async def test_a_call_that_the_item_cannot_express_is_one_of_a_function(
    name: str, arguments: dict[str, Any]
) -> None:
    """Clients answer it with an error, and the model can go on."""
    (item,) = (await post(calling(name, arguments), tools=[{"type": name}])).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", name)
    assert json.loads(item["arguments"]) == arguments


async def test_the_type_of_a_tool_determines_its_name() -> None:
    replica = calling("shell", {"commands": COMMANDS})
    (item,) = (await post(replica, tools=[{"type": "shell", "name": "bash"}])).json()["output"]
    assert item["type"] == "shell_call"


@pytest.mark.parametrize(
    ("tool", "arguments", "kind"),
    [
        (SEARCH, {"query": 10**30}, "tool_search_call"),
        ({"type": "shell"}, {"commands": [], "timeout_ms": 10**30}, "function_call"),
    ],
)
async def test_an_integer_of_more_than_64_bits_ends_no_conversation(
    tool: dict[str, Any], arguments: dict[str, Any], kind: str
) -> None:
    """Fields of items for integers cannot express it, so the call is one of a function."""
    replica = calling(tool["type"], arguments)
    async with openai_client(replica, stored=one_process()) as client:
        given: Any = {"model": "demo", "tools": [tool]}
        first = await client.responses.create(**given, input="Go")
        call: Any = first.output[0]
        assert call.type == kind
        fields = {"output": "a", "tools": []}
        result: Any = {"type": f"{kind}_output", "call_id": call.call_id, **fields}
        result["type"] = result["type"].replace("search_call", "search")
        await client.responses.create(**given, input=[result], previous_response_id=first.id)
        await client.responses.create(**given, input=[call.to_dict(), result])
    for task in replica.tasks[1:]:
        called = next(each for each in task.prompt.messages if each.tool_calls)
        assert 1e30 in called.tool_calls[0].arguments.values()


async def test_a_deletion_has_no_diff() -> None:
    replica = calling("apply_patch", GONE)
    (item,) = (await post(replica, tools=[{"type": "apply_patch"}])).json()["output"]
    assert item["operation"] == GONE


async def test_models_get_functions_whose_calls_are_held_to_the_parameters() -> None:
    task = await task_of(tools=[tool for tool, *_ in CALLS.values()])
    functions = {tool["function"]["name"]: tool["function"] for tool in task.prompt.tools}
    assert list(functions) == TYPED
    assert functions["tool_search"]["description"] == "Find tools."
    assert functions["tool_search"]["parameters"] == SEARCH["parameters"]
    assert task.calls.strict == ("shell", "local_shell", "apply_patch")
    for name, (_, arguments, _) in CALLS.items():
        assert arguments.keys() <= functions[name]["parameters"]["properties"].keys()


CLICK = {"type": "click", "button": "left", "x": 1, "y": 2}
ACTIONS = [CLICK, {"type": "drag", "path": [{"x": 1, "y": 2}], "keys": ["ctrl"]}, {"type": "wait"}]
SCREEN = {"display_width": 640, "display_height": 480, "environment": "linux"}


@pytest.mark.parametrize("preview", [False, True])
async def test_a_computer_gets_actions_and_returns_a_picture(preview: bool) -> None:
    tool = {"type": "computer_use_preview", **SCREEN} if preview else {"type": "computer"}
    arguments = {"action": CLICK} if preview else {"actions": ACTIONS}
    replica = calling("computer", arguments)
    async with openai_client(replica, card=SEEING) as client:
        given: Any = {"model": "demo", "tools": [tool], "tool_choice": {"type": tool["type"]}}
        first = await client.responses.create(**given, input="Go")
        call: Any = first.output[0]
        screenshot = {"type": "computer_screenshot", "image_url": URL}
        result = {"type": "computer_call_output", "call_id": call.call_id, "output": screenshot}
        checks: Any = {"acknowledged_safety_checks": []}
        items: Any = [{"role": "user", "content": "Go"}, call.to_dict(), result | checks]
        await client.responses.create(**given, input=items)
    assert call.type == "computer_call" and call.to_dict() == call.to_dict() | arguments
    types.Response.model_validate_json(first.to_json(), strict=True)
    assert [tool.type for tool in first.tools] == [given["tools"][0]["type"]]
    _, called, seen = replica.tasks[1].prompt.messages
    assert called.tool_calls == (ToolCall("computer", arguments, call.call_id),)
    assert seen == Message("tool", (ImagePart(PICTURE),), tool_call_id=call.call_id)
    function = replica.tasks[0].prompt.tools[0]["function"]
    assert ("640 x 480" in function["description"]) is preview


def test_every_action_of_the_official_client_is_known() -> None:
    (offered,) = OfferedTools.of([ResponseTool(type="computer")], []).functions()
    actions = offered["function"]["parameters"]["properties"]["actions"]["items"]["anyOf"]
    schemas = {each["properties"]["type"]["enum"][0]: each for each in actions}
    for each in get_args(get_args(types.ComputerAction)[0]):
        known = each.model_fields
        schema = schemas.pop(get_args(known["type"].annotation)[0])
        assert schema["properties"].keys() == known.keys()
        assert set(schema["required"]) == {n for n, info in known.items() if info.is_required()}
    assert not schemas


async def test_skills_of_a_shell_are_described() -> None:
    skill = {"name": "tables", "description": "Reads tables.", "path": "/skills/tables"}
    shell = {"type": "shell", "environment": {"type": "local", "skills": [skill]}}
    replica = PretendReplica()
    reply = (await post(replica, tools=[shell])).json()
    types.Response.model_validate(reply, strict=True)
    assert reply["tools"][0]["environment"] == shell["environment"]
    told = replica.tasks[0].prompt.tools[0]["function"]["description"]
    assert told.endswith("\n/skills/tables (tables): Reads tables.")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "shell"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]},
    ],
)
async def test_a_choice_names_a_tool_by_its_type(choice: dict[str, Any]) -> None:
    replica = PretendReplica()
    reply = (await post(replica, tools=[{"type": "shell"}, TOOL], tool_choice=choice)).json()
    assert reply["tool_choice"] == choice
    rule = replica.tasks[0].calls
    assert rule is not None
    assert (rule.tools, rule.strict, rule.required) == (("shell",), ("shell",), True)


async def test_tools_that_a_search_has_found_can_be_called() -> None:
    """They may have namespaces; those that the request declares, too, count once."""
    found = {"type": "tool_search_output", "call_id": "1", "tools": FOUND}
    call = {"type": "tool_search_call", "call_id": "1", "arguments": {}, "execution": "client"}
    more = {"type": "additional_tools", "role": "developer"}
    more["tools"] = [{"type": "shell"}, {"type": "web_search"}]
    replica = calling("sky.weather", {"city": "Rome"})
    given: list[Any] = [{"role": "user", "content": "Go"}, call, found, more]
    reply = (await post(replica, tools=[SEARCH, TOOL], input=given)).json()
    (item,) = reply["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "sky", "weather")
    (task,) = replica.tasks
    names = [tool["function"]["name"] for tool in task.prompt.tools]
    assert names == ["tool_search", "weather", "sky.weather", "shell"]
    assert [message.role for message in task.prompt.messages] == ["user", "assistant", "tool"]


HOSTED = [{"type": "web_search_2025_08_26"}, {"type": "image_generation"}]


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools]}


async def test_allowed_tools_may_name_types_that_are_left_out() -> None:
    replica = PretendReplica()
    named = {"type": "function", "name": TOOL["name"]}
    given: dict[str, Any] = {"tools": [TOOL, SEARCH, *HOSTED]}
    reply = await post(replica, **given, tool_choice=allowed("required", named, *HOSTED))
    rule = replica.tasks[0].calls
    assert rule is not None and (rule.tools, rule.required) == ((TOOL["name"],), True)
    assert reply.json()["tool_choice"] == allowed("required", named)
    # No other tool may be called instead.
    assert (await post(replica, **given, tool_choice=allowed("auto", *HOSTED))).status_code == 200
    assert isinstance(prompt := replica.tasks[1].prompt, Conversation) and prompt.tools == ()
    for choice, message in [
        (allowed("required", *HOSTED), "requires a call, but allows no tool that is served"),
        (allowed("auto", {"type": "file_search"}), 'field "tool_choice" must be'),
        (HOSTED[1], 'field "tool_choice" is of type "image_generation", which is not served'),
    ]:
        refused = await post(**given, tool_choice=choice)
        assert message in refused.json()["error"]["message"]


async def test_a_search_on_openais_servers_is_left_out_because_all_tools_are_shown() -> None:
    deferred = TOOL | {"defer_loading": True}
    replica = calling("weather", {"city": "Rome"})
    earlier: list[Any] = [
        {"role": "user", "content": "Go"},
        {"type": "tool_search_call", "execution": "server", "arguments": {"paths": []}},
        {"type": "tool_search_output", "execution": "server", "tools": [deferred]},
    ]
    given = {"tools": [deferred, {"type": "tool_search"}], "input": earlier}
    reply = (await post(replica, **given)).json()
    types.Response.model_validate(reply, strict=True)
    assert [tool["type"] for tool in reply["tools"]] == ["function"]
    (tool,) = replica.tasks[0].prompt.tools
    assert tool["function"]["name"] == "weather"
    # The namespace that a found tool has, by which OpenAI's agents know it.
    (call,) = reply["output"]
    assert (call["namespace"], call["name"]) == ("weather", "weather")
    given["input"] = [*earlier, call]
    assert (await post(replica, **given)).status_code == 200
    assert replica.tasks[1].prompt.messages[-1].tool_calls[0].name == "weather"


BAD = [
    (
        {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
        'field "tools[0].environment" is not served',
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}]},
        'field "tools[0].tools[0].type" is "shell", which is not served',
    ),
    ({"tools": [{"type": "code_interpreter"}]}, '"tools[0].type" is "code_interpreter"'),
    ({"tools": [TOOL, {"type": "mcp"}], "stream": True}, '"tools[1].type" is "mcp"'),
    ({"tools": [{"type": "web_search"}]}, '"tools[0].type" is "web_search"'),
    ({"tools": [{"type": "tool_search"}]}, '"tools[0].type" is "tool_search"'),
    ({"tool_choice": {"type": "file_search"}}, 'field "tool_choice" must be'),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "shell"}] * 2049,
            }
        },
        'field "tool_choice.tools" has more than 2,048 items',
    ),
    ({"tool_choice": {"type": "shell"}}, 'field "tool_choice" names the tool "shell", which'),
    (
        {"input": [{"type": "shell_call", "call_id": "1", "action": {"commands": 5}}]},
        'field "input[0].action" is wrong',
    ),
    (
        {
            "input": [
                {
                    "type": "shell_call",
                    "call_id": "1",
                    "action": {"commands": [], "timeout_ms": 2**63},
                }
            ]
        },
        "timeout_ms",
    ),
    (
        {"input": [{"type": "apply_patch_call", "call_id": "1", "operation": {"type": "x"}}]},
        'field "input[0].operation" is wrong',
    ),
    ({"input": [{"type": "computer_call", "call_id": "1"}]}, '"input[0].actions" is required'),
    (
        {"input": [{"type": "computer_call_output", "call_id": "1", "output": "x"}]},
        'field "input[0].output" must be an object with a type',
    ),
    ({"tools": [{"type": "computer_use_preview"}]}, '"tools[0].display_width" is required'),
    (
        {"input": [{"type": "shell_call_output", "call_id": "1", "output": "a"}]},
        'field "input[0].output" is wrong',
    ),
    (
        {"input": [{"type": "apply_patch_call_output", "call_id": "1"}]},
        'field "input[0].status" must be completed or failed',
    ),
    ({"input": [{"type": "local_shell_call_output", "output": ""}]}, '"input[0].id" must be a str'),
    (
        {"input": [{"type": "tool_search_call", "arguments": 5}]},
        'field "input[0].arguments" must be an object',
    ),
    ({"input": [{"type": "tool_search_output"}]}, 'field "input[0].tools" must be a list'),
    (
        {"input": [{"type": "tool_search_output", "tools": [{"name": 5}]}]},
        'field "input[0].tools[0].name" must be a string',
    ),
    (
        {"input": [{"type": "additional_tools", "tools": [{"type": "mcp"}]}]},
        'field "input[0].tools[0].type" is "mcp", which is not served',
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
async def test_bad_fields_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    response = await post(**change)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_every_type_of_the_official_client_is_served_or_executed_by_openai() -> None:
    declared = {
        get_args(get_type_hints(each)["type"])[0] for each in get_args(tool_param.ToolParam)
    }
    elsewhere = {"file_search", "web_search", "web_search_preview", "mcp", "code_interpreter"}
    elsewhere |= {"image_generation", "programmatic_tool_calling"}
    assert declared - TYPES.keys() - elsewhere - {"namespace"} == set()


def test_every_field_of_the_official_client_is_known() -> None:
    for known, *kinds in (
        (
            ResponseTool,
            function_shell_tool_param.FunctionShellToolParam,
            types.ToolSearchToolParam,
            types.ComputerUsePreviewToolParam,
        ),
        (ShellEnvironment, LocalEnvironmentParam),
        (ShellSkill, types.LocalSkillParam),
    ):
        for kind in kinds:
            assert not kind.__annotations__.keys() - known.model_fields


async def test_the_official_client_refuses_nothing_of_a_stream() -> None:
    """Its accumulator knows the items."""
    tool, arguments, _ = CALLS["apply_patch"]
    async with openai_client(calling("apply_patch", arguments)) as client:
        given: Any = {"model": "demo", "input": "Go", "tools": [tool]}
        async with client.responses.stream(**given) as stream:
            final = await stream.get_final_response()
    assert isinstance(final.output[0], openai.types.responses.ResponseApplyPatchToolCall)
