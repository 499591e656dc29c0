"""Tools in conversations for templates that read none."""

from model_zoo.chat.formats.generic import generic_messages
from model_zoo.chat.messages import Message, ToolCall

TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
ASKED = Message("user", "When?")


def test_tools_are_described_in_the_system_message():
    (system, asked) = generic_messages([ASKED], TOOLS)
    assert asked == ASKED
    assert system.role == "system"
    assert '{"name": "time", "parameters": {}}' in system.text
    (system, _) = generic_messages([Message("system", "Be brief."), ASKED], TOOLS)
    assert system.text.startswith("Be brief.\n\n")


def test_calls_and_results_become_text_in_the_form_that_is_parsed():
    calls = (ToolCall("time", {"zone": "é"}), ToolCall("time", {}))
    messages = [
        ASKED,
        Message("assistant", "I look.", tool_calls=calls),
        Message("tool", "9", tool_name="time"),
        Message("tool", "10", tool_name="time"),
    ]
    _, called, results = generic_messages(messages, ())
    assert called.tool_calls == ()
    assert called.text == (
        'I look.\n<tool_call>\n{"name": "time", "arguments": {"zone": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    )
    assert (results.role, results.text) == (
        "user",
        "<tool_response>\n9\n</tool_response>\n<tool_response>\n10\n</tool_response>",
    )


def test_other_conversations_stay_as_they_are():
    assert generic_messages([ASKED], ()) == [ASKED]
