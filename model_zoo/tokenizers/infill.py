"""The tokens by which a model inserts text between two others (fill in the middle)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_zoo.tokenizers.vocabulary import token_id

# The names of keys since 2024, and the older names that they have replaced.
INFILL_KEYS = ("fim_mid_token_id", "middle_token_id")
_BEFORE_KEYS = ("fim_pre_token_id", "prefix_token_id")
_AFTER_KEYS = ("fim_suf_token_id", "suffix_token_id")
_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens that precede the prefix, the suffix and the answer in a prompt.

    `ends`: further tokens that end the answer.
    """

    before: int
    after: int
    middle: int
    ends: frozenset[int] = frozenset()


def infill_tokens(metadata: Mapping[str, Any], count: int) -> InfillTokens | None:
    """The tokens that the file states; None unless it states all three. `count`: the size of the
    vocabulary. ModelFileError for values that are not token ids."""

    def first(names: tuple[str, ...]) -> int | None:
        stated = (token_id(metadata, name, count) for name in names)
        return next((token for token in stated if token is not None), None)

    before, after, middle = map(first, (_BEFORE_KEYS, _AFTER_KEYS, INFILL_KEYS))
    if before is None or after is None or middle is None:
        return None
    ends = (first((name,)) for name in _ENDS)
    return InfillTokens(before, after, middle, frozenset(t for t in ends if t is not None))
