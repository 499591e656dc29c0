"""A model file's vocabulary: validated tokens, their types and their roles."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite, isnan
from numbers import Real
from types import MappingProxyType
from typing import Any

from model_zoo.families import family_or_defaults
from runtime.errors import ModelFileError

_log = logging.getLogger(__name__)
_IGNORED = "Ignored `tokenizer.ggml.%s` %s: the vocabulary has %d tokens."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts of tokens that end an answer, in addition to the ids that a file states.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|endofassistant|>",
        "<|eom_id|>",
        "<|eom|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|plamo:eos|>",
        "<|plamo:op|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    }
)
# Tokens of padding, repositories and files: text for infilling continues after them. As in
# llama.cpp, they end answers.
BETWEEN_FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        "fim_rep_token_id": (
            "<|fim_repo|>",
            "<|repo_name|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
        ),
        "fim_sep_token_id": ("<|file_sep|>",),
    }
)
# Of replies and of calls in gpt-oss and Solar Open, where `<|end|>` ends a part of a reply only.
_WITH_PARTS = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
# Of a reply in Muse Glimmer, where `<|eom|>` ends a message only, unlike in Llama 4.
_WITH_MESSAGES = ("<|message|>", "<|eot|>")
# Of GLM, Nemotron and FunctionGemma, whose turns end where the next one or a result begins, and of
# Laguna: a token of their vocabularies, and the texts. llama.cpp does not know them, and its
# converter states some.
# Nemotron Nano 2 has `<SPECIAL_12>` behind answers besides.
_NEXT_TURNS = (
    ("[gMASK]", ("<|user|>", "<|observation|>")),
    ("<extra_id_0>", ("<extra_id_1>",)),
    ("<SPECIAL_10>", ("<SPECIAL_11>", "<SPECIAL_12>")),
    ("<start_function_call>", ("<start_function_response>",)),
    ("<assistant>", ("</assistant>",)),
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", *BETWEEN_FILES)
_TYPES_KEY = "tokenizer.ggml.token_type"
_SCORES_KEY = "tokenizer.ggml.scores"
# Kinds that require types, to identify byte tokens. Old files of other kinds may lack them; tokens
# are then ordinary text unless a role or their text identifies them.
_TYPED = ("llama", "t5", "gemma4", "plamo2", "rwkv")


@dataclass(frozen=True, slots=True)
class _Role:
    """A role of a token: its keys, of which the first that is stated counts, and the token's texts
    in files without the keys."""

    keys: tuple[str, ...]
    texts: tuple[str, ...] = ()


_BOS, _EOS, _UNKNOWN = "bos_token_id", "eos_token_id", "unknown_token_id"
_BY_KEYS = {name: _Role((name,)) for name in (_BOS, _EOS, _UNKNOWN)}
# Gemma's `<s>` is an HTML tag, so its own texts come first.
_SENTENCEPIECE = {
    _BOS: _Role((_BOS,), ("<bos>", "<s>")),
    _EOS: _Role((_EOS,), ("<eos>", "</s>")),
    _UNKNOWN: _Role((_UNKNOWN,), ("<unk>",)),
}
# By `tokenizer.ggml.model`; llama.cpp uses the ids of these tokens as defaults (llama-vocab.cpp).
_ROLES: Mapping[str, Mapping[str, _Role]] = {
    "llama": _SENTENCEPIECE,
    "t5": {
        _BOS: _Role((_BOS,), ("<s>",)),
        _EOS: _Role((_EOS,), ("</s>",)),
        _UNKNOWN: _Role((_UNKNOWN,), ("<unk>",)),
    },
    "gemma4": _SENTENCEPIECE,
    "plamo2": {
        _BOS: _Role((_BOS,), ("<|plamo:bos|>",)),
        _EOS: _Role((_EOS,), ("<|plamo:eos|>",)),
        _UNKNOWN: _Role((_UNKNOWN,), ("<|plamo:unk|>",)),
    },
    "bert": {
        _BOS: _Role((_BOS, "cls_token_id"), ("[CLS]",)),
        # A text ends with the separator, whatever EOS the file states besides.
        _EOS: _Role(("seperator_token_id", _EOS), ("[SEP]",)),
        _UNKNOWN: _Role((_UNKNOWN,), ("[UNK]",)),
    },
}
_CONTROL_TEXT = re.compile(
    r"<\|\w.*\|>|<｜.+｜>|<(?:start|end)_of_(?:turn|image)>|<reserved_\d+>|<bos>|<eos>|<pad>"
    r"|<fim[-_]\w+>|<reponame>"
)
# Texts of tokens for untrained padding rows of the embedding.
_PADDING_TEXT = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id; `ids` is the inverse.

    `control`: texts of control tokens, which ordinary text must not be encoded to;
    `user_defined`: ordinary texts that are always one token.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_tokens: frozenset[int]
    control: Mapping[str, int]
    user_defined: Mapping[str, int]

    def id_of(self, text: str) -> int | None:
        return self.ids.get(text)

    def ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """The ids of the texts that are tokens; other texts are skipped."""
        return frozenset(self.ids[text] for text in texts if text in self.ids)

    def has(self, texts: Collection[str]) -> bool:
        """Whether all of the texts are tokens."""
        return all(text in self.ids for text in texts)


def read_vocabulary(metadata: Mapping[str, Any], *, architecture: str = "") -> Vocabulary:
    """The vocabulary of `metadata`; ModelFileError if keys are missing or contradictory."""
    tokens = required_array(metadata, "tokenizer.ggml.tokens")
    if not set(map(type, tokens)) <= {str}:
        raise ModelFileError("`tokenizer.ggml.tokens` has an entry that is not text.")
    types = _types(metadata, len(tokens))
    scored = family_or_defaults(architecture).scored_tokens
    if scored and metadata.get("tokenizer.ggml.model") == "llama":
        types = _with_user_defined(types, token_scores(metadata, len(tokens)))
    ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))  # first id wins
    roles = _ROLES.get(optional_text(metadata, "tokenizer.ggml.model") or "", _BY_KEYS)
    keys = dict.fromkeys((*(key for role in roles.values() for key in role.keys), *_END_KEYS))
    stated = _stated_ids(metadata, keys, len(tokens))
    bos_id, eos_id, unknown_id = (
        _token_of(roles[name], stated, ids) for name in (_BOS, _EOS, _UNKNOWN)
    )
    ends = {eos_id, *(stated[key] for key in _END_KEYS), *_end_list(metadata, len(tokens))}
    end_tokens = _end_tokens(ends, tokens, types, ids)
    named = end_tokens | {token for token in (bos_id,) if token is not None}
    if metadata.get("tokenizer.ggml.model") == "rwkv":  # an end of answers is a paragraph break
        named = frozenset(token for token in named if types[token] != TokenType.NORMAL)
    control, user_defined = _special_texts(tokens, types, named)
    return Vocabulary(
        tokens, types, ids, bos_id, eos_id, unknown_id, end_tokens, control, user_defined
    )


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    if _TYPES_KEY not in metadata and metadata.get("tokenizer.ggml.model") not in _TYPED:
        return [TokenType.NORMAL] * count
    return required_array(metadata, _TYPES_KEY, length=count)


def _with_user_defined(types: list[int], scores: Sequence[float]) -> list[int]:
    """`types`, but ordinary tokens before the byte tokens are user-defined if their score is 0.

    Ollama's converters, and llama.cpp's before July 2024, gave them the type of ordinary ones.
    """
    if TokenType.BYTE not in types:
        return types
    first_byte = types.index(TokenType.BYTE)
    return [
        TokenType.USER_DEFINED
        if token < first_byte and not scores[token] and kind == TokenType.NORMAL
        else kind
        for token, kind in enumerate(types)
    ]


def required_array(
    metadata: Mapping[str, Any], key: str, *, length: int | None = None
) -> list[Any]:
    """The array under `key` as a list; `length` None accepts any length except 0."""
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"The model file has no `{key}`; its tokenizer cannot be built.")
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise ModelFileError(f"`{key}` is not an array.")
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if length is None and not items:
        raise ModelFileError(f"`{key}` is empty.")
    if length is not None and len(items) != length:
        raise ModelFileError(f"`{key}` has {len(items)} entries for {length} tokens.")
    return items


def token_scores(metadata: Mapping[str, Any], count: int, *, architecture: str = "") -> list[float]:
    """The score of each of `count` tokens."""
    if _SCORES_KEY not in metadata and family_or_defaults(architecture).unscored_tokens:
        return [-float(token) for token in range(count)]
    scores = required_array(metadata, _SCORES_KEY, length=count)
    if not set(map(type, scores)) <= {int, float} or any(map(isnan, scores)):
        raise ModelFileError(f"`{_SCORES_KEY}` has an entry that is not a number.")
    return scores


def flag(metadata: Mapping[str, Any], name: str) -> bool | None:
    """The boolean `tokenizer.ggml.<name>`; None if absent."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and value in (0, 1)):
        raise ModelFileError(f"`{key}` is {str(value)[:80]}, not true or false.")
    return None if value is None else bool(value)


def optional_text(metadata: Mapping[str, Any], key: str) -> str | None:
    """The text under `key`; None if absent."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelFileError(f"`{key}` is not a text.")
    return value


def token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """The token id under `tokenizer.ggml.NAME`; None if absent or, as in llama.cpp, beyond the
    `count` tokens of the vocabulary. ModelFileError for values that are not integers."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    return None if value is None else _known_id(value, key, count)


def _stated_ids(
    metadata: Mapping[str, Any], names: Iterable[str], count: int
) -> dict[str, int | None]:
    """As `token_id`, by name; an id beyond the vocabulary is logged."""
    found = {name: token_id(metadata, name, count) for name in names}
    for name, token in found.items():
        stated = metadata.get(f"tokenizer.ggml.{name}")
        if token is None and stated is not None:
            _log.warning(_IGNORED, name, stated, count)
    return found


def _token_of(role: _Role, stated: Mapping[str, int | None], ids: Mapping[str, int]) -> int | None:
    """The token of this role, found by a key or by its text."""
    for key in role.keys:
        token = stated[key]
        if token is not None:
            return token
    return next((ids[text] for text in role.texts if text in ids), None)


def _known_id(value: Any, key: str, count: int) -> int | None:
    number = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    if not number or value != int(value):
        raise ModelFileError(f"`{key}` is {str(value)[:80]!r}, which is not a token id.")
    return int(value) if 0 <= value < count else None


def _end_list(metadata: Mapping[str, Any], count: int) -> list[int | None]:
    name = "eos_token_ids"
    key = f"tokenizer.ggml.{name}"
    values = [] if metadata.get(key) is None else required_array(metadata, key)
    known = [_known_id(value, key, count) for value in values]
    if None in known:
        _log.warning(_IGNORED, name, values[known.index(None)], count)
    return known


def _end_tokens(
    stated: Collection[int | None],
    tokens: Sequence[str],
    types: Sequence[int],
    ids: Mapping[str, int],
) -> frozenset[int]:
    """The stated tokens, and those with the text of an end token."""
    found = {ids[text] for text in end_texts(ids)}
    found = {token for token in found if _can_end(tokens[token], types[token])}
    return frozenset(token for token in (*stated, *found) if token is not None)


def end_texts(ids: Mapping[str, int]) -> frozenset[str]:
    """The texts that end an answer in a vocabulary, given its tokens by text."""
    texts = END_TEXTS.union(*BETWEEN_FILES.values())
    texts = texts.union(*(turns for sign, turns in _NEXT_TURNS if sign in ids))
    if any(reply in ids and call in ids for reply, call in _WITH_PARTS):
        texts -= {"<|end|>"}
    if all(sign in ids for sign in _WITH_MESSAGES):
        texts = texts - {"<|eom|>"} | {"<|eot|>"}
    if "<|tool_response>" in ids:
        texts -= {"</s>"}
    return texts & ids.keys()


def _can_end(text: str, kind: int) -> bool:
    """Whether a token with the text of an end token is one. Some vocabularies have `</s>` and
    similar texts as ordinary tokens, from web pages, and Gemma's has HTML tags as user-defined
    tokens."""
    if text == "</s>":
        return kind == TokenType.CONTROL
    return kind != TokenType.NORMAL or _CONTROL_TEXT.fullmatch(text) is not None


def _special_texts(
    tokens: Sequence[str], types: Sequence[int], named: frozenset[int]
) -> tuple[dict[str, int], dict[str, int]]:
    control: dict[str, int] = {}
    user_defined: dict[str, int] = {}
    normal = int(TokenType.NORMAL)
    rows = enumerate(zip(tokens, types, strict=True))
    marked = {token for token, (text, kind) in rows if kind != normal or text[:1] == "<"}
    for token in sorted(marked | named):
        text, kind = tokens[token], types[token]
        steers = token in named or kind in (TokenType.UNKNOWN, TokenType.CONTROL)
        if steers or (text.startswith("<") and _is_control_text(text, kind)):
            if len(text) > 1:  # a single character is indistinguishable from typed text
                control.setdefault(text, token)
        elif kind == TokenType.USER_DEFINED and text and not _PADDING_TEXT.fullmatch(text):
            user_defined.setdefault(text, token)
    return control, user_defined


def _is_control_text(text: str, kind: int) -> bool:
    """Whether the text identifies a control token; some converters give these another type."""
    mistyped = kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    return mistyped and _CONTROL_TEXT.fullmatch(text) is not None
