"""The tokens by which a model inserts text between two others (fill in the middle)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from model_zoo.tokenizers.vocabulary import BETWEEN_FILES, Vocabulary, token_id

# The names of keys since 2024, and the older names that they have replaced.
INFILL_KEYS = ("fim_mid_token_id", "middle_token_id")
_BEFORE_KEYS = ("fim_pre_token_id", "prefix_token_id")
_AFTER_KEYS = ("fim_suf_token_id", "suffix_token_id")
# Texts of these tokens, by which llama.cpp finds them in files without keys (llama-vocab.cpp).
_TEXTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fim_pre_token_id": (
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ),
        "fim_suf_token_id": (
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ),
        "fim_mid_token_id": (
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ),
        **BETWEEN_FILES,
    }
)


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens before the prefix, the suffix and the answer in a prompt."""

    before: int
    after: int
    middle: int


def infill_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """The keys of the infill tokens that a vocabulary, `ids` by text, has by their usual texts.

    Empty unless it has prefix, suffix and middle.
    """
    found = {
        key: next(ids[text] for text in texts if text in ids)
        for key, texts in _TEXTS.items()
        if any(text in ids for text in texts)
    }
    required = (_BEFORE_KEYS[0], _AFTER_KEYS[0], INFILL_KEYS[0])
    return found if all(key in found for key in required) else {}


def infill_tokens(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> InfillTokens | None:
    """The tokens that the file states, or else those with the usual texts; None unless all three
    are known. ModelFileError for values that are not integers."""
    by_text, count = infill_ids(vocabulary.ids), len(vocabulary.tokens)

    def first(names: tuple[str, ...]) -> int | None:
        stated = (token_id(metadata, name, count) for name in names)
        return next((token for token in stated if token is not None), by_text.get(names[0]))

    before, after, middle = map(first, (_BEFORE_KEYS, _AFTER_KEYS, INFILL_KEYS))
    if before is None or after is None or middle is None:
        return None
    return InfillTokens(before, after, middle)
