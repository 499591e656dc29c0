"""Every published chat template with every kind of message against `transformers`."""

from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import RequestError
from tests.chat_templates import (
    SPECIAL,
    TALKS,
    TEMPLATES,
    TOOLS,
    Talk,
    documented,
    encode_chat,
    plain,
    rendered_by_transformers,
    template_source,
)
from tests.reference_data import reference_data, vocabulary_metadata

VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    {"date_string": "1 May 2026", "note": "<b>"},
]
QUESTION = {"role": "user", "content": "Zürich?"}


def test_every_published_template_is_tested() -> None:
    files = reference_data("templates").glob("*.jinja")
    assert sorted(path.stem for path in files) == sorted(TEMPLATES)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_text_is_that_of_transformers(name: str, add_generation_prompt: bool) -> None:
    source = template_source(name)
    template = ChatTemplate(source, **SPECIAL)
    for given in VARIABLES:
        variables = given | {"add_generation_prompt": add_generation_prompt}
        for about, talk in TALKS.items():
            chat = documented(name, talk.messages)
            expected = rendered_by_transformers(source, chat, talk.tools, **variables)
            if expected is None:
                with pytest.raises(RequestError):
                    template.render(talk.messages, tools=talk.tools, **variables)
            else:
                text = template.render(talk.messages, tools=talk.tools, **variables)
                assert text == expected, (about, variables)


class Known:
    """Whether a template renders tools, calls and images, found by rendering them."""

    def __init__(self, source: str) -> None:
        self._source = source
        alone = self._rendered()
        self.tools = self._rendered(tools=TOOLS) != alone
        tools = TOOLS if self.tools else None
        texts = [self._rendered(turn, tools=tools) or "" for turn in self._calls()]
        self.calls = any("lookup" in text for text in texts)
        seen = self._rendered({"role": "user", "content": [{"type": "image"}, self._text()]})
        said = self._rendered({"role": "user", "content": [self._text()]})
        # Some print the list as Python or JSON would.
        self.images = seen not in (None, said) and "type" not in seen.replace(alone or "", "")

    def missing(self, talk: Talk) -> list[str]:
        """Content that the template would drop, or print in Python's notation."""
        messages = talk.messages
        return [
            *(["tools"] if talk.tools and not self.tools else []),
            *(["tool calls"] if any(m.tool_calls for m in messages) and not self.calls else []),
            *(["images"] if any(m.images for m in messages) and not self.images else []),
        ]

    def _rendered(self, turn: dict[str, Any] | None = None, **more: Any) -> str | None:
        chat = [turn] if turn and turn["role"] == "user" else [QUESTION, *([turn] if turn else [])]
        return rendered_by_transformers(self._source, chat, **more)

    def _text(self) -> dict[str, Any]:
        return {"type": "text", "text": "Zürich?"}

    def _calls(self) -> list[dict[str, Any]]:
        """In each form that clients send."""
        forms: list[tuple[Any, Any]] = [("", {}), (None, {}), (None, "{}")]
        return [
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "call00001",
                        "function": {"name": "lookup", "arguments": arguments},
                    }
                ],
            }
            for content, arguments in forms
        ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_that_a_template_would_drop_is_refused_by_name(name: str) -> None:
    source = template_source(name)
    template, known = ChatTemplate(source, **SPECIAL), Known(source)
    tokenizer = load_tokenizer(vocabulary_metadata("gpt-2"), architecture="gpt2")
    for about, talk in TALKS.items():
        try:
            tokens = encode_chat(template, tokenizer, talk.messages, tools=talk.tools)
        except RequestError as error:
            _, named, missing = str(error).partition("template does not support ")
            told = missing.partition(";")[0].split(" and ") if named else []
            assert told == known.missing(talk), about
        else:
            assert tokens or not talk.messages, about
            assert known.missing(talk) == [], about


def test_features_of_published_templates_are_detected() -> None:
    """Shows that the test above compares templates with and without these features."""
    known = {name: Known(template_source(name)) for name in TEMPLATES}
    without_tools = {name for name, found in known.items() if not found.tools}
    assert without_tools == {
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "google-gemma-2-2b-it",
    }
    assert {name for name, found in known.items() if not found.calls} == {"google-gemma-2-2b-it"}
    assert {name for name, found in known.items() if found.images} == {
        "Mistral-Small-3.2-24B-Instruct-2506",
        "google-gemma-4-31B-it",
    }


QWEN_TALKS = ("system", "many turns", "tools with system", "parallel calls, and on", "a call")


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"])
def test_chat_tokens_are_those_of_the_family_library(name: str) -> None:
    metadata = vocabulary_metadata("qwen2")
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = Qwen2Tokenizer(
        vocab=ids, merges=merges, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    template = ChatTemplate(template_source(name))
    tokenizer = load_tokenizer(metadata, architecture="qwen2")
    for about in QWEN_TALKS:
        talk = TALKS[about]
        expected = library.apply_chat_template(
            [plain(message) for message in talk.messages],
            tools=talk.tools,
            chat_template=template.source,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert encode_chat(template, tokenizer, talk.messages, tools=talk.tools) == expected, about
