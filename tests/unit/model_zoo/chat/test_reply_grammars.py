"""Random replies under the grammar of each family are read back by its parser as demanded."""

import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest

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
from model_zoo.chat.formats.reply_grammar import AllowedCalls, ReplyGrammar
from model_zoo.grammars.token_grammar import TokenGrammars
from tests.byte_tokenizer import ByteTokenizer

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
}
MARKERS = (
    "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|tool_call|>", "<|/tool_call|>", "<|function_call|>", "<|python_tag|>",
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>",
)  # fmt: skip
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

    def grammar(self, *, answer=None, calls=None, thinks=False, thinking=True):
        builder = ReplyGrammar(self.tokenizer.vocabulary.control)
        if self.format.name == "harmony":
            source = builder.harmony(answer, calls)
        else:
            source = builder.tagged(
                thinking=self.format.thinking if thinking or thinks else None,
                thinks=thinks,
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

    def read(self, reply: str, *, thinks: bool = False) -> list[Event]:
        parser = self.format.parser(TOOLS, thinks=thinks)
        return [*parser.feed(reply), *parser.finish()]


FAMILIES = [
    pytest.param(Family(template, vocabulary), id=f"{name}, {vocabulary}")
    for name, template in TEMPLATES.items()
    for vocabulary in VOCABULARIES
    if (name, vocabulary) != ("harmony", "text")  # its markers are always control tokens
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
    for seed in range(6):
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
    harmony = family.format.name == "harmony"
    final = "<|channel|>final<|message|>" if harmony else ""
    said = "Well, { [ it <b> is"
    for seed in range(3):
        free = family.reply(grammar, seed, f"{final}{said}")
        assert free is None or said in text_in(family.read(free))
    form = call_form(family.format.name, family.template)
    begin = "<|channel|>commentary to=functions.clock" if harmony else form.begin if form else ""
    if begin or family.format.name == "llama":
        reply = family.reply(grammar, 7, begin or '{"name"')
        assert reply is not None
        [*_, (name, arguments)] = calls_in(family.read(reply))
        assert name == "clock"
        jsonschema.validate(arguments, CLOCK)
