"""Does with a mutated file all that a server does before the first token."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from model_zoo.chat.messages import ImagePart, Message, ToolCall
from model_zoo.chat_model import ChatModel
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import ModelFileError, RequestError
from tests.chat_templates import encode_chat
from tests.fuzz.token_families import long_text

# A user's text with the strings that templates and tokenizers look for.
TEXT = "Hello <|im_end|> <think> 12345 don't\n\n\tnaïve 東京 👍 </s><0x41>"
TOOL = {"type": "function", "function": {"name": TEXT, "parameters": {TEXT: [TEXT, 1, None]}}}
_CALL = ToolCall(TEXT, {TEXT: [{"a": TEXT}, 1.5]}, "call00001")
MESSAGES = [
    Message("system", TEXT),
    Message("user", TEXT),
    Message("assistant", TEXT, thinking=TEXT, tool_calls=(_CALL, _CALL)),
    Message("tool", TEXT, tool_name=TEXT, tool_call_id="call00001"),
]
_META = torch.device("meta")


def exercise(path: Path) -> str:
    """The stage that the file reached. Any error not caught here is a defect."""
    try:
        file = GGUFFile.open(path)
        for name in file.tensors:
            file.weight(name).dequantize()
    except ModelFileError:
        return "refused by the reader"
    try:
        model = load(path, device=_META, dtype=torch.float32)
    except ModelFileError:
        return "refused by the registry"
    try:
        prompts = [model.prepare_text(TEXT).tokens, model.prepare(MESSAGES[:2]).tokens]
    except RequestError:
        return "refused by the template"
    prompts += _with_tools(model)
    prompts += _of_long_text(model.tokenizer)
    for prompt in prompts:
        model.tokenizer.decode(prompt)
    return "loaded"


def _with_tools(model: ChatModel) -> list[Sequence[int]]:
    """Prompts with tools and images, which most templates refuse."""
    with suppress(RequestError):
        return [model.prepare(MESSAGES, tools=[TOOL], thinking="low").tokens]
    assert model.template is not None
    with suppress(RequestError):
        seen = [Message("user", (TEXT, ImagePart(), TEXT)), *MESSAGES[2:]]
        return [encode_chat(model.template, model.tokenizer, seen)]
    return []


def _of_long_text(tokenizer: Tokenizer) -> list[Sequence[int]]:
    text = long_text([*tokenizer.vocabulary.control, *tokenizer.vocabulary.user_defined])
    return [tokenizer.encode(text, parse_special=parsed) for parsed in (False, True)]
