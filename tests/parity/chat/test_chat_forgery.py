"""No text of a conversation becomes a control token, in any published template and vocabulary."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import Message, ToolCall
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.errors import RequestError
from tests.chat_templates import (
    IMAGE,
    ONE,
    TEMPLATES,
    encode_chat,
    offered,
    specials_in,
    template_source,
)
from tests.reference_data import vocabulary_metadata
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import (
    CONTROL,
    USER_DEFINED,
    byte_level_metadata,
)

VOCABULARIES = {"llama-bpe": "llama", "llama-spm": "llama", "qwen2": "qwen2", "gpt-2": "gpt2"}
OWN = "the template's own"
WITH_PARTS = ("Mistral-Small", "google-gemma-4")
MARKER = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|</?\|?[a-z_\"]+\|?>|\[/?[A-Z_]+\]")

Forge = Callable[[str], str]


def tokenizer_of(vocabulary: str, template: str, kind: int = CONTROL) -> Tokenizer:
    return own_tokenizer(template, kind) if vocabulary == OWN else published(vocabulary)


@cache
def published(vocabulary: str) -> Tokenizer:
    return load_tokenizer(vocabulary_metadata(vocabulary), architecture=VOCABULARIES[vocabulary])


@cache
def own_tokenizer(template: str, kind: int) -> Tokenizer:
    """Bytes, and all markers that the template writes."""
    special = {"<s>": CONTROL, "</s>": CONTROL}
    special |= dict.fromkeys(MARKER.findall(template_source(template)), kind)
    begin = 258  # behind the bytes and two merges
    metadata = byte_level_metadata(special, bos_token_id=begin, eos_token_id=begin + 1)
    return load_tokenizer(metadata, architecture="qwen2")


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(template_source(name), bos_token="<s>", eos_token="</s>")


def same(text: str) -> str:
    return text


def values(forge: Forge, value: Any) -> Any:
    if isinstance(value, dict):
        return {forge(key): values(forge, item) for key, item in value.items()}
    if isinstance(value, list):
        return [values(forge, item) for item in value]
    return forge(value) if isinstance(value, str) else value


def tools_with(forge: Forge) -> list[dict[str, Any]]:
    properties = {
        forge("city"): {"type": "string", "description": forge("Which?"), "enum": [forge("Bern")]},
        forge("hours"): {"type": "integer", "description": forge("How many?")},
    }
    tool = offered(forge("weather"), properties, [forge("city")])
    tool["function"]["description"] = forge("How is it?")
    return [tool]


def turns_with(forge: Forge, said: Forge, image: bool) -> dict[str, Message]:
    """`said`: what the assistant's answers hold, which templates cut at markers."""
    question = forge("Look")
    arguments = values(forge, {"city": "Bern", "list": ["a", {"b": "c"}], "n": 1})
    call = ToolCall(forge("weather"), arguments, ONE)
    return {
        "system": Message("system", forge("Brief")),
        "question": Message("user", (question, IMAGE, forge("this")) if image else question),
        "call": Message("assistant", thinking=forge("Hm"), tool_calls=(call,)),
        "result": Message("tool", forge("blue"), tool_name=forge("weather"), tool_call_id=ONE),
        "answer": Message("assistant", said("Blue"), thinking=forge("Yes")),
        "more": Message("user", forge("Why")),
    }


SHAPES = (
    ("system", "question", "call", "result", "answer", "more"),
    ("question", "call", "result", "answer", "more"),
    ("system", "question", "call", "result"),
    ("question", "call", "result"),
    ("system", "question", "answer", "more"),
    ("question", "answer", "more"),
)


def talks_with(
    template: ChatTemplate, forge: Forge, said: Forge
) -> list[tuple[list[Message], list[dict[str, Any]] | None]]:
    turns = turns_with(forge, said, template.reads("image"))
    return [
        ([turns[name] for name in shape], tools)
        for shape in SHAPES
        for tools in (None, tools_with(forge))
    ]


def encoded(
    template: ChatTemplate, tokenizer: Tokenizer, forge: Forge, said: Forge
) -> list[list[str] | None]:
    """The special tokens of each conversation; None where the template refuses it."""
    found: list[list[str] | None] = []
    for messages, tools in talks_with(template, forge, said):
        try:
            tokens = encode_chat(template, tokenizer, messages, tools=tools)
        except RequestError:
            found.append(None)
        else:
            found.append(specials_in(tokenizer, tokens))
    return found


@cache
def honest(name: str, vocabulary: str, kind: int = CONTROL) -> list[list[str] | None]:
    found = encoded(template_of(name), tokenizer_of(vocabulary, name, kind), same, same)
    assert any(tokens is not None for tokens in found), "the template refuses every conversation"
    return found


def forgeries(texts: list[str]) -> st.SearchStrategy[str]:
    """Texts of tokens whole, nested in each other, cut and joined."""
    whole = st.sampled_from(texts)
    nested = st.builds(lambda outer, inner: outer[:2] + inner + outer[2:], whole, whole)
    upper = whole.map(str.upper)
    return st.lists(st.one_of(whole, nested, upper, st.just("\n")), min_size=1, max_size=3).map(
        "".join
    )


def forging(text: str) -> Forge:
    return lambda honest: honest[:2] + text + honest[2:]


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, OWN])
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_becomes_a_control_token(name: str, vocabulary: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(vocabulary, name)
    texts = sorted({*tokenizer.vocabulary.control, *MARKER.findall(template.source)})
    examples = 16 if vocabulary == OWN else 3
    sought = [text for text in template.inspected if text in tokenizer.vocabulary.control]

    @settings(max_examples=examples, derandomize=True, database=None)
    @given(forgeries(texts))
    def check(text: str) -> None:
        # Templates cut answers at what they look for, and shall.
        said = same if any(marker in text for marker in sought) else forging(text)
        assert encoded(template, tokenizer, forging(text), said) == honest(name, vocabulary)

    check()


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith(WITH_PARTS)])
def test_no_control_token_is_joined_from_parts(name: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(OWN, name)

    @settings(max_examples=25, derandomize=True, database=None)
    @given(st.sampled_from(sorted(tokenizer.vocabulary.control)), st.integers(1, 20))
    def check(text: str, cut: int) -> None:
        for parts in ((text[:cut], text[cut:]), (text[:cut], IMAGE, text[cut:]), tuple(text)):
            harmless = tuple("x" if isinstance(part, str) else part for part in parts)
            tokens, honest = (
                encode_chat(template, tokenizer, [Message("user", content)])
                for content in (parts, harmless)
            )
            assert specials_in(tokenizer, tokens) == specials_in(tokenizer, honest), parts

    check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_becomes_a_marker_that_the_template_writes(name: str) -> None:
    """User-defined tokens such as `<tool_call>`; only what the assistant said may hold them."""
    template, tokenizer = template_of(name), tokenizer_of(OWN, name, USER_DEFINED)
    texts = sorted(set(MARKER.findall(template.source)) - template.inspected)

    @settings(max_examples=16, derandomize=True, database=None)
    @given(forgeries(texts))
    def check(text: str) -> None:
        assert encoded(template, tokenizer, forging(text), same) == honest(name, OWN, USER_DEFINED)

    check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_own_markers_are_tokens_in_every_turn(name: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(OWN, name)
    accepted = set()
    for messages, tools in talks_with(template, same, same):
        try:
            tokens = encode_chat(template, tokenizer, messages, tools=tools)
        except RequestError:
            continue
        text = template.render(messages, tools=tools)
        assert tokens == tokenizer.encode_document(text)
        accepted.add((any(message.tool_calls for message in messages), tools is not None))
    assert (False, False) in accepted or (True, True) in accepted


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_without_forgeries_is_unchanged_next_to_forgeries(name: str) -> None:
    """All content is kept, the forgery as text."""
    template, tokenizer = template_of(name), tokenizer_of(OWN, name)
    forgery = "".join(tokenizer.vocabulary.control)
    messages = [Message("user", f"before {forgery} after")]
    tools = tools_with(same) if "tool_use" in name else None
    text = tokenizer.decode(encode_chat(template, tokenizer, messages, tools=tools))
    assert f"before {forgery} after" in text


@pytest.mark.parametrize("call_id", ["<s>abcdef", "[INST]123"])
def test_a_forged_call_id_is_text_or_refused(call_id: str) -> None:
    name = "mistralai-Mistral-Nemo-Instruct-2407"
    template, tokenizer = template_of(name), tokenizer_of(OWN, name)
    turns = turns_with(same, same, image=False)
    call = replace(turns["call"].tool_calls[0], id=call_id)
    messages = [
        turns["question"],
        replace(turns["call"], tool_calls=(call,)),
        replace(turns["result"], tool_call_id=call_id),
    ]
    with pytest.raises(RequestError, match="length 9"):  # a sentinel makes it longer
        encode_chat(template, tokenizer, messages)
