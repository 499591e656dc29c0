"""Calls of typed tools follow their parameters in each family's format."""

import json

import pytest

from model_zoo.grammars.constraint import CallRule
from serve_app.api.anthropic_tools import DeclaredTool, OfferedTool, functions_of
from serve_app.api.offered_tools import OfferedTools
from serve_app.api.responses_tools import ResponseTool
from serve_app.api.tools import described
from tests.byte_tokenizer import ByteTokenizer
from tests.unit.serve_app.replica.test_reply_forms import CODER, asked, forms_of, pretend_prompt

RESPONSES = ("shell", "local_shell", "apply_patch", "computer")
ANTHROPIC = (
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "computer_toolset_20260801"},
    {"type": "browser_toolset_20260801"},
)
# Templates of families with different formats: JSON, elements, Python, gpt-oss.
TEMPLATES = ("tools <tool_call>", CODER, "tools <|tool_list_start|>", "<|channel|> <|message|>")


@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_parameters_can_be_enforced(template: str) -> None:
    typed = [ResponseTool(type=kind) for kind in RESPONSES]
    declared = functions_of([OfferedTool("tools[0]", DeclaredTool(**each)) for each in ANTHROPIC])
    tools = OfferedTools.of(typed, []).functions() + described(declared)
    names = tuple(tool["function"]["name"] for tool in tools)
    forms = forms_of(ByteTokenizer())
    try:
        rule = CallRule(names, names, True, False, "tools")
        grammar = await forms.grammar(
            asked(None, tools=tools, calls=rule), pretend_prompt(template)
        )
    finally:
        forms.close()
    assert grammar is not None
    if template == TEMPLATES[0]:
        call = {"name": "shell", "arguments": {"commands": ["ls"]}}
        for given, good in ((call, True), (call | {"arguments": {"commands": "ls"}}, False)):
            reply = list(f"<tool_call>\n{json.dumps(given)}".encode())
            assert (grammar.matcher().acceptable(reply) == len(reply)) is good
