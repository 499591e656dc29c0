"""Prompts of rerankers: a query and a text as one sequence of tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from model_zoo.tokenizers.tokenizer import Tokenizer
from model_zoo.tokenizers.vocabulary import optional_text
from runtime.errors import ModelFileError

PAIR_TEMPLATE = "rerank"  # its name among those of the file
TEMPLATE_KEY = f"tokenizer.chat_template.{PAIR_TEMPLATE}"
_QUERY, _TEXT = "{query}", "{document}"


class DocumentEncoder(Protocol):
    """Encodes a text, with what surrounds it. `at_most`: number of tokens, to which the text is
    cut."""

    def __call__(self, text: str, *, at_most: int | None = None) -> list[int]: ...


class PairFormat(Protocol):
    """Joins queries and texts. Special tokens are not recognised in them, so that a text cannot
    contain its own end."""

    def encoder(self, query: str) -> DocumentEncoder:
        """Encodes texts to rank by the query, which is never cut."""
        ...


@dataclass(frozen=True, slots=True)
class SeparatedPairs:
    """The text follows the query and its end token, as in BERT and RoBERTa."""

    tokenizer: Tokenizer

    def encoder(self, query: str) -> DocumentEncoder:
        tokenizer = self.tokenizer
        first = tokenizer.encode_document(query, parse_special=False)
        framing = tokenizer.encode_document("", parse_special=False)
        around = len(tokenizer.pair(first, framing)) - len(framing)

        def encoded(text: str, *, at_most: int | None = None) -> list[int]:
            room = None if at_most is None else max(at_most - around, 0)
            second = tokenizer.encode_document(text, at_most=room, parse_special=False)
            return tokenizer.pair(first, second)

        return encoded


@dataclass(frozen=True, slots=True)
class TemplatePairs:
    """Query and text are parts of a prompt, as in Qwen 3's rerankers.

    before: the prompt up to the query. between: from there to the text. after: the rest.
    """

    tokenizer: Tokenizer
    before: str
    between: str
    after: str

    @classmethod
    def read(cls, tokenizer: Tokenizer, template: str) -> "TemplatePairs":
        """ModelFileError unless the template has one place for the query and one for the text after
        it."""
        before, _, rest = template.partition(_QUERY)
        between, found, after = rest.partition(_TEXT)
        if not found or any(
            place in part for place in (_QUERY, _TEXT) for part in (before, between, after)
        ):
            raise ModelFileError(
                f"`{TEMPLATE_KEY}` must have {_QUERY} and after it {_TEXT}, once each."
            )
        return cls(tokenizer, before, between, after)

    def encoder(self, query: str) -> DocumentEncoder:
        tokenizer = self.tokenizer
        before, between, after = (
            tokenizer.cut(part, parse_special=True)
            for part in (self.before, self.between, self.after)
        )
        begin = [*before, *tokenizer.cut(query, parse_special=False), *between]

        def encoded(text: str, *, at_most: int | None = None) -> list[int]:
            filled = [*begin, *tokenizer.cut(text, parse_special=False)]
            tokens = tokenizer.encode_parts(_joined([*filled, *after]))
            if at_most is None or len(tokens) <= at_most:
                return tokens
            end = tokenizer.encode_parts(_joined(after))
            return [*tokenizer.encode_parts(_joined(filled))[: max(at_most - len(end), 0)], *end]

        return encoded


def pair_format(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> PairFormat:
    """By the file's template for pairs, if it has one."""
    template = optional_text(metadata, TEMPLATE_KEY)
    return TemplatePairs.read(tokenizer, template) if template else SeparatedPairs(tokenizer)


def _joined(parts: Iterable[str | int]) -> list[str | int]:
    """Neighbouring texts as one, because tokens extend over their borders."""
    joined: list[str | int] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return joined
