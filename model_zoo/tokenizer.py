"""Text to tokens and back, from a model file's own metadata."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

from model_zoo.tokenizers.byte_level import ByteLevelBPE
from model_zoo.tokenizers.gemma_bpe import GemmaBPE
from model_zoo.tokenizers.marked_space import SPACE
from model_zoo.tokenizers.pretokenizers import choose_pre_tokenizer
from model_zoo.tokenizers.sentencepiece_bpe import SentencePieceBPE
from model_zoo.tokenizers.specials import SpecialTexts
from model_zoo.tokenizers.unigram import Unigram
from model_zoo.tokenizers.vocabulary import (
    TokenType,
    Vocabulary,
    flag,
    optional_text,
    read_vocabulary,
)
from model_zoo.tokenizers.wordpiece import WordPiece
from runtime.errors import ModelFileError, UnsupportedModelError

_KINDS = ("gpt2", "llama", "gemma4", "bert", "t5")
_SILENT = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)


class Codec(Protocol):
    """What differs between kinds of tokenizer: ordinary text to ids, ordinary tokens to bytes."""

    def surface(self, text: str) -> str: ...
    def plain(self, surface: str) -> str: ...
    def encode(self, text: str, *, opens: bool) -> list[int]: ...
    def token_bytes(self, token: str) -> bytes: ...


def load_tokenizer(metadata: Mapping[str, Any], *, architecture: str) -> "Tokenizer":
    """The tokenizer that `metadata` describes.

    ModelFileError names what is missing or damaged, UnsupportedModelError a kind not served.
    """
    kind = optional_text(metadata, "tokenizer.ggml.model")
    if kind is None:
        raise ModelFileError("The model file has no `tokenizer.ggml.model`.")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"The tokenizer `{kind[:80]}` (`tokenizer.ggml.model`) is not supported; "
            f"supported are {', '.join(_KINDS)}."
        )
    if architecture.startswith("gemma4") and "tokenizer.ggml.merges" in metadata:
        kind = "gemma4"  # some converters write `llama`
    vocabulary = read_vocabulary(metadata)
    codec, add_bos = _codec(kind, metadata, vocabulary, architecture)
    stated = flag(metadata, "add_bos_token")
    return Tokenizer(
        vocabulary,
        codec,
        add_bos=add_bos if stated is None else stated,
        add_eos=_adds_eos(kind, metadata),
    )


def _adds_eos(kind: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a document ends in EOS, which is `[SEP]` with WordPiece."""
    names = ("add_sep_token", "add_eos_token") if kind == "bert" else ("add_eos_token",)
    stated = [flag(metadata, name) for name in names]
    return next((word for word in stated if word is not None), kind == "bert")


def _codec(
    kind: str, metadata: Mapping[str, Any], vocabulary: Vocabulary, architecture: str
) -> tuple[Codec, bool]:
    """Also whether a text begins with BOS where the file does not say."""
    if kind == "gpt2":
        pre = choose_pre_tokenizer(metadata, architecture)
        return ByteLevelBPE(metadata, vocabulary, pre), pre.add_bos
    if kind == "gemma4":
        return GemmaBPE(metadata, vocabulary), True
    if kind == "bert":
        return WordPiece(metadata, vocabulary), True
    if kind == "t5":
        return Unigram(metadata, vocabulary), False
    return SentencePieceBPE(metadata, vocabulary), True


class Tokenizer:
    """Text to ids and ids to exact bytes.

    User-defined tokens are found in any text. Control tokens are found only where asked, so that
    text can never steer the model by accident. `add_eos` is the file's word on documents; a
    prompt to be continued never ends in an end token.
    """

    def __init__(
        self, vocabulary: Vocabulary, codec: Codec, *, add_bos: bool, add_eos: bool
    ) -> None:
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_tokens = vocabulary.end_tokens
        self.add_bos = add_bos and vocabulary.bos_id is not None
        self.add_eos = add_eos
        self._codec = codec
        self._control_ids = frozenset(vocabulary.control.values())
        self._specials = SpecialTexts(
            control={codec.surface(text): i for text, i in vocabulary.control.items()},
            user_defined={codec.surface(text): i for text, i in vocabulary.user_defined.items()},
        )

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token's text: no token stands for more of a text."""
        return max(map(len, self.vocabulary.tokens))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of `text`; no BOS. `parse_special`: control tokens written in it become tokens."""
        return self.encode_parts(self.cut(text, parse_special=parse_special))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: control tokens recognised, BOS by the file's rule, never twice."""
        return self.with_bos(self.encode(text, parse_special=True))

    def encode_document(self, text: str, *, at_most: int | None = None) -> list[int]:
        """Ids of a whole text: BOS and EOS by the file's rule; cut before EOS to `at_most` ids."""
        tokens = self.encode_prompt(text)
        end = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        while end and tokens and tokens[-1] == self.eos_id:
            tokens.pop()
        room = None if at_most is None else max(0, at_most - len(end))
        return tokens[:room] + end

    def with_bos(self, tokens: list[int]) -> list[int]:
        """`tokens` behind exactly one BOS where they have one or the file asks for it."""
        if self.bos_id is None:
            return tokens
        start = 0
        while start < len(tokens) and tokens[start] == self.bos_id:
            start += 1
        wanted = self.add_bos or start > 0
        return [self.bos_id, *tokens[start:]] if wanted else tokens

    def cut(self, text: str, *, parse_special: bool) -> list[str | int]:
        """`text` cut at its special tokens: pieces of ordinary text and ids, in order."""
        return self._specials.cut(self._codec.surface(_valid(text)), parse_special=parse_special)

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Ids of what `cut` gave; the pieces of text are taken as ordinary text throughout."""
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
            elif part:
                tokens += self._codec.encode(part, opens=self._opens(part, tokens))
        return tokens

    def _opens(self, text: str, before: list[int]) -> bool:
        """Whether `text` begins anew and takes the prefix space of SentencePiece.

        At the very start it always does, as in the library. After a control token it does unless
        white space stands there already: models learned conversations joined from such pieces.
        """
        if not before:
            return True
        return before[-1] in self._control_ids and not (text[0].isspace() or text[0] == SPACE)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to generated text; none for control and unused tokens."""
        if token in self._control_ids:
            return b""
        text, kind = self.vocabulary.tokens[token], self.vocabulary.types[token]
        if kind in _SILENT:
            return b""
        if kind == TokenType.USER_DEFINED:
            return self._codec.plain(text).encode(errors="replace")
        return self._codec.token_bytes(text)

    def token_text(self, token: int) -> str:
        """`token` for display: control tokens by name, broken UTF-8 as U+FFFD."""
        shown = self.token_bytes(token)
        return shown.decode(errors="replace") if shown else self.vocabulary.tokens[token]

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def id_of(self, text: str) -> int | None:
        return self.vocabulary.id_of(text)


def _valid(text: str) -> str:
    """`text` as UTF-8 can hold it: surrogate pairs joined, lone surrogates as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
