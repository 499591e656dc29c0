"""Random schemas under the grammars of families that write arguments one by one."""

import json
import os
import zlib
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.chat.formats.allowed_calls import AllowedCalls, UnwritableArguments
from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.formats.reply_grammar import reply_grammar
from model_zoo.grammars.json_schema import compilable
from model_zoo.grammars.token_grammar import GrammarError, TokenGrammar, TokenGrammars, check
from tests.byte_tokenizer import TOKEN, ByteTokenizer
from tests.reply_parsing import parsed, replied
from tests.reply_transcripts import REPLIES
from tests.unit.model_zoo.grammars.random_schemas import NESTED, REPEATED

SCHEMAS = int(os.environ.get("CARAVAN_RANDOM_SCHEMAS", "25"))
WRITTEN = (
    "glm-4.6", "kimi-k3", "lfm2", "llama3.2-pythonic", "minimax-m2", "minimax-m3", "seed",
    "hunyuan-3", "deepseek-v4", "minicpm5", "muse", "qwen3-coder",
)  # fmt: skip
TEMPLATES = {name: REPLIES[name][0] for name in WRITTEN} | {"gemma4": "tools <|tool_call>"}
# Ends of values, so that random texts end.
ENDS = ("'", '"', "}", "]", ")", "null", ", ")


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
                calls=AllowedCalls({"f": schema}, required=True, parallel=False),
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


FAMILIES = {name: Family(template) for name, template in TEMPLATES.items()}


@st.composite
def parameters(draw) -> dict[str, Any]:
    """Schemas of arguments, as requests declare them."""
    names = st.sampled_from(["a", "b2", "C", "item", "long_name"])
    properties = draw(st.dictionaries(names, NESTED, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    schema = {"type": "object", "properties": properties, "required": required}
    more = st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": {}}])
    return schema | draw(more)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_follows_its_schema(name: str) -> None:
    family, counts = FAMILIES[name], Counter[str]()

    @settings(REPEATED, max_examples=SCHEMAS)
    @given(parameters())
    def follow(schema) -> None:
        try:
            check_json(schema)
            grammar = family.grammar(schema)
        except (GrammarError, UnwritableArguments) as error:
            counts[str(error)[-60:]] += 1
            return
        reply = family.reply(grammar, zlib.crc32(json.dumps(schema).encode()))
        if reply is None:
            counts["unfinished"] += 1
            return
        counts["followed"] += 1
        arguments = family.call(reply, schema)
        jsonschema.validate(arguments, schema, jsonschema.Draft202012Validator)

    follow()
    print(name, dict(counts))
    assert counts["followed"] > SCHEMAS / 8


def check_json(schema: Any) -> None:
    check(json.dumps({"grammars": [{"json_schema": compilable(schema)}]}))
