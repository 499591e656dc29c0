"""Tiny vocabularies with image tokens of a family, and templates that show images."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.tokenizers.pretokenizers import choose_pre_tokenizer
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.pictures import photo
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, byte_level_metadata

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Line breaks join, so that it shows what is encoded together.
MERGES = ("Ċ Ċ", "ĊĊ Ċ", "ĊĊ ĊĊ", "h e", "l l")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def png(height: int, width: int, seed: int = 0) -> bytes:
    file = BytesIO()
    Image.fromarray(photo(height, width, seed=seed)).save(file, "PNG")
    return file.getvalue()


def vocabulary(special: Sequence[str], kind: int = CONTROL) -> dict[str, Any]:
    """Metadata with `special` as tokens of that type behind those of ChatML."""
    types = dict.fromkeys(CHATML, CONTROL) | dict.fromkeys(special, kind)
    metadata = byte_level_metadata({})
    ordinary = metadata["tokenizer.ggml.tokens"]
    tokens = [*ordinary, *(m.replace(" ", "") for m in MERGES[:3]), *types]
    kinds = [1] * (len(tokens) - len(types)) + list(types.values())
    own = {"tokens": tokens, "token_type": kinds, "merges": list(MERGES)}
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def library_tokenizer(special: Sequence[str], **named: str) -> PreTrainedTokenizerFast:
    """The same vocabulary in its library; `named`: roles of tokens, such as `image_token`."""
    metadata = vocabulary(special)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    native = Tokenizer(BPE({text: i for i, text in enumerate(tokens)}, merges))
    expressions = choose_pre_tokenizer(metadata, "qwen2").expressions
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in expressions]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    native.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    native.add_special_tokens([AddedToken(text, special=True) for text in (*CHATML, *special)])
    return PreTrainedTokenizerFast(
        tokenizer_object=native,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )


def own_tokenizer(special: Sequence[str], kind: int = CONTROL) -> Any:
    return load_tokenizer(vocabulary(special, kind), architecture="qwen2")


def as_transformers(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation with pictures as its users write it."""
    return [{"role": m.role, "content": [_part(part) for part in _parts(m)]} for m in messages]


def pictures(messages: Sequence[Message]) -> list[Image.Image]:
    return [Image.open(BytesIO(part.data)) for m in messages for part in m.images]


def _parts(message: Message) -> Sequence[str | ImagePart]:
    return (message.content,) if isinstance(message.content, str) else message.content


def _part(part: str | ImagePart) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
