"""Inputs of custom tools are held to their grammars in each family's form of calls."""

import json

import pytest

from model_zoo.grammars.constraint import CallRule, OutputForm, OutputKind
from model_zoo.grammars.token_grammar import TokenGrammar
from runtime.errors import RequestError
from serve_app.api.custom_tools import function_of
from serve_app.api.tools import described
from tests.byte_tokenizer import ByteTokenizer
from tests.unit.model_zoo.grammars.test_lark_regex import PATCH, PATCHED
from tests.unit.serve_app.replica.test_reply_forms import CODER, asked, forms_of, pretend_prompt

# Text of a call in some families' forms, before and after the input.
CALLS = {
    "tools <tool_call>": ('<tool_call>\n{"name": "edit", "arguments": {"input": ', "}}"),
    CODER: ("<tool_call>\n<function=edit>\n<parameter=input>\n", "\n</parameter>\n</function>"),
    "tools <|tool_list_start|>": ("<|tool_call_start|>[edit(input=", ")]"),
    "<|channel|> <|message|>": (
        '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"input": ',
        "}",
    ),
}
GOOD, BAD = PATCHED + "+ 'it' " + '"x\\n" \n*** End Patch', PATCHED + "# 3\n*** End Patch"


async def compiled(template: str, form: OutputForm) -> TokenGrammar:
    forms = forms_of(ByteTokenizer())
    rule = CallRule(("edit",), ("edit",), True, False, "tool_choice", (("edit", form),))
    tools = described([function_of("edit", "Edits.", form)])
    try:
        found = await forms.grammar(asked(None, tools=tools, calls=rule), pretend_prompt(template))
    finally:
        forms.close()
    assert found is not None
    return found


@pytest.mark.parametrize("template", CALLS)
async def test_an_input_follows_its_grammar_in_every_form_of_calls(template: str) -> None:
    grammar = await compiled(template, OutputForm(OutputKind.LARK, PATCH, "tools[0].format"))
    before, after = CALLS[template]

    def accepted(text: str) -> bool:
        written = text if template == CODER else json.dumps(text)
        reply = list((before + written + after).encode())
        return grammar.matcher().acceptable(reply) == len(reply)

    assert accepted(GOOD)
    assert not accepted(BAD)


@pytest.mark.parametrize("regex", ["^(?P<month>May|June) [0-9]{1,2}$", "(May|June) [0-9]{1,2}"])
async def test_an_input_matches_a_regular_expression_as_a_whole(regex: str) -> None:
    form = OutputForm(OutputKind.REGEX, regex, "tools[0].format")
    grammar = await compiled("tools <tool_call>", form)
    before, after = CALLS["tools <tool_call>"]
    for text, good in {"May 3": True, "June 31": True, "May": False, "In May 3": False}.items():
        reply = list(f'{before}"{text}"{after}'.encode())
        assert (grammar.matcher().acceptable(reply) == len(reply)) is good, text


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (OutputKind.LARK, 'start: "a" start?', 'cannot be enforced: rule "start" refers to itself'),
        (OutputKind.LARK, "start: /(/", "cannot be enforced: .*unclosed group"),
        (OutputKind.LARK, "start: /a)|(b/", "cannot be enforced: .*unopened group"),
        (OutputKind.REGEX, "a)|(b", "cannot be enforced: .*unopened group"),
        (OutputKind.REGEX, "a(?=b)", "look-around"),
    ],
)
async def test_what_cannot_be_enforced_is_refused(kind: OutputKind, source: str, reason: str):
    with pytest.raises(RequestError, match=reason) as raised:
        await compiled("tools <tool_call>", OutputForm(kind, source, "tools[0].format"))
    assert 'field "tools[0].format"' in str(raised.value)
