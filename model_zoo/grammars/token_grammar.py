"""Grammars over the tokens of a vocabulary, compiled and matched by llguidance."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import GenerationFailedError, RequestError

# Budget of processor time for an answer's masks: its maximum, and the part added per token. The
# engine waits for masks, which usually take 0.1 ms each, and 1 ms within thinking.
BURST_S, TOKEN_S = 0.2, 0.005
# Lower than the library's limit: 30,000 states of a lexer take up to 60 MB.
_LIMITS = LLParserLimits(
    max_lexer_states=30_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

# Messages of the library that name parts of its own, and what they mean for the author of a form.
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_MEANINGS = {
    "NoExtensionBias": "no token continues it",
}
# Sets of tokens ("slices") that the library adds to a mask as a whole where all of them may follow.
# More sets than its default make masks of strings with `maxLength` cheaper.
_SPACE, _IN_STRINGS = r"[\x20\x0A\x0D\x09]+", r'[^"\\\x00-\x1F\x7F]'
_TOKEN_SETS = [
    _SPACE,
    *(f"{_IN_STRINGS}{{1,{length}}}" for length in (10, 14, 20, 30)),
    f"{_IN_STRINGS}+",
]


class GrammarError(RequestError):
    """The library does not accept a grammar."""


def check(grammar: str) -> None:
    """Raises GrammarError if the grammar is invalid."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if failed:
        raise GrammarError(_brief(messages[0]))


def check_pattern(regex: str) -> None:
    """Raises GrammarError for a text that is no regular expression by itself. Some, such as
    `a)|(b`, would be one within a group."""
    check(json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": regex}}]}))


def terminal_matches(expression: str) -> bool:
    """Whether a terminal of a Lark grammar matches some text. Raises GrammarError."""
    matcher = _of_bytes(f"start: T\nT: {expression}")
    if matcher.is_error():
        raise GrammarError(_brief(matcher.get_error()))
    matcher.compute_bitmask()
    return not matcher.is_error()


def followed(schema: Any, texts: Iterable[str]) -> list[bool]:
    """Which JSON texts follow a schema. Raises GrammarError."""
    matcher = _of_bytes(json.dumps({"grammars": [{"json_schema": schema}]}))
    if matcher.is_error():
        raise GrammarError(_brief(matcher.get_error()))
    return [_follows(matcher.deep_copy(), text) for text in texts]


def _follows(matcher: LLMatcher, text: str) -> bool:
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


def _of_bytes(grammar: str) -> LLMatcher:
    """A matcher over single bytes, without a vocabulary."""
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=_LIMITS)


class TokenGrammars:
    """Compiles grammars for one tokenizer. The first one prepares the vocabulary, which takes about
    a second per 100,000 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = tokenizer

    def compile(self, grammar: str) -> "TokenGrammar":
        """`grammar`: a Lark grammar or llguidance's JSON list of grammars.

        Raises GrammarError if it is invalid or too costly.
        """
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_brief(matcher.get_error()))
        compiled = TokenGrammar(matcher, self.vocabulary.vocab_size)
        try:  # the first mask may be much slower than all others
            compiled.matcher().allowed(memoryview(bytearray(4 * compiled.words)))
        except GenerationFailedError as error:
            raise GrammarError(str(error)) from None
        return compiled

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        if not self._source.end_tokens:
            raise RequestError(
                "The model has no end token, so the form of its replies cannot be constrained."
            )
        wrapper = TokenizerWrapper(_Vocabulary(self._source))
        return LLTokenizer(wrapper, eos_token=sorted(self._source.end_tokens), slices=_TOKEN_SETS)


class TokenGrammar:
    """A compiled grammar; see `runtime.engine.request.Grammar`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self.words = -(-vocab_size // 32)

    def matcher(self) -> "TokenMatcher":
        return TokenMatcher(self._matcher.deep_copy(), self.words)


class TokenMatcher:
    """The state of a grammar in one answer; see `runtime.engine.request.Matcher`."""

    free = 0

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self._words = matcher, words
        self._accepted: list[int] = []  # accepted tokens that the library has not consumed yet
        self._budget_s = BURST_S

    def accept(self, token: int) -> None:
        self._accepted.append(token)

    def allowed(self, mask: memoryview) -> None:
        began = time.thread_time()
        accepted, self._accepted = self._accepted, []
        if not self._matcher.consume_tokens(accepted):
            self._fail()
        self._compute(self._matcher, mask)
        if self._matcher.is_error():
            self._fail()
        earned_s = TOKEN_S * len(accepted)
        saved_s = min(self._budget_s + earned_s, max(BURST_S, earned_s))
        self._budget_s = saved_s - (time.thread_time() - began)
        if self._budget_s < 0:
            raise GenerationFailedError(
                "The required form of the reply costs too much time to enforce. Simplify it."
            )

    def acceptable(self, tokens: Sequence[int]) -> int:
        return self._copy().validate_tokens(list(tokens))

    def look_ahead(self, tokens: Sequence[int], masks: Sequence[memoryview]) -> None:
        """As `Matcher.look_ahead`. Does not count towards the answer's budget, because the answer
        may never have these tokens."""
        ahead = self._copy()
        for token, mask in zip(tokens, masks, strict=True):
            if not ahead.try_consume_tokens([token]):
                break
            self._compute(ahead, mask)

    def _copy(self) -> LLMatcher:
        copy = self._matcher.deep_copy()
        copy.consume_tokens(self._accepted)
        return copy

    def _compute(self, matcher: LLMatcher, mask: memoryview) -> None:
        words = np.frombuffer(mask, np.int32)[: self._words]
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def _fail(self) -> None:
        reason = _brief(self._matcher.get_error())
        raise GenerationFailedError(f"The required form of the reply cannot be enforced: {reason}")


class _Vocabulary:
    """A vocabulary in llguidance's interface. End tokens and tokens without text are special
    tokens, which only their ids match."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_tokens)
        self.bos_token_id = tokenizer.bos_id
        texts = [
            b"" if token in tokenizer.end_tokens else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = [token for token, text in enumerate(texts) if not text]
        self.tokens = [text or b"<[%d]>" % token for token, text in enumerate(texts)]

    def __call__(self, text: str | bytes) -> Sequence[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, exact=True)


def _brief(error: str) -> str:
    """The library's message as one line, without the grammar's listing and the library's
    location."""
    error = error.replace("<non-verbose/>", "").partition("while processing json-schema:")[0]
    error = _UNIMPLEMENTED.sub(r"\1 cannot be enforced here", error)
    for message, meaning in _MEANINGS.items():
        error = error.replace(message, meaning)
    return " ".join(filter(None, map(str.strip, error.splitlines())))[:400]
