"""SentencePiece-BPE with the `sentencepiece` library."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

from model_zoo.tokenizers.marked_space import SPACE, marked_bytes, with_marks, without_marks
from model_zoo.tokenizers.recurring import RecurringPieces
from model_zoo.tokenizers.vocabulary import TokenType, Vocabulary, token_scores
from runtime.errors import ModelFileError

_STAND_IN = "\uffff"  # prefix of piece names that occur in no text
_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


# The place before a space that follows another character. If no token of the vocabulary contains a
# space after another character, no merge spans this place.
BEFORE_SPACE = re.compile(f"(?<=[^{SPACE}])(?={SPACE})")
NOWHERE = re.compile("(?!)")


class SentencePieceBPE:
    """Replaces spaces by ▁; the adjacent pieces whose union has the highest score merge first."""

    def __init__(
        self, metadata: Mapping[str, Any], vocabulary: Vocabulary, *, architecture: str = ""
    ) -> None:
        self._count = len(vocabulary.tokens)
        scores = token_scores(metadata, self._count, architecture=architecture)
        self._native = _build(vocabulary, scores)
        joined = any(BEFORE_SPACE.search(token) for token in vocabulary.tokens)
        self._pieces = RecurringPieces(NOWHERE if joined else BEFORE_SPACE, self._encode_all)

    def surface(self, text: str) -> str:
        """The form of text in which special tokens are searched."""
        return with_marks(text)

    def plain(self, surface: str) -> str:
        """The inverse of `surface`."""
        return without_marks(surface)

    def encode(self, text: str, *, opens: bool) -> list[int]:
        """Ids of a text without special tokens; `opens` adds the prefix space."""
        text = with_marks(text)
        return self._pieces(SPACE + text if opens else text)

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        ids = self._native.encode(texts, num_threads=1)
        return [[token for token in some if token < self._count] for some in ids]

    def token_bytes(self, token: str) -> bytes:
        """The bytes of an ordinary or byte token."""
        return marked_bytes(token)


def _build(vocabulary: Vocabulary, scores: list[float]) -> SentencePieceProcessor:
    model = ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    model.trainer_spec.byte_fallback = bool(_byte_texts(vocabulary))
    pieces = _pieces(vocabulary, scores)
    try:
        return SentencePieceProcessor(model_proto=model.SerializeToString() + pieces)
    except RuntimeError as error:
        raise ModelFileError(f"`tokenizer.ggml.tokens` is no valid vocabulary: {error}.") from error


def _byte_texts(vocabulary: Vocabulary) -> frozenset[str]:
    """The texts of byte tokens: all, as the library needs, or none if the vocabulary lacks one."""
    typed = zip(vocabulary.tokens, vocabulary.types, strict=True)
    found = {text for text, kind in typed if kind == TokenType.BYTE}
    return _BYTES if found >= _BYTES else frozenset()


def _pieces(vocabulary: Vocabulary, scores: list[float]) -> bytes:
    """The field `pieces` of a ModelProto; the library for protocol buffers takes twice as long."""
    piece, byte_texts = ModelProto.SentencePiece, _byte_texts(vocabulary)
    ids, unknown_id, control = vocabulary.ids, vocabulary.unknown_id, piece.CONTROL
    with np.errstate(over="ignore"):
        packed = np.array([*scores, 0.0], "<f4").tobytes()
    rows = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    encoded = []
    for token, (text, kind) in rows:
        if token == unknown_id:
            number = piece.UNKNOWN
        elif ids[text] != token or not text or "\0" in text:  # the library rejects these
            text, number = f"{_STAND_IN}{token}", control
        elif kind == TokenType.BYTE and text in byte_texts:
            number = piece.BYTE
        else:  # special tokens are cut out of the text first, so their pieces need not match
            number = piece.NORMAL if kind == TokenType.NORMAL else control
        encoded.append(_piece(text, packed[4 * token : 4 * token + 4], number))
    if unknown_id is None:
        encoded.append(_piece(f"{_STAND_IN}unknown", packed[-4:], piece.UNKNOWN))
    return b"".join(encoded)


def _piece(text: str, score: bytes, kind: int) -> bytes:
    """Field 1 of a ModelProto: a message with the text (1), the score (2) and the type (3)."""
    name = text.encode()
    size = len(name)
    if size < 100:  # both lengths fit one byte
        return b"\n%c\n%c%b\x15%b\x18%c" % (size + 9, size, name, score, kind)
    content = b"\n%b%b\x15%b\x18%c" % (_varint(size), name, score, kind)
    return b"\n%b%b" % (_varint(len(content)), content)


def _varint(number: int) -> bytes:
    """A number in protobuf's encoding: seven bits per byte, the lowest first."""
    low = number & 127
    return bytes([low | 128]) + _varint(number >> 7) if number > 127 else bytes([low])
