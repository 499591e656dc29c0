"""Typed tools of Anthropic's protocol: shells, editors, memory, computers, browsers."""

import json
from typing import Any, get_args, get_type_hints

import anthropic
import pytest
from anthropic.tools import browser
from anthropic.types import beta

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ToolCall
from serve_app.api.anthropic_tools import TYPES, DeclaredTool, ToolSettings
from serve_app.api.anthropic_toolsets import TOOLSETS, Toolset
from serve_app.messages.tasks import ReplyOpening
from tests.unit.serve_app.api.test_anthropic import TOOL, USER, asked, post, task_of
from tests.unit.serve_app.fake_replicas import PretendReplica, anthropic_client

TAGS = ReplyOpening(format_of("tools <tool_call>"))
SCREEN = {"name": "computer", "display_width_px": 640, "display_height_px": 480}
SCREENS = {"type": "computer_toolset_20260801"}
EDITOR = "str_replace_based_edit_tool"
# Tools, and inputs that clients know.
INPUTS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"type": "bash_20250124", "name": "bash"}, [{"command": "ls"}, {"restart": True}]),
    (
        {"type": "text_editor_20250728", "name": EDITOR, "max_characters": 900},
        [
            {"command": "view", "path": "/a", "view_range": [1, -1]},
            {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "b"},
        ],
    ),
    (
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        [
            {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "b"},
            {"command": "undo_edit", "path": "/a"},
        ],
    ),
    (
        {"type": "memory_20250818", "name": "memory"},
        [
            {"command": "create", "path": "/memories/a", "file_text": "b"},
            {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
        ],
    ),
    (
        {"type": "computer_20241022", **SCREEN},
        [{"action": "left_click_drag", "coordinate": [1, 2]}],
    ),
    (
        {"type": "computer_20250124", **SCREEN},
        [{"action": "scroll", "scroll_direction": "up", "scroll_amount": 2}],
    ),
    (
        {"type": "computer_20251124", "enable_zoom": True, **SCREEN},
        [{"action": "zoom", "region": [0, 0, 9, 9]}],
    ),
]


def calling(name: str, arguments: dict[str, Any]) -> PretendReplica:
    call = json.dumps({"name": name, "arguments": arguments})
    return PretendReplica((f"<tool_call>{call}</tool_call>",), TAGS)


@pytest.mark.parametrize(("tool", "inputs"), INPUTS, ids=[tool["type"] for tool, _ in INPUTS])
async def test_a_typed_tool_is_a_function_with_the_inputs_that_clients_know(
    tool: dict[str, Any], inputs: list[dict[str, Any]]
) -> None:
    (declared,) = (await task_of(tools=[tool])).prompt.tools
    function = declared["function"]
    assert function["name"] == tool["name"]
    properties = function["parameters"]["properties"]
    for given in inputs:
        assert set(function["parameters"]["required"]) <= given.keys() <= properties.keys()
        for name in ("command", "action"):
            assert given.get(name) in properties.get(name, {}).get("enum", [given.get(name)])


async def test_settings_of_typed_tools_are_described() -> None:
    screen = INPUTS[-1][0]
    tools = (await task_of(tools=[INPUTS[1][0], screen])).prompt.tools
    editor, computer = (tool["function"]["description"] for tool in tools)
    assert "at most 900 characters" in editor
    assert "640 x 480 pixels" in computer
    first = (await task_of(tools=[screen | {"type": "computer_20241022"}])).prompt.tools[0]
    actions = first["function"]["parameters"]["properties"]["action"]["enum"]
    assert "zoom" in actions and "scroll" not in actions


async def test_the_official_client_calls_a_typed_tool() -> None:
    """Its tool runner executes the call and sends the result."""
    replica = calling("memory", {"command": "view", "path": "/memories"})

    class Memory(anthropic.lib.tools.BetaAsyncAbstractMemoryTool):
        async def view(self, command: Any) -> str:
            replica.words = ("You like tea.",)
            return f"{command.path}: tea"

        async def create(self, command: Any) -> str:
            raise NotImplementedError

        str_replace = insert = delete = rename = create

    async with anthropic_client(replica) as client:
        given = asked(tools=[Memory()])
        reply = await client.beta.messages.tool_runner(**given).until_done()
    assert reply.content[0].text == "You like tea."
    messages = replica.tasks[-1].prompt.messages
    assert (messages[-1].role, messages[-1].text) == ("tool", "/memories: tea")


async def test_the_official_client_drives_a_browser() -> None:
    """Its results have the state of the browser, of which the model reads a text."""
    replica = calling("browser.navigate", {"url": "https://a.example"})
    tab = {"tab_id": "7", "title": "A\nb", "url": "https://a.example/", "active": True}
    changes: list[Any] = [
        {"type": "tab_opened", "tab_id": "7"},
        {"type": "download_started", "download_id": "1", "url": "https://a.example/1"},
        {"type": "download_completed", "download_id": "2", "url": "u", "size_bytes": 5},
        {"type": "download_failed", "download_id": "3", "url": "u", "error": "No."},
    ]

    class Browser(browser.BetaAsyncAbstractBrowserToolset20260801):
        async def navigate(self, context: Any, input: Any) -> Any:
            replica.words = ("Done.",)
            return browser.BetaBrowserNavigateResult(url=input.url)

        async def _browser_state(self, context: Any) -> Any:
            return browser.BetaBrowserState(tabs=[tab], state_changes=changes)

    async with anthropic_client(replica, strict_fields=True) as client:
        given = asked(tools=[Browser()])
        await client.beta.messages.tool_runner(**given).until_done()
    result = replica.tasks[-1].prompt.messages[-1]
    assert result.role == "tool"
    assert result.text.endswith(
        "\n<browser_state>\n"
        "tab 7 (active): A b https://a.example/\n"
        "tab 7 was opened\n"
        "download 1 was started: https://a.example/1\n"
        "download 2 was completed: u, 5 bytes\n"
        "download 3 failed: u, No.\n"
        "</browser_state>\n"
    )


@pytest.mark.parametrize(
    "state", [{}, {"tabs": [5]}, {"tabs": [], "state_changes": [{"type": "tab_closed"}]}]
)
async def test_a_bad_state_of_a_browser_is_refused_by_name(state: dict[str, Any]) -> None:
    result = {"type": "tool_result", "tool_use_id": "1"}
    result["content"] = [{"type": "browser_state", **state}]
    response = await post(messages=[{"role": "user", "content": [result]}])
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith('field "messages[0].content[0].content[0]" is wrong: ')


async def test_strict_holds_calls_of_typed_tools_to_the_parameters() -> None:
    bash = INPUTS[0][0]
    assert (await task_of(tools=[bash])).calls is None
    assert (await task_of(tools=[bash | {"strict": True}])).calls.strict == ("bash",)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_a_toolset_name_it(stream: bool) -> None:
    replica = calling("computer.left_click", {"coordinate": [1, 2]})
    off = {"zoom": {"enabled": False}, "wait": None, "key": {"enabled": True}}
    async with anthropic_client(replica) as client:
        given: Any = asked(tools=[SCREENS | {"configs": off}, TOOL])
        if stream:
            async with client.messages.stream(**given) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**given)
        (block,) = reply.content
        member = anthropic.types.ComputerLeftClickToolUseBlock.model_validate(block.to_dict())
        assert member.input.coordinate == [1, 2]
        result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "Done."}
        turns = [
            {"role": "assistant", "content": [block.to_dict()]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**given | {"messages": [*USER, *turns]})
    names = [tool["function"]["name"] for tool in replica.tasks[0].prompt.tools]
    assert {"computer.key", "computer.wait", "weather"} <= set(names)
    assert "computer.zoom" not in names
    called = ToolCall("computer.left_click", {"coordinate": [1, 2]}, block.id)
    assert replica.tasks[1].prompt.messages[1] == Message("assistant", tool_calls=(called,))


async def test_a_search_on_anthropics_servers_is_left_out_because_all_tools_are_shown() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    deferred = TOOL | {"defer_loading": True}
    task = await task_of(tools=[search, deferred])
    assert [tool["function"]["name"] for tool in task.prompt.tools] == ["weather"]
    refused = (await post(tools=[search])).json()["error"]["message"]
    assert '"tools[0].type" is "tool_search_tool_bm25_20251119"' in refused
    strict = await post(tools=[search, deferred], access={"strict_fields": True})
    assert "tools[].type: tool_search_tool_bm25_20251119" in strict.json()["error"]["message"]


BAD = [
    ({"type": "bash_20250124"}, 'field "tools[0].name" is required'),
    ({"type": "computer_20250124", "name": "c"}, '"tools[0].display_width_px" is required'),
    (
        SCREENS | {"configs": {"fly": {}}},
        '"tools[0].configs" has "fly", which is not one of its tools',
    ),
    (SCREENS | {"configs": {"key": 5}}, 'field "tools[0].configs.key" must be an object'),
    ({"type": "code_execution_20250825", "name": "c"}, 'type" is "code_execution_20250825"'),
]


@pytest.mark.parametrize(("tool", "message"), BAD, ids=[message for _, message in BAD])
async def test_bad_tools_are_refused_by_name(tool: dict[str, Any], message: str) -> None:
    response = await post(tools=[tool])
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_every_type_of_the_official_client_is_served_or_executed_by_anthropic() -> None:
    """Or by MCP servers that Anthropic's servers call."""
    kinds = {
        kind
        for each in get_args(beta.BetaToolUnionParam)
        for kind in get_args(get_type_hints(each)["type"])
        if isinstance(kind, str)
    }
    elsewhere = ("web_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_")
    assert not {kind for kind in kinds if not kind.startswith(elsewhere)} - TYPES.keys()


def test_every_field_of_the_official_client_is_known() -> None:
    for each in get_args(beta.BetaToolUnionParam):
        if get_args(get_type_hints(each)["type"])[0] in TYPES:
            assert not get_type_hints(each).keys() - DeclaredTool.model_fields
    settings = anthropic.types.ComputerKeyConfigParam
    assert not get_type_hints(settings).keys() - ToolSettings.model_fields


@pytest.mark.parametrize(
    ("toolset", "blocks"),
    [
        (TOOLSETS["computer_toolset_20260801"], anthropic.types.ComputerToolUseBlock),
        (TOOLSETS["browser_toolset_20260801"], anthropic.types.BrowserToolUseBlock),
    ],
    ids=["computer", "browser"],
)
def test_every_tool_of_a_toolset_of_the_official_client_is_known(
    toolset: Toolset, blocks: Any
) -> None:
    members = dict(toolset.members)
    for block in get_args(get_args(blocks)[0]):
        inputs = block.model_fields["input"].annotation.model_fields
        _, parameters, required = members.pop(get_args(block.model_fields["name"].annotation)[0])
        known = {info.alias or name: info for name, info in inputs.items()}
        assert parameters.keys() == known.keys()
        assert set(required) == {name for name, info in known.items() if info.is_required()}
    assert not members


async def test_a_tool_with_the_name_of_one_that_is_not_enabled_is_no_part_of_the_toolset() -> None:
    own = {"name": "browser.file_upload", "input_schema": {"type": "object"}}
    tools = [{"type": "browser_toolset_20260801"}, own]
    (block,) = (await post(calling(own["name"], {}), tools=tools)).json()["content"]
    assert (block["name"], "toolset_name" in block) == (own["name"], False)


async def test_some_tools_of_a_browser_must_be_enabled() -> None:
    async def names(**configs: Any) -> set[str]:
        tools = [{"type": "browser_toolset_20260801", "configs": configs}]
        return {each["function"]["name"] for each in (await task_of(tools=tools)).prompt.tools}

    plain = await names()
    assert "browser.navigate" in plain
    assert "browser.javascript_exec" not in plain
    assert await names(javascript_exec={"enabled": True}) == plain | {"browser.javascript_exec"}


async def test_tool_choice_none_hides_the_tools():
    prompt = (await task_of(tools=[TOOL], tool_choice={"type": "none"})).prompt
    assert prompt.tools == ()
