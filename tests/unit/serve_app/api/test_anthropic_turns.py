"""System messages within Anthropic's conversations, and turns with tools of Anthropic's servers."""

from typing import Any, get_args, get_type_hints

import anthropic
import pytest
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from typing_extensions import is_typeddict

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ReplyStart, ToolCall
from serve_app.api.anthropic_results import FIELDS, RESULTS
from serve_app.messages.tasks import ReplyOpening
from tests.unit.serve_app.api.test_anthropic import TOOL, USER, asked, post, task_of
from tests.unit.serve_app.fake_replicas import PretendReplica, anthropic_client

TAGS = ReplyOpening(format_of("tools <tool_call>"))
STRICT: Any = {"access": {"strict_fields": True}}
ANSWER = {"role": "assistant", "content": "Fine."}
CALL: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}
REFERENCE = {"type": "tool_reference", "name": "weather"}


def names_of(task: Any) -> list[str]:
    return [tool["function"]["name"] for tool in task.prompt.tools]


def system(*blocks: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in blocks]
    return {"role": "system", "content": content, **fields}


def changed(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": tool}


def defined(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_definition", "definition": TOOL | {"name": name} | fields}


async def test_a_tool_runner_adds_and_removes_tools():
    call = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
    replica = PretendReplica((call.format("weather"),), TAGS)

    @anthropic.beta_async_tool
    async def weather() -> str:
        """The weather."""
        return "sunny"

    @anthropic.beta_async_tool
    async def time() -> str:
        """The time."""
        replica.words = ("It is noon.",)
        return "12:00"

    async with anthropic_client(replica) as client:
        runner = client.beta.messages.tool_runner(**asked(tools=[weather]))
        async for message in runner:
            called = getattr(message.content[0], "name", None)
            if called == "weather":
                replica.words = (call.format("time"),)
                runner.add_tools(time)
            elif called == "time":
                runner.remove_tools(weather)
    assert message.content[0].text == "It is noon."
    assert [names_of(task) for task in replica.tasks] == [
        ["weather"],
        ["weather", "time"],
        ["time"],
    ]
    roles = [each.role for each in replica.tasks[-1].prompt.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ([changed("removal", REFERENCE)], []),
        ([changed("removal", REFERENCE), changed("addition", REFERENCE)], ["weather"]),
        ([changed("addition", defined("time"))], ["weather", "time"]),
        ([changed("addition", defined("weather", description="It."))], ["weather"]),
        (
            [
                changed("addition", defined("time")),
                changed("removal", REFERENCE | {"name": "time"}),
            ],
            ["weather"],
        ),
    ],
)
async def test_system_messages_change_the_offered_tools(changes, offered):
    messages = [*USER, system("Note.", *changes)]
    task = await task_of(tools=[TOOL], messages=messages, **STRICT)
    assert names_of(task) == offered
    assert task.prompt.messages[-1] == Message("system", "Note.")


async def test_the_newest_definition_of_a_tool_applies():
    change = changed("addition", defined("weather", description="New.", strict=True))
    task = await task_of(tools=[TOOL], messages=[*USER, system(change)])
    assert task.prompt.tools[0]["function"]["description"] == "New."
    place = "messages[1].content[0].tool.definition.input_schema"
    assert task.calls.schemas == (("weather", place),)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (
            changed("removal", REFERENCE | {"name": "time"}),
            'field "messages[1].content[0].tool.name" names the tool "time", which is not declared',
        ),
        (changed("removal", defined("x")), '"messages[1].content[0].tool" is of type "tool_def'),
        (changed("addition", {"type": "mcp_toolset_reference"}), "which is not served here"),
        (
            changed("addition", {"type": "tool_definition", "definition": {"name": 5}}),
            'field "messages[1].content[0].tool.definition.name" must be',
        ),
        (
            changed("addition", {"type": "tool_definition", "definition": {"name": "a"}}),
            '"messages[1].content[0].tool.definition.input_schema" is required',
        ),
    ],
)
async def test_a_wrong_change_of_tools_is_refused_by_name(block, reason):
    response = await post(tools=[TOOL], messages=[*USER, system(block)])
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


async def test_a_system_message_of_one_turn_is_not_shown_in_later_ones():
    def note(text: str) -> dict[str, Any]:
        return system(text, clear_at="next_user_message")

    calls = {"role": "assistant", "content": [CALL]}
    turns = [*USER, note("a"), calls, RESULT, note("b"), system("c", clear_at="never")]
    task = await task_of(messages=turns, **STRICT)
    texts = [each.text for each in task.prompt.messages if each.role == "system"]
    assert texts == ["b", "c"]
    only = await post(messages=[system()])
    assert "no message that the model sees" in only.json()["error"]["message"]


def effort(value: str) -> dict[str, Any]:
    return {"role": "system", "output_config": {"effort": value}}


@pytest.mark.parametrize(
    ("turns", "thinking"),
    [
        ([*USER], "high"),
        ([*USER, effort("low")], "low"),
        ([*USER, system("Note."), effort("low")], "low"),
        ([*USER, ANSWER, effort("low"), *USER], "low"),
        ([*USER, ANSWER, effort("low"), RESULT], "high"),
        ([*USER, effort("low"), {"role": "assistant", "content": [CALL]}, RESULT], "low"),
        ([*USER, effort("low"), ANSWER, *USER, effort("max")], "max"),
    ],
)
async def test_the_place_of_an_effort_decides_when_it_begins(turns, thinking):
    task = await task_of(messages=turns, output_config={"effort": "high"}, **STRICT)
    assert task.prompt.thinking == thinking


SEARCHED = [
    {"type": "text", "text": "I search."},
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [
            {
                "type": "web_search_result",
                "url": "https://example.org",
                "title": "X",
                "encrypted_content": "AAAA",
            }
        ],
    },
    {"type": "text", "text": "It is X."},
]


async def test_a_conversation_with_tools_of_anthropics_servers_continues():
    turns = [*USER, {"role": "assistant", "content": SEARCHED}, *USER]
    task = await task_of(messages=turns, **STRICT)
    call = ToolCall("web_search", {"query": "x"}, "s1")
    found = '[{"type": "web_search_result", "url": "https://example.org", "title": "X"}]'
    assert task.prompt.messages[1:4] == (
        Message("assistant", "I search.", tool_calls=(call,)),
        Message("tool", found, tool_call_id="s1"),
        Message("assistant", "It is X."),
    )


async def test_a_turn_that_ends_with_a_result_is_answered_in_a_new_message():
    task = await task_of(messages=[*USER, {"role": "assistant", "content": SEARCHED[:3]}])
    assert (task.prompt.messages[-1].role, task.prompt.reply) == ("tool", ReplyStart.NEW)


async def test_a_summary_stands_for_what_is_before_it():
    change = changed("addition", defined("time"))
    summary = {"type": "compaction", "content": "Before: X.", "tool_changes": [change]}
    failed: dict[str, Any] = {"type": "compaction", "content": None}
    said = {"type": "text", "text": "Go on."}
    turns = [
        *USER,
        {"role": "assistant", "content": SEARCHED},
        *USER,
        {"role": "assistant", "content": [*SEARCHED, summary, failed, said]},
        *USER,
    ]
    task = await task_of(messages=turns, tools=[TOOL], **STRICT)
    texts = [(each.role, each.text) for each in task.prompt.messages]
    assert texts == [
        ("user", "Before: X."), ("assistant", "Go on."), ("user", USER[0]["content"])
    ]  # fmt: skip
    assert names_of(task) == ["weather", "time"]
    wrong = [*USER, {"role": "assistant", "content": [summary | {"content": 5}]}, *USER]
    refused = (await post(messages=wrong)).json()["error"]["message"]
    assert '"messages[1].content[0].content" must be a string' in refused


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Done.", "Done."),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ({"type": "code_execution_result", "stdout": "1", "content": []}, '"stdout": "1"'),
        ({"source": {"type": "base64", "data": "AAAA"}}, '{"source": {"type": "base64"}}'),
    ],
)
async def test_results_of_anthropics_servers_are_texts(content, text):
    kind = "mcp_tool_result" if isinstance(content, str | list) else "code_execution_tool_result"
    block = {"type": kind, "tool_use_id": "s1", "content": content}
    use = {"type": "mcp_tool_use", "id": "s1", "name": "f", "server_name": "s", "input": {}}
    turns = [*USER, {"role": "assistant", "content": [use, block]}, *USER]
    task = await task_of(messages=turns)
    assert text in task.prompt.messages[2].text


async def test_results_of_anthropics_servers_that_nest_too_deeply_are_refused():
    content: Any = []
    for _ in range(800):
        content = {"content": content}
    block = {"type": "code_execution_tool_result", "tool_use_id": "s1", "content": content}
    refused = await post(messages=[*USER, {"role": "assistant", "content": [block]}])
    assert refused.status_code == 400
    reason = '"messages[1].content[0].content" is nested more than 32 deep'
    assert reason in refused.json()["error"]["message"]


def test_all_results_of_the_official_client_are_known():
    """Their types, and the fields of their contents."""
    kinds = {}
    for part in filter(is_typeddict, get_args(BetaContentBlockParam)):
        hints = get_type_hints(part)
        for kind in get_args(hints["type"]):
            if str(kind).endswith("tool_result") and kind != "tool_result":
                kinds[kind] = hints["content"]
    assert set(kinds) == set(RESULTS)
    fields = {name for content in kinds.values() for name in _fields(content)}
    known = {"type", "text", "title", "content", "source", "citations", "cache_control", "context"}
    assert fields - known == set(FIELDS)


def _fields(hint: Any) -> set[str]:
    if is_typeddict(hint):
        hints = get_type_hints(hint)
        inner = (_fields(each) for name, each in hints.items() if name in ("content",))
        return set(hints).union(*inner)
    return set().union(*map(_fields, get_args(hint)))


HOSTED = [
    {"type": "web_search_20260318", "name": "web_search"},
    {"type": "web_fetch_20260318", "name": "web_fetch"},
    {"type": "code_execution_20260521", "name": "code_execution"},
    {"type": "advisor_20260301", "name": "advisor"},
]


async def test_tools_of_anthropics_servers_are_left_out_beside_others():
    assert names_of(await task_of(tools=[*HOSTED, TOOL])) == ["weather"]
    for tool in HOSTED:
        refused = await post(tools=[tool])  # the client wants nothing else
        assert f'"tools[0].type" is "{tool["type"]}"' in refused.json()["error"]["message"]
        wanted = {"type": "tool", "name": tool["name"]}
        chosen = await post(tools=[tool, TOOL], tool_choice=wanted)
        assert '"tool_choice.name" names a tool that is not' in chosen.json()["error"]["message"]
        strict = await post(tools=[tool, TOOL], **STRICT)
        assert f"tools[].type: {tool['type']}" in strict.json()["error"]["message"]
