"""Special tokens that strip adjacent white space, as in each family's own tokenizer."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import BPE
from transformers import RobertaTokenizer

from model_zoo.tokenizers.byte_level import splitter
from model_zoo.tokenizers.pretokenizers import choose_pre_tokenizer
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, byte_level_metadata

LEFT, RIGHT, BOTH = {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}
# What each family's tokenizer.json has for these tokens.
PHI4 = dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), BOTH)
PHI4_MINI: Mapping[str, Mapping[str, bool]] = {
    "<|endoftext|>": {},
    **dict.fromkeys(("<|assistant|>", "<|end|>", "<|user|>", "<|system|>"), RIGHT),
    "<|tool|>": {},
}
QWEN: Mapping[str, Mapping[str, bool]] = {"<|im_start|>": {}, "<|im_end|>": {}, "<think>": {}}
ROBERTA: Mapping[str, Mapping[str, bool]] = {"<s>": {}, "</s>": {}, "<mask>": LEFT}
MODERN_BERT: Mapping[str, Mapping[str, bool]] = {"[CLS]": {}, "[MASK]": LEFT}
FAMILIES: Mapping[str, tuple[Mapping[str, Mapping[str, bool]], str, str]] = {
    "Phi 4": (PHI4 | {"<|dummy_0|>": BOTH}, "phi3", "dbrx"),
    "Phi 4 made a llama": (PHI4 | {"<|dummy_0|>": BOTH}, "llama", "dbrx"),
    "Phi 4 mini": (PHI4_MINI, "phi3", "gpt-4o"),
    "the tokens of Phi 4 mini elsewhere": ({t: {} for t in PHI4_MINI}, "llama", "gpt-4o"),
    "Qwen": (QWEN, "qwen3", "qwen2"),
    "RoBERTa": (ROBERTA, "bert", "roberta-bpe"),
    "ModernBERT": (MODERN_BERT, "modern-bert", "modern-bert"),
}
SPACES = (" ", "  ", "\n", "\t\r\n", "\u00a0", "\u3000", "\x85", "\x1c", "\x1f", "\u200b", "")


@cache
def both(family: str) -> tuple[Tokenizer, NativeTokenizer]:
    """Ours, and the library's with the flags that the family's tokenizer.json has."""
    flags, architecture, pre = FAMILIES[family]
    metadata = byte_level_metadata(dict.fromkeys(flags, CONTROL), pre=pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    native = NativeTokenizer(BPE({text: id for id, text in enumerate(tokens)}, merges))
    native.pre_tokenizer = splitter(choose_pre_tokenizer(metadata, architecture))
    native.add_special_tokens(
        [AddedToken(text, normalized=False, special=True, **own) for text, own in flags.items()]
    )
    return load_tokenizer(metadata, architecture=architecture), native


@pytest.mark.parametrize("family", FAMILIES)
def test_white_space_beside_special_tokens_is_stripped_as_in_the_library(family: str) -> None:
    subject, native = both(family)
    parts = (*FAMILIES[family][0], *SPACES, "hello", "x")

    @settings(max_examples=300)
    @given(st.lists(st.sampled_from(parts), max_size=12).map("".join))
    def check(text: str) -> None:
        expected = native.encode(text, add_special_tokens=False).ids
        assert subject.encode(text, parse_special=True) == expected

    check()


def test_what_users_type_keeps_its_white_space() -> None:
    """Control tokens are none in ordinary text."""
    for family in FAMILIES:
        subject, _ = both(family)
        text = " \n".join(["hello", *FAMILIES[family][0], "x"])
        assert subject.decode(subject.encode(text)) == text


def test_roberta_documents_have_bos_and_eos_by_default() -> None:
    keys: dict[str, Any] = {"pre": "roberta-bpe", "bos_token_id": 258, "eos_token_id": 259}
    metadata = byte_level_metadata(dict.fromkeys(ROBERTA, CONTROL), **keys)
    subject = load_tokenizer(metadata, architecture="bert")
    vocabulary = {text: id for id, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    reference = RobertaTokenizer(
        vocab=vocabulary | {"<pad>": len(vocabulary), "<unk>": len(vocabulary) + 1},
        merges=[("h", "e"), ("l", "l")],
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
    )
    assert subject.encode_document("hello <mask> x") == reference.encode("hello <mask> x")
