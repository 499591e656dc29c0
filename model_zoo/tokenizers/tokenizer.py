"""Text to tokens and back, from a model file's own metadata."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from tokenizers.normalizers import NFC

from model_zoo.families import only_embeds
from model_zoo.tokenizers.byte_level import ByteLevelBPE
from model_zoo.tokenizers.gemma_bpe import GemmaBPE
from model_zoo.tokenizers.marked_space import SPACE
from model_zoo.tokenizers.plamo import PlamoUnigram
from model_zoo.tokenizers.prefix_space import PrefixSpace, prefix_space
from model_zoo.tokenizers.pretokenizers import choose_pre_tokenizer
from model_zoo.tokenizers.sentencepiece_bpe import SentencePieceBPE
from model_zoo.tokenizers.specials import SpecialTexts
from model_zoo.tokenizers.stripping import Stripping, stripping
from model_zoo.tokenizers.unigram import Unigram
from model_zoo.tokenizers.vocabulary import (
    TokenType,
    Vocabulary,
    flag,
    optional_text,
    read_vocabulary,
    required_array,
)
from model_zoo.tokenizers.word_bpe import WordBPE
from model_zoo.tokenizers.wordpiece import WordPiece
from model_zoo.tokenizers.world import WorldTokenizer
from runtime.errors import ModelFileError, UnsupportedModelError

_NFC = NFC()  # `unicodedata` takes quadratic time for runs of combining marks
_GRANITE_EMBEDDING, _WORDS = "granite-embed-multi-311m", "whitespace"
_KINDS = ("gpt2", "llama", "gemma4", "bert", "t5", "plamo2", "rwkv")
_SILENT = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)


class Codec(Protocol):
    """The part that depends on the kind of tokenizer: ordinary text to ids, tokens to bytes."""

    def surface(self, text: str) -> str: ...
    def plain(self, surface: str) -> str: ...
    def encode(self, text: str, *, opens: bool) -> list[int]: ...
    def token_bytes(self, token: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _TextRules:
    """Whether a family's texts begin with BOS, end with EOS, and are brought into NFC.

    | family                      | BOS        | EOS | source                                  |
    |-----------------------------|------------|-----|-----------------------------------------|
    | SentencePiece, Gemma 4      | yes        | no  | LlamaTokenizer; llama-vocab.cpp          |
    | byte-level                  | by its row | no  | pretokenizers.py                        |
    | RoBERTa and Jina            | yes        | yes | RobertaTokenizer                        |
    | words of characters: Jina   | yes        | yes | RobertaTokenizer                        |
    | WordPiece                   | yes        | yes | BertTokenizer; llama-vocab.cpp           |
    | Unigram: XLM-RoBERTa in bert | yes       | yes | XLMRobertaTokenizer                     |
    | Unigram: T5                 | no         | yes | T5Tokenizer; llama-vocab.cpp             |
    | Unigram: PLaMo 2 and 3      | no         | no  | Plamo2Tokenizer; llama-vocab.cpp         |
    | longest bytes: RWKV         | no         | no  | llama-vocab.cpp                          |
    """

    bos: bool = False
    eos: bool = False
    nfc: bool = False  # by the row of a byte-level tokenizer; others normalise by themselves


def load_tokenizer(metadata: Mapping[str, Any], *, architecture: str) -> "Tokenizer":
    """The tokenizer that `metadata` describes.

    ModelFileError if metadata are missing or damaged, UnsupportedModelError for unknown kinds.
    """
    kind = optional_text(metadata, "tokenizer.ggml.model")
    if kind is None:
        raise ModelFileError("The model file has no `tokenizer.ggml.model`.")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"The tokenizer `{kind[:80]}` (`tokenizer.ggml.model`) is not supported; "
            f"supported are {', '.join(_KINDS)}."
        )
    kind = _actual_kind(kind, metadata, architecture)
    vocabulary = read_vocabulary(metadata, architecture=architecture)
    codec, rules = _codec(kind, metadata, vocabulary, architecture)
    add_bos, add_eos = _framing(metadata, kind, rules)
    pre = optional_text(metadata, "tokenizer.ggml.pre") or ""
    return Tokenizer(
        vocabulary,
        codec,
        add_bos=add_bos,
        add_eos=add_eos,
        prefix=prefix_space(metadata, architecture) if kind == "llama" else PrefixSpace.NEVER,
        stripping=stripping(vocabulary, architecture=architecture, kind=kind, pre=pre),
        add_separator=_separates(metadata, kind, rules),
        nfc=rules.nfc,
    )


def _actual_kind(kind: str, metadata: Mapping[str, Any], architecture: str) -> str:
    """The kind of tokenizer: `gemma4` for vocabularies with ranked merges of marked spaces,
    `whitespace` for those of words of characters, else the stated `kind`.

    Converters write `llama` for Gemma 4, and `gpt2` for a Gemma without tokenizer.model, for
    Granite Embedding 311M, which has Gemma 3's vocabulary, and for Jina's Chinese model.
    """
    pre = optional_text(metadata, "tokenizer.ggml.pre")
    if pre == _WORDS:
        return _WORDS
    if pre == _GRANITE_EMBEDDING:
        return "gemma4"
    if not architecture.startswith("gemma") or "tokenizer.ggml.merges" not in metadata:
        return kind
    marked = kind == "gpt2" and SPACE in required_array(metadata, "tokenizer.ggml.tokens")
    return "gemma4" if marked or architecture.startswith("gemma4") else kind


def _codec(
    kind: str, metadata: Mapping[str, Any], vocabulary: Vocabulary, architecture: str
) -> tuple[Codec, _TextRules]:
    """The codec, and the rules for texts; of BOS and EOS, these are defaults."""
    if kind == "gpt2":
        pre = choose_pre_tokenizer(metadata, architecture)
        return ByteLevelBPE(metadata, vocabulary, pre), _TextRules(
            pre.add_bos, pre.add_eos, pre.nfc
        )
    if kind == "gemma4":
        return GemmaBPE(metadata, vocabulary), _TextRules(bos=True)
    if kind == _WORDS:
        return WordBPE(metadata, vocabulary), _TextRules(bos=True, eos=True)
    if kind == "bert":
        return WordPiece(metadata, vocabulary), _TextRules(bos=True, eos=True)
    if kind == "plamo2":
        return PlamoUnigram(metadata, vocabulary), _TextRules()
    if kind == "rwkv":
        return WorldTokenizer(vocabulary), _TextRules()
    if kind == "t5":
        return Unigram(metadata, vocabulary), _TextRules(bos=only_embeds(architecture), eos=True)
    codec = SentencePieceBPE(metadata, vocabulary, architecture=architecture)
    return codec, _TextRules(bos=True)


def _framing(metadata: Mapping[str, Any], kind: str, rules: _TextRules) -> tuple[bool, bool]:
    """Whether texts begin with BOS and end with EOS: as the file states, else by the rules.

    The flags of WordPiece files are ignored, as by llama.cpp: `[SEP]` ends every text, but former
    converters stated that as `add_sep_token`, which is false in files of today.
    """
    if kind == "bert":
        return rules.bos, rules.eos
    bos, eos = flag(metadata, "add_bos_token"), flag(metadata, "add_eos_token")
    return rules.bos if bos is None else bos, rules.eos if eos is None else eos


def _separates(metadata: Mapping[str, Any], kind: str, rules: _TextRules) -> bool:
    """Whether a second end token stands between the texts of a pair, as in RoBERTa."""
    if kind == "bert":
        return False
    stated = flag(metadata, "add_sep_token")
    return rules.bos and rules.eos if stated is None else stated


class Tokenizer:
    """Text to ids and ids to exact bytes.

    User-defined tokens are found in any text, control tokens only on request, so that texts of
    users cannot contain them. `add_eos` applies to documents only; prompts never end with an end
    token. `prefix` and `stripping`: how the family's tokenizer treats white space at special
    tokens. `add_separator`: the texts of a pair have a further end token between them. `nfc`: texts
    are brought into Unicode's normal form C.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        codec: Codec,
        *,
        add_bos: bool,
        add_eos: bool,
        prefix: PrefixSpace,
        stripping: Stripping,
        add_separator: bool = False,
        nfc: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_tokens = vocabulary.end_tokens
        self.add_bos = add_bos and vocabulary.bos_id is not None
        self.add_eos = add_eos
        self.add_separator = add_separator and vocabulary.eos_id is not None
        self._codec, self._prefix, self._nfc = codec, prefix, nfc
        self._control_ids = frozenset(vocabulary.control.values())
        self._specials = SpecialTexts(
            control=vocabulary.control,
            user_defined=vocabulary.user_defined,
            stripping=stripping,
            surface=codec.surface,
        )

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @cached_property
    def longest_token(self) -> int:
        """Length in characters of the longest token."""
        return max(map(len, self.vocabulary.tokens))

    def encode(self, text: str, *, parse_special: bool = False, exact: bool = False) -> list[int]:
        """Ids of `text`, without BOS. `parse_special`: texts of control tokens become these tokens;
        otherwise they are encoded as ordinary text. `exact`: the text is not brought into NFC."""
        return self.encode_parts(self.cut(text, parse_special=parse_special), exact=exact)

    def encode_document(
        self, text: str, *, at_most: int | None = None, parse_special: bool = True
    ) -> list[int]:
        """Ids of a document with BOS and EOS as the file requires; truncated to `at_most` ids."""
        tokens = self.with_bos(self.encode(text, parse_special=parse_special))
        end = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        while end and tokens and tokens[-1] == self.eos_id:
            tokens.pop()
        room = None if at_most is None else max(0, at_most - len(end))
        return tokens[:room] + end

    def pair(self, first: list[int], second: list[int]) -> list[int]:
        """The ids of a query and a text to rank, as one document; the second part has no BOS."""
        separator = [self.eos_id] if self.add_separator and self.eos_id is not None else []
        begins = second[:1] == [self.bos_id]
        return [*first, *separator, *second[begins:]]

    def with_bos(self, tokens: list[int]) -> list[int]:
        """`tokens` with exactly one BOS, if they begin with one or the file requires it."""
        if self.bos_id is None:
            return tokens
        start = 0
        while start < len(tokens) and tokens[start] == self.bos_id:
            start += 1
        wanted = self.add_bos or start > 0
        return [self.bos_id, *tokens[start:]] if wanted else tokens

    def cut(self, text: str, *, parse_special: bool) -> list[str | int]:
        """`text` split at its special tokens: ordinary texts and ids, in order."""
        return self._specials.cut(_valid(text), parse_special=parse_special)

    def encode_parts(self, parts: Iterable[str | int], *, exact: bool = False) -> list[int]:
        """Ids of the result of `cut`; texts are encoded as ordinary text. `exact`: as in `encode`.

        A text after a number, which is a token or an image placeholder, counts as a new piece.
        """
        tokens: list[int] = []
        begins = True
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                begins = True
            elif part:
                if self._nfc and not exact and not part.isascii():
                    part = _NFC.normalize_str(part)
                opens = begins and self._prefix.applies(part, first=not tokens)
                tokens += self._codec.encode(part, opens=opens)
                begins = False
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """The bytes of `token` in generated text; empty for control and unused tokens."""
        if token in self._control_ids:
            return b""
        text, kind = self.vocabulary.tokens[token], self.vocabulary.types[token]
        if kind in _SILENT:
            return b""
        if kind == TokenType.USER_DEFINED:
            return self._codec.plain(text).encode(errors="replace")
        return self._codec.token_bytes(text)

    def token_text(self, token: int) -> str:
        """`token` for display: control tokens by name, invalid UTF-8 as U+FFFD."""
        shown = self.token_bytes(token)
        return shown.decode(errors="replace") if shown else self.vocabulary.tokens[token]

    def spell(self, tokens: Sequence[int]) -> str:
        """The text that encodes to `tokens`, with control tokens by name, and without the space
        that some families put before a text."""
        spelled = b"".join(self.token_bytes(t) or self.token_text(t).encode() for t in tokens)
        text = spelled.decode(errors="replace")
        begins = text.startswith(" ") and self._prefix.applies("", first=True)
        return text[1:] if begins else text

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def id_of(self, text: str) -> int | None:
        return self.vocabulary.id_of(text)


def _valid(text: str) -> str:
    """`text` as valid UTF-8: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
