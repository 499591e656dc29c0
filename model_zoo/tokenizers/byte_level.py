"""Byte-level BPE, on the `tokenizers` library."""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence

from model_zoo.tokenizers.digit_runs import DigitRuns
from model_zoo.tokenizers.pretokenizers import LINEAR, PreTokenizer
from model_zoo.tokenizers.recurring import RecurringPieces
from model_zoo.tokenizers.vocabulary import Vocabulary, required_array
from runtime.errors import ModelFileError

# The place before a single space between two letters, where pre-tokenizers split unless their
# pieces span words.
BETWEEN_WORDS = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")


class ByteLevelBPE:
    """Splits text by expressions, maps its bytes to visible characters, and merges these."""

    def __init__(
        self, metadata: Mapping[str, Any], vocabulary: Vocabulary, pre: PreTokenizer
    ) -> None:
        model = merging_model(metadata, vocabulary, ignore_merges=pre.whole_pieces)
        self._native = NativeTokenizer(model)
        self._native.pre_tokenizer = splitter(pre)
        self._pieces = RecurringPieces(BETWEEN_WORDS, self._encode_all)
        self._across_words = pre.across_words
        native, digit = self._native.pre_tokenizer, pre.from_right
        self._digits = None if digit is None else DigitRuns(native, digit)

    def surface(self, text: str) -> str:
        """The form of text in which special tokens are searched: the text itself."""
        return text

    def plain(self, surface: str) -> str:
        """The inverse of `surface`."""
        return surface

    def encode(self, text: str, *, opens: bool) -> list[int]:
        """Ids of a text without special tokens."""
        pieces = [text] if self._digits is None else self._digits.pieces(text)
        if self._across_words:
            return [id for ids in self._encode_all(pieces) for id in ids]
        return [id for piece in pieces for id in self._pieces(piece)]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        # The library's `encode` computes offsets too and takes twice as long.
        encodings = self._native.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def token_bytes(self, token: str) -> bytes:
        """The bytes of an ordinary token."""
        return b"".join(map(_character_bytes, token))


def splitter(pre: PreTokenizer) -> PreTokenizerSequence:
    """The library's object for the pre-tokenizer, which also maps bytes to characters."""
    before, after = (
        [Split(Regex(LINEAR.get(each, each)), "isolated") for each in expressions]
        for expressions in (pre.expressions, pre.on_bytes)
    )
    return PreTokenizerSequence(
        [*before, ByteLevel(add_prefix_space=False, use_regex=False), *after]
    )


def merging_model(metadata: Mapping[str, Any], vocabulary: Vocabulary, **options: Any) -> BPE:
    """The library's model of the vocabulary and the file's merges, with these options."""
    ids, merges = dict(vocabulary.ids), _read_merges(metadata)
    try:
        return BPE(vocab=ids, merges=merges, **options)
    except Exception:  # the library raises no other type if a token of a merge is missing
        usable = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
        return BPE(vocab=ids, merges=usable, **options)


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of tokens by priority; split in one expression, since there are hundreds of
    thousands."""
    key = "tokenizer.ggml.merges"
    texts = required_array(metadata, key)
    if set(map(type, texts)) <= {str}:
        merges = [(text[:cut], text[cut + 1 :]) for text in texts if (cut := text.find(" ", 1)) > 0]
        if len(merges) == len(texts):
            return merges
    rank, wrong = next(
        (rank, text)
        for rank, text in enumerate(texts)
        if not isinstance(text, str) or text.find(" ", 1) < 0
    )
    raise ModelFileError(f"`{key}` entry {rank} is {wrong!r}, not two tokens and a space.")


def _visible_bytes() -> dict[str, bytes]:
    """The 256 characters that represent bytes: printable ones themselves, others shifted."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    characters = {chr(byte): bytes([byte]) for byte in visible}
    return characters | {chr(0x100 + n): bytes([byte]) for n, byte in enumerate(hidden)}


_VISIBLE = _visible_bytes()


def _character_bytes(character: str) -> bytes:
    known = _VISIBLE.get(character)
    if known is not None:
        return known
    return b" " if character == "\u2581" else character.encode(errors="replace")
