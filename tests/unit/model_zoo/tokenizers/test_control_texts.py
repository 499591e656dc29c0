"""Texts of control tokens become these tokens on request only, in every kind of tokenizer."""

from typing import Any

import pytest

from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz<>/0123456789"
BYTES = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
CONTROLS = {"<s>": CONTROL, "</s>": CONTROL, "<mask>": CONTROL}
SPECIAL = {**CONTROLS, "<unk>": UNKNOWN, "<x>": USER_DEFINED, "<none>": UNUSED}


def metadata_of(kind: str) -> dict[str, Any]:
    match kind:
        case "gpt2":
            return byte_level_metadata(SPECIAL, pre="llama-bpe")
        case "llama":
            return sentencepiece_metadata(SPECIAL)
        case "t5":  # special tokens have the highest score
            types = {**SPECIAL, "▁": NORMAL, **dict.fromkeys(LETTERS, NORMAL)}
        case "bert":
            types = {**SPECIAL, **dict.fromkeys(LETTERS, NORMAL)}
            types |= {f"▁{letter}": NORMAL for letter in LETTERS}
        case _:
            types = {**SPECIAL, **BYTES, "▁": NORMAL, **dict.fromkeys(LETTERS, NORMAL)}
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": list(types.values()),
        "tokenizer.ggml.scores": [0.0 if text in SPECIAL else -9.0 for text in types],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.unknown_token_id": list(types).index("<unk>"),
    }


@pytest.fixture(params=["gpt2", "llama", "t5", "bert", "gemma4"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    metadata = metadata_of(request.param)
    return load_tokenizer(metadata, architecture="gemma" if request.param == "gemma4" else "bert")


@pytest.mark.parametrize("text", [*CONTROLS, "<unk>", "<none>"])
def test_text_of_users_contains_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    token = tokenizer.id_of(text)
    for whole in (text, f"a{text}b", f"a {text} b", f"{text}{text}", f" {token}"):
        assert token not in tokenizer.encode(whole), whole
    if text != "<none>":
        assert token in tokenizer.encode(f"a {text} b", parse_special=True)


def test_text_of_users_contains_user_defined_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.id_of("<x>") in tokenizer.encode("a<x>b")
