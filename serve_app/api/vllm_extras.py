"""Logit biases and fields that vLLM adds: restrictions of tokens, rules for the end of an answer,
the priority."""

from dataclasses import replace
from typing import Any

import numpy as np

from runtime.engine.request import MAX_LOGIT_BIASES
from runtime.errors import RequestError
from serve_app.api.fields import token_ids
from serve_app.api.keys import ApiKey
from serve_app.api.openai import CompletionFields
from serve_app.api.refusals import ForbiddenError
from serve_app.config.options import OPENAI_BOUNDS, Bounds, number
from serve_app.messages.tasks import ChatTask, EndRules

MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128  # as in vLLM
MAX_BAD_WORD_CHARACTERS = 256
MAX_ALLOWED_TOKENS = 2**18
# Larger than any vocabulary; limits the size of the bit mask that is sent to replicas.
LARGEST_TOKEN = 2**20 - 1
_BIAS = Bounds(float, -100, 100)


def with_extras(task: ChatTask, body: CompletionFields, key: ApiKey | None) -> ChatTask:
    """`task` with these fields of the request, which has the API key `key`. Raises RequestErrors
    that name the field."""
    least = 0
    if body.min_tokens is not None:
        least = int(number("min_tokens", body.min_tokens, OPENAI_BOUNDS["min_tokens"]))
    if task.max_tokens is not None and least > task.max_tokens:
        raise RequestError(
            f'field "min_tokens" is {least:,}; it must be at most "max_tokens", which is '
            f"{task.max_tokens:,}"
        )
    return replace(
        task,
        sampling=replace(
            task.sampling,
            logit_bias=_logit_bias(body.logit_bias),
            allowed=_allowed(body.allowed_token_ids),
        ),
        bad_words=_bad_words(body.bad_words),
        ending=EndRules(
            min_tokens=least,
            tokens=_stop_tokens(body.stop_token_ids),
            ignore_model=body.ignore_eos,
            keep_match=body.include_stop_str_in_output,
        ),
        priority=_priority(body.priority, key),
    )


def _priority(given: Any, key: ApiKey | None) -> int:
    if given is None:
        return 0
    priority = int(number("priority", given, OPENAI_BOUNDS["priority"]))
    if priority and (key is None or not key.priority):
        reason = (
            "without API keys, all requests have the same priority"
            if key is None
            else f"the entry of API key '{key.name}' lacks `priority: true`"
        )
        raise ForbiddenError(f'field "priority" must be 0: {reason}')
    return priority


def _logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Token ids and their biases: an object, whose keys are the ids as texts, or llama.cpp's list
    of pairs. A bias of false bars the token."""
    if given is None:
        return ()
    if not isinstance(given, dict | list):
        raise RequestError('field "logit_bias" must be an object or a list of pairs')
    if len(given) > MAX_LOGIT_BIASES:
        raise RequestError(
            f'field "logit_bias" has {len(given):,} tokens; at most {MAX_LOGIT_BIASES} are accepted'
        )
    pairs = _pairs(given) if isinstance(given, list) else {_token(k): v for k, v in given.items()}
    return tuple((token, _bias(token, value)) for token, value in pairs.items())


def _pairs(given: list[Any]) -> dict[int, Any]:
    biases: dict[int, Any] = {}
    for index, pair in enumerate(given):
        two = isinstance(pair, list) and len(pair) == 2
        ids = token_ids(pair[:1]) if two else None
        if ids is None:
            raise RequestError(f'field "logit_bias[{index}]" must be a token id and its bias')
        if ids[0] in biases:
            raise RequestError(f'field "logit_bias" has the token id {ids[0]} twice')
        biases[ids[0]] = pair[1]
    return biases


def _bias(token: int, value: Any) -> float:
    return _BIAS.low if value is False else number(f"logit_bias.{token}", value, _BIAS)


def _token(key: str) -> int:
    ids = token_ids([int(key)]) if key.isascii() and key.isdecimal() and len(key) < 11 else None
    if ids is None or str(ids[0]) != key:
        raise RequestError(f'field "logit_bias" has the key "{key[:80]}", which is no token id')
    return ids[0]


def _allowed(given: Any) -> bytes:
    """A mask of the allowed tokens: little-endian 32-bit words, with bit `token % 32` of word
    `token // 32` for each token."""
    if given is None:
        return b""
    ids = token_ids(given)
    if ids is None:
        raise RequestError(
            'field "allowed_token_ids" must be a list of token ids, of which it needs at least one'
        )
    if len(ids) > MAX_ALLOWED_TOKENS or max(ids) > LARGEST_TOKEN:
        raise RequestError(
            f'field "allowed_token_ids" has {len(ids):,} tokens up to {max(ids):,}; at most '
            f"{MAX_ALLOWED_TOKENS:,} up to {LARGEST_TOKEN:,} are accepted"
        )
    flags = np.zeros(-(-(max(ids) + 1) // 32) * 32, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def _bad_words(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise RequestError('field "bad_words" must be a list of strings')
    if not all(word.strip() for word in given):
        raise RequestError('field "bad_words" has a string without a word')
    if len(given) > MAX_BAD_WORDS or max(map(len, given), default=0) > MAX_BAD_WORD_CHARACTERS:
        raise RequestError(
            f'field "bad_words" may hold at most {MAX_BAD_WORDS} strings of '
            f"{MAX_BAD_WORD_CHARACTERS} characters each"
        )
    return tuple(given)


def _stop_tokens(given: Any) -> tuple[int, ...]:
    if given in (None, []):
        return ()
    ids = token_ids(given)
    if ids is None:
        raise RequestError('field "stop_token_ids" must be a list of token ids')
    if len(ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f'field "stop_token_ids" has {len(ids):,} tokens; at most {MAX_STOP_TOKENS} are '
            "accepted"
        )
    return ids
