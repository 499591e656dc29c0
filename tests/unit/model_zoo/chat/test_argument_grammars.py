"""Random schemas under the grammar of each family's calls: every call validates.

CARAVAN_RANDOM_SCHEMAS sets the number of schemas for each family; 1,000 take some minutes.
"""

import json
import os
import zlib
from collections import Counter
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from model_zoo.chat.formats.allowed_calls import AllowedCalls, UnwritableArguments
from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.formats.reply_grammar import reply_grammar
from model_zoo.grammars.equal_schemas import simplified
from model_zoo.grammars.json_schema import compilable
from model_zoo.grammars.token_grammar import GrammarError, TokenGrammar, TokenGrammars, check
from runtime.errors import GenerationFailedError
from tests.byte_tokenizer import TOKEN, ByteTokenizer
from tests.reply_parsing import parsed, replied
from tests.unit.model_zoo.chat.test_reply_grammars import TEMPLATES
from tests.unit.model_zoo.grammars.random_schemas import NESTED, REPEATED, widened

SCHEMAS = int(os.environ.get("CARAVAN_RANDOM_SCHEMAS", "5"))
# Ends of values, so that random texts end.
ENDS = ("'", '"', "}", "]", ")", ">", "/", "null", ", ")


@cache
def family_of(name: str) -> "Family":
    return Family(TEMPLATES[name])


def validate(value: Any, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)


class Family:
    """A format over bytes, its control tokens, and the ends of its values."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.format = format_of(template)
        markup = self.format.markup
        tokens = {token for each in markup for token in TOKEN.findall(each)}
        plain = {each for each in markup if not TOKEN.search(each)}
        ends = sorted(plain | {f"\n{each}" for each in plain} | set(ENDS))
        self.tokenizer = ByteTokenizer(*sorted(tokens), texts=ends)
        self.grammars = TokenGrammars(self.tokenizer)  # type: ignore[arg-type]

    def grammar(self, schema: Any) -> TokenGrammar:
        return self.grammars.compile(
            reply_grammar(
                self.tokenizer.vocabulary.control,
                self.format,
                may_think=False,
                thinks=False,
                answer=None,
                calls=AllowedCalls({"f": simplified(schema)}, required=True, parallel=False),
                form=call_form(self.format.name, self.template),
            )
        )

    def reply(self, grammar: TokenGrammar, seed: int) -> str | None:
        """Random tokens that the grammar allows; None if they do not end."""
        draw, matcher, tokens = np.random.default_rng(seed), grammar.matcher(), []
        (end,) = self.tokenizer.end_tokens
        for _ in range(300):
            mask = bytearray(4 * grammar.words)
            matcher.allowed(memoryview(mask))
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = bits.nonzero()[0]
            ends = allowed[allowed >= end]
            token = int(draw.choice(ends if len(ends) and draw.random() < 0.4 else allowed))
            if token == end:
                return self.tokenizer.text(tokens)
            tokens.append(token)
            matcher.accept(token)
        return None

    def call(self, reply: str, schema: Any) -> Any:
        """The arguments of the only call."""
        found = parsed(replied(self.format, [reply], tools={"f": schema}))
        assert len(found.calls) == 1 and not found.text.strip(), reply
        return found.calls[0][1]


@st.composite
def parameters(draw) -> dict[str, Any]:
    """Schemas of arguments, as requests declare them."""
    names = st.sampled_from(["a", "b2", "C", "item", "long_name"])
    properties = draw(st.dictionaries(names, NESTED, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    schema = {"type": "object", "properties": properties, "required": required}
    more = st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": {}}])
    return schema | draw(more)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_call_follows_its_schema(name: str) -> None:
    family, counts, wrong = family_of(name), Counter[str](), []

    @settings(REPEATED, max_examples=SCHEMAS, phases=[Phase.generate])
    @given(parameters())
    def follow(schema) -> None:
        try:
            check_json(schema)
        except GrammarError:
            counts["refused as JSON"] += 1
            return
        try:
            grammar = family.grammar({**(simplified(schema) or schema), "type": "object"})
        except UnwritableArguments as error:
            counts[f"refused: {error}"] += 1
            return
        reply = None
        try:
            reply = family.reply(grammar, zlib.crc32(json.dumps(schema).encode()))
            if reply is None:
                counts["unfinished"] += 1
                return
            arguments = family.call(reply, schema)
            validate(arguments, widened(schema))
            counts["validated"] += 1
        except (AssertionError, GenerationFailedError, jsonschema.ValidationError) as error:
            wrong.append((schema, reply, str(error)))

    follow()
    print(name, dict(counts), "invalid:", len(wrong))
    assert not wrong
    assert counts["validated"] > SCHEMAS / 8


# Families that write arguments otherwise than as JSON.
WRITTEN = (
    "glm-4.6", "lfm2", "minimax-m2", "seed", "deepseek-v3.2", "minicpm5", "qwen3-coder", "gemma4",
    "olmo-3", "functiongemma",
)  # fmt: skip
TEXT, COUNT = {"type": "string", "maxLength": 9}, {"type": "integer", "maximum": 99}
BASE = {"type": "object", "properties": {"x": TEXT}, "required": ["x"]}
CAT = {"properties": {"kind": {"const": "cat"}, "lives": COUNT}, "required": ["kind", "lives"]}
DOG = {"properties": {"kind": {"const": "dog"}, "name": TEXT}, "required": ["kind", "name"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}},
}
# Schemas of one argument.
COMBINED: dict[str, Any] = {
    "texts": {"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 4}]},
    "numbers": {"allOf": [{"type": ["number", "null"], "minimum": 2}, {"type": "integer"}, COUNT]},
    "multiples": {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}, COUNT]},
    "members": {"allOf": [BASE, {"properties": {"y": COUNT}, "required": ["y"]}]},
    "a member of both": {
        "allOf": [BASE, {"properties": {"x": {"enum": ["a", 1, "longer than it"]}}}]
    },
    "beside a reference": {"$ref": "#/$defs/base", "properties": {"y": COUNT}, "required": ["y"]},
    "beside alternatives": {
        "type": "object",
        "properties": {"x": TEXT, "y": COUNT},
        "anyOf": [{"required": ["x"]}, {"required": ["y"]}],
    },
    "closed": {"allOf": [{**BASE, "additionalProperties": False}, {"properties": {"z": COUNT}}]},
    "alternatives of objects": {"type": "object", "anyOf": [CAT, DOG]},
    "alternatives twice": {
        "allOf": [{"anyOf": [TEXT, COUNT]}, {"anyOf": [COUNT, {"type": "null"}]}]
    },
    "first items": {"type": "array", "prefixItems": [COUNT, TEXT], "items": False, "minItems": 1},
    "first items and more": {
        "type": "array",
        "prefixItems": [TEXT, COUNT],
        "items": {"type": "null"},
    },
    "items of both": {
        "allOf": [{"items": COUNT}, {"prefixItems": [{"minimum": 7}], "minItems": 2}]
    },
    "patterns": {
        "type": "object",
        "patternProperties": {"^n_": COUNT, "^t_": TEXT},
        "properties": {"n_a": {"type": "integer", "minimum": 5}},
        "required": ["n_a", "t_b"],
        "additionalProperties": False,
    },
    "a pattern and others": {
        "type": "object",
        "patternProperties": {"^n_": COUNT},
        "additionalProperties": {"type": "null"},
    },
    "some members": {"type": "object", "additionalProperties": COUNT, "minProperties": 1},
    "few members": {**BASE, "additionalProperties": COUNT, "minProperties": 2, "maxProperties": 2},
    "bounded values": {"enum": [1, 7, "a", [1], [1, 2], {"a": 1}], "minimum": 5, "minItems": 2},
    "values of both": {"allOf": [{"enum": ["a", "b", None, 3]}, {"enum": ["b", "c", 3]}]},
    "itself": {"$ref": "#/$defs/node"},
    "itself twice": {"$ref": "#/$defs/tree"},
    "an option without values": {"anyOf": [{"not": {}}, COUNT]},
    "an option that has no value": {"properties": {"x": COUNT, "y": {"enum": [1], "minimum": 2}}},
}


@pytest.mark.parametrize("case", COMBINED)
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_follow_schemas_that_combine_others(name: str, case: str) -> None:
    family = family_of(name)
    schema = {
        "type": "object",
        "properties": {"a": COMBINED[case]},
        "required": ["a"],
        "$defs": {"base": BASE, "node": NODE, "tree": TREE},
    }
    grammar = family.grammar(schema)
    replies = [family.reply(grammar, seed) for seed in range(2)]
    assert any(replies)
    for reply in filter(None, replies):
        arguments = family.call(reply, schema)
        validate(arguments, schema)


@pytest.mark.parametrize("name", WRITTEN)
def test_members_of_any_name_follow_their_schema(name: str) -> None:
    family = family_of(name)
    schema = {"type": "object", "unevaluatedProperties": COUNT, "required": ["a"]}
    reply = next(filter(None, (family.reply(family.grammar(schema), seed) for seed in range(9))))
    validate(family.call(reply, schema), schema)


def check_json(schema: Any) -> None:
    check(json.dumps({"grammars": [{"json_schema": compilable(schema)}]}))


def test_a_restricted_text_may_have_quotes_and_backslashes_in_pythons_notation() -> None:
    family, text = family_of("lfm2"), 'it\'s "x" \\ y\n'
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}}
    reply = f"<|tool_call_start|>[f(a={json.dumps(text)})]<|tool_call_end|>"
    tokens = family.tokenizer.encode(reply, parse_special=True)
    assert family.grammar(schema).matcher().acceptable(tokens) == len(tokens)
    assert family.call(reply, schema) == {"a": text}
