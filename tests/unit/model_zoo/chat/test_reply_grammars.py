"""Random replies under the grammar of each family are parsed to the demanded text and calls."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest

from model_zoo.chat.formats.allowed_calls import AllowedCalls
from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Text,
    Thinking,
)
from model_zoo.chat.formats.reply_format import ReplyFormat, format_of
from model_zoo.chat.formats.reply_grammar import reply_grammar
from model_zoo.chat.formats.scanner import MAX_DEPTH
from model_zoo.grammars.token_grammar import TokenGrammar, TokenGrammars
from tests.byte_tokenizer import TOKEN, ByteTokenizer
from tests.reply_parsing import TOOLS as SAMPLE_TOOLS
from tests.reply_transcripts import REPLIES

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,3}$"}},
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
CLOCK |= {"additionalProperties": False}
TOOLS = {"weather": CITY, "clock": CLOCK}
ANSWER = {"json_schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}},
                          "required": ["n"], "additionalProperties": False}}  # fmt: skip
# Families of which the transcripts have the words of a template.
WRITTEN = (
    "glm-4.6", "kimi-k2", "lfm2", "llama3.2-pythonic", "llama4", "gemma3-tool-code", "minimax-m1",
    "minimax-m2", "seed", "deepseek-v3.2", "apertus", "gigachat-3", "solar", "minicpm5",
    "functionary-3.1", "functionary-3.2", "firefunction", "qwen3-coder", "olmo-3", "hunyuan-dense",
    "minicpm3", "nemotron-mini", "functiongemma", "glm-4.1v", "kimi-vl", "hunyuan-3",
    "hunyuan-3-preview", "minimax-m3", "muse",
)  # fmt: skip
# The words of each template that the choice of its format reads.
TEMPLATES = {
    "mistral list": "tools [TOOL_CALLS]",
    "mistral names": "tools [TOOL_CALLS] [ARGS] [THINK] [/THINK]",
    "deepseek": "tools <｜tool▁calls▁begin｜> ```json <think> </think>",
    "deepseek v3.1": "tools <｜tool▁calls▁begin｜> <think> </think>",
    "command-a": "tools <|START_ACTION|> <|START_THINKING|> <|END_THINKING|>",
    "phi": "tools <|tool_call|>",
    "nemotron": "tools <TOOLCALL> <think> </think>",
    "gigachat": "tools <|function_call|>",
    "qwen": "tools <tool_call> <think> </think>",
    "command-r": "tools Action: ```json",
    "llama": "tools <|python_tag|>",
    "glm4": "tools [gMASK] <|observation|>",
    "generic": "",
    "harmony": "tools <|channel|> <|message|>",
    "llama4 pythonic": "tools [func_name1(param1=value1)] <|python_start|>",
    "apriel list": "tools <tool_calls>[",
    **{name: REPLIES[name][0] for name in WRITTEN},
    "gemma4": "tools <|tool_call> <|channel>thought",
}
MARKERS = sorted(
    {
        token
        for template in TEMPLATES.values()
        for marker in format_of(template).markup
        for token in TOKEN.findall(marker)
    }
)
# How an answer and a call of the clock begin where replies are messages.
MESSAGES = {
    "harmony": ("<|channel|>final<|message|>", "<|channel|>commentary to=functions.clock"),
    "functionary": ("all\n", "clock\n"),
    "muse": (" to=user<|message|>", " to=clock<|message|>"),
}
# Families whose markers are always control tokens, and those that are like others.
CONTROL_ONLY = {"harmony", *WRITTEN} - {
    "qwen3-coder", "lfm2", "olmo-3", "hunyuan-dense", "nemotron-mini", "kimi-vl",
}  # fmt: skip
# Vocabularies where these texts are control tokens, and where they are ordinary text.
VOCABULARIES = {"control": ByteTokenizer(*MARKERS), "text": ByteTokenizer()}
GRAMMARS = {name: TokenGrammars(tokenizer) for name, tokenizer in VOCABULARIES.items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Family:
    template: str
    vocabulary: str

    @property
    def format(self) -> ReplyFormat:
        return format_of(self.template)

    @property
    def tokenizer(self) -> ByteTokenizer:
        return VOCABULARIES[self.vocabulary]

    def grammar(self, *, answer=None, calls=None, thinks=False, continues=False, thinking=True):
        source = reply_grammar(
            self.tokenizer.vocabulary.control,
            self.format,
            may_think=thinking,
            thinks=thinks,
            continues=continues,
            answer=answer,
            calls=calls,
            form=call_form(self.format.name, self.template),
        )
        return GRAMMARS[self.vocabulary].compile(source)

    def reply(self, grammar, seed: int, begin: str = "") -> str | None:
        """Random tokens that the grammar allows, after the tokens of `begin`."""
        draw, tokenizer = np.random.default_rng(seed), self.tokenizer
        begun = tokenizer.encode(begin, parse_special=True)
        tokens: list[int] = []
        matcher = grammar.matcher()
        for _ in range(1500):
            mask = bytearray(4 * grammar.words)
            matcher.allowed(memoryview(mask))
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = bits.nonzero()[0]
            if begun:
                token = begun.pop(0)
                assert bits[token], (tokenizer.text(tokens), tokenizer.text([token]))
            elif bits[256] and draw.random() < 0.5:
                return tokenizer.text(tokens)
            else:
                markers = allowed[allowed > 256]
                few = markers if len(markers) and draw.random() < 0.2 else allowed
                token = int(draw.choice(few))
            if token == 256:
                return tokenizer.text(tokens)
            tokens.append(token)
            matcher.accept(token)
        return None

    def read(self, reply: str, *, thinks: bool = False, continues: bool = False) -> list[Event]:
        parser = self.format.parser(TOOLS, thinks=thinks, continues=continues)
        return [*parser.feed(reply), *parser.finish()]


FAMILIES = [
    pytest.param(Family(template, vocabulary), id=f"{name}, {vocabulary}")
    for name, template in TEMPLATES.items()
    for vocabulary in VOCABULARIES
    if vocabulary == "control" or name not in CONTROL_ONLY
]


def calls_in(events: list[Event]) -> list[tuple[str, Any]]:
    names = {e.index: e.name for e in events if isinstance(e, CallBegin)}
    texts = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.json
    assert sum(isinstance(event, CallEnd) for event in events) == len(names)
    return [(names[index], json.loads(text)) for index, text in texts.items()]


def text_in(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_are_calls_that_follow_their_schemas(family: Family, parallel: bool) -> None:
    calls = AllowedCalls(TOOLS, required=True, parallel=parallel)
    grammar = family.grammar(calls=calls, thinking=False)
    seen = set()
    for seed in range(2):
        reply = family.reply(grammar, seed)
        if reply is None:  # harmony's analysis may be long
            continue
        events = family.read(reply)
        found = calls_in(events)
        assert found and (parallel or len(found) == 1), reply
        assert family.format.name == "harmony" or not text_in(events).strip(), reply
        for name, arguments in found:
            jsonschema.validate(arguments, TOOLS[name])
            seen.add(name)
    assert seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_the_text_begins_after_thinking(family: Family) -> None:
    grammar = family.grammar(answer=ANSWER)
    thinking = family.format.thinking
    begin, thought = "", ""
    if thinking is not None:
        thought = "I see {[ \n</ ..."
        begin = f"{thinking.open}\n{thought}\n{thinking.close}\n\n"
    elif family.format.name == "harmony":
        thought = "so { be it"
        begin = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final"
    elif family.format.name == "muse":
        thought = "so { be it"
        begin = f" to=self<|message|>{thought}<|eom|><|start|>assistant to=user"
    for seed in range(3):
        reply = family.reply(grammar, seed, begin)
        assert reply is not None
        events = family.read(reply)
        jsonschema.validate(json.loads(text_in(events)), ANSWER["json_schema"])
        thoughts = "".join(event.text for event in events if isinstance(event, Thinking))
        assert thoughts.strip() == thought


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.values[0].format.thinking])
def test_a_prompt_that_opens_thinking_has_it_closed_before_the_form(family: Family) -> None:
    thinking = family.format.thinking
    assert thinking is not None
    grammar = family.grammar(answer=ANSWER, thinks=True)
    reply = family.reply(grammar, 1, f"hm{thinking.close}")
    assert reply is not None
    events = family.read(reply, thinks=True)
    jsonschema.validate(json.loads(text_in(events)), ANSWER["json_schema"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_ends_within_the_text_has_the_form_at_once(family: Family) -> None:
    grammar = family.grammar(answer=ANSWER, continues=True)
    for seed in range(3):
        reply = family.reply(grammar, seed, "{")
        assert reply is not None
        events = family.read(reply, continues=True)
        jsonschema.validate(json.loads(text_in(events)), ANSWER["json_schema"])


# Replies with thinking, of which the grammar allows none when it is off.
THOUGHTS = {
    "harmony": "<|channel|>analysis<|message|>I<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
    "muse": " to=self<|message|>I<|eom|><|start|>assistant<|message|>",
    "qwen": "<think>I</think>",
    "gemma4": "<|channel>thought\nI<channel|>",
}


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("calls", [None, AllowedCalls(TOOLS, required=False, parallel=True)])
def test_there_is_no_thinking_where_it_is_off(name: str, calls: AllowedCalls | None) -> None:
    family = Family(TEMPLATES[name], "control")
    reply = THOUGHTS[name] + '{"n": 1}'
    assert_allowed(family, family.grammar(answer=ANSWER, calls=calls), reply)
    with pytest.raises(AssertionError):
        assert_allowed(family, family.grammar(answer=ANSWER, calls=calls, thinking=False), reply)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.values[0].vocabulary == "control"])
def test_a_reply_of_the_form_needs_no_call(family: Family) -> None:
    calls = AllowedCalls(TOOLS, required=False, parallel=True)
    begin, _ = MESSAGES.get(family.format.name, ("", ""))
    assert_allowed(family, family.grammar(answer=ANSWER, calls=calls), begin + '{"n": 1}')


ENCLOSED = {
    "granite": ("tools <|tool_call|> </think> <response></response>", "<response>", "</response>"),
    "hunyuan": ("</think> <answer>", "<answer>\n", "\n</answer>"),
    "apriel": (REPLIES["apriel"][0], "", "\n[END FINAL RESPONSE]"),
}


@pytest.mark.parametrize("name", ENCLOSED)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_markup_around_an_answer_is_allowed_and_not_part_of_its_form(
    name: str, vocabulary: str
) -> None:
    template, before, after = ENCLOSED[name]
    family = Family(template, vocabulary)
    thinking = family.format.thinking
    assert thinking is not None
    thought = f"{thinking.open}I see{thinking.close}\n"
    begins = {thought + before, thought, before or thought}
    for begun, ended in itertools.product(begins, (after, "")):
        reply = f'{begun}{{"n": 1}}{ended}'
        assert_allowed(family, family.grammar(answer=ANSWER), reply)
        parser = family.format.parser(TOOLS, formed=True)
        assert text_in([*parser.feed(reply), *parser.finish()]) == '{"n": 1}'


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_of_a_form_has_no_markup_in_its_strings(name: str) -> None:
    form = format_of(TEMPLATES[name])
    if form.of_messages:
        pytest.skip("messages end with control tokens")
    thinking = form.thinking
    markers = {*form.markup, "<think>", "</think>"}
    for marker in sorted(markers):
        text = json.dumps([f"{marker} a {marker}\n", {"name": "clock", "arguments": {}}])
        for begun in ("", f"{thinking.open}I{thinking.close}" if thinking else ""):
            for pieces in ([begun + text], list(begun + text)):
                parser = form.parser(TOOLS, formed=True)
                events = [event for piece in pieces for event in parser.feed(piece)]
                assert text_in([*events, *parser.finish()]) == text


NESTED = {
    "lfm2": ("<|tool_call_start|>[f(a=", ")]<|tool_call_end|>", "[", "]"),
    "gemma4": ("<|tool_call>call:f{a:", "}<tool_call|>", "[", "]"),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("schema", [{}, {"$ref": "#/$defs/list"}])
def test_values_nest_as_deep_as_they_are_read(name: str, schema: dict[str, Any]) -> None:
    family = Family(TEMPLATES[name], "control")
    lists = {"type": "array", "items": {"$ref": "#/$defs/list"}}
    tools = {"f": {"properties": {"a": schema}, "required": ["a"], "$defs": {"list": lists}}}
    grammar = family.grammar(calls=AllowedCalls(tools, required=True, parallel=False))
    begin, end, opener, closer = NESTED[name]
    inner = {"lfm2": "'x'", "gemma4": '<|"|>x<|"|>'}[name] if not schema else ""
    for levels in (MAX_DEPTH, MAX_DEPTH + 1):
        reply = begin + opener * levels + inner + closer * levels + end
        if levels == MAX_DEPTH:
            assert_allowed(family, grammar, reply)
            parser = family.format.parser(tools)
            assert len(calls_in([*parser.feed(reply), *parser.finish()])) == 1
        else:
            with pytest.raises(AssertionError):
                assert_allowed(family, grammar, reply)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.values[0].format.thinking])
def test_thinking_may_mention_the_marker_of_calls(family: Family) -> None:
    thinking, form = family.format.thinking, call_form(family.format.name, family.template)
    assert thinking is not None and form is not None
    marker = form.begin.strip() if family.vocabulary == "text" else "tool"
    thought = f"I might write {marker} now"
    calls = AllowedCalls({"clock": CLOCK}, required=False, parallel=True)
    begin = f"{thinking.open}{thought}{thinking.close}{form.begin}"
    for thinks in (False, True):
        grammar = family.grammar(calls=calls, thinks=thinks)
        reply = family.reply(grammar, 3, begin.removeprefix(thinking.open) if thinks else begin)
        assert reply is not None
        events = family.read(reply, thinks=thinks)
        assert events[0] == Thinking(thought)
        assert calls_in(events)[0][0] == "clock"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_free_until_a_call_begins(family: Family) -> None:
    calls = AllowedCalls({"clock": CLOCK}, required=False, parallel=True)
    grammar = family.grammar(calls=calls)
    form = call_form(family.format.name, family.template)
    answers, begin = MESSAGES.get(family.format.name, ("", form.begin if form else ""))
    said = "Well, { [ it <b> is"
    for seed in range(3):
        free = family.reply(grammar, seed, f"{answers}{said}")
        assert free is None or said in text_in(family.read(free))
    if begin or family.format.name == "llama":
        reply = family.reply(grammar, 7, begin or '{"name"')
        assert reply is not None
        [*_, (name, arguments)] = calls_in(family.read(reply))
        assert name == "clock"
        jsonschema.validate(arguments, CLOCK)


# Transcripts of calls that the schema does not declare, or of forms that the words of the template
# in the transcripts do not imply.
OTHER_FORMS = {
    "lfm2.5", "olmo-3 on lines of their own", "llama4-pythonic", "llama4", "apriel", "magistral",
    "qwen3-coder", "hunyuan-dense on lines of their own", "hunyuan-dense in A13B's notation",
    "minicpm3 with text", "functiongemma with nested values", "command-r with a call, then none",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in REPLIES if REPLIES[n][2].calls])
def test_replies_as_published_templates_render_them_are_allowed(name: str) -> None:
    if name in OTHER_FORMS:
        pytest.skip("calls of other schemas or forms")
    template, text, _ = REPLIES[name]
    family = Family(template, "control")
    grammar = family.grammar(calls=AllowedCalls(SAMPLE_TOOLS, required=False, parallel=True))
    assert_allowed(family, grammar, text.rstrip())


CODER, GLM = "tools <tool_call> <function=", "tools <tool_call> <arg_key>"
WRONG = {
    "coder: missing": (CODER, "<tool_call>\n<function=clock>\n</function>\n</tool_call>"),
    "coder: value": (
        CODER,
        "<tool_call>\n<function=clock>\n<parameter=zone>\nX\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm: undeclared": (
        GLM,
        "<tool_call>clock<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
    ),
    "glm: twice": (
        GLM,
        "<tool_call>clock<arg_key>zone</arg_key><arg_value>UTC</arg_value><arg_key>zone</arg_key>"
        "<arg_value>UTC</arg_value></tool_call>",
    ),
    "gemma: number": ("tools <|tool_call>", "<|tool_call>call:clock{zone:1}<tool_call|>"),
    "gemma: pattern": (
        "tools <|tool_call>",
        '<|tool_call>call:weather{city:<|"|>bern<|"|>}<tool_call|>',
    ),
    "lfm2: bound": (
        "tools <|tool_list_start|>",
        "<|tool_call_start|>[weather(city='Bern', days=10)]<|tool_call_end|>",
    ),
    "functionary": (">>>all >>>${recipient}", 'clock\n{"zone": "X"}'),
}


@pytest.mark.parametrize("case", WRONG)
def test_calls_that_do_not_follow_the_schema_are_not_allowed(case: str) -> None:
    template, text = WRONG[case]
    family = Family(template, "control")
    grammar = family.grammar(calls=AllowedCalls(TOOLS, required=True, parallel=False))
    with pytest.raises(AssertionError):
        assert_allowed(family, grammar, text)


def assert_allowed(family: Family, grammar: TokenGrammar, text: str) -> None:
    matcher = grammar.matcher()
    (end,) = family.tokenizer.end_tokens
    for token in [*family.tokenizer.encode(text, parse_special=True), end]:
        mask = bytearray(4 * grammar.words)
        matcher.allowed(memoryview(mask))
        assert mask[token // 8] >> token % 8 & 1, family.tokenizer.text([token])
        matcher.accept(token)
