"""SentencePiece-BPE with the `sentencepiece` library."""

import re
from collections.abc import Mapping
from typing import Any

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

from model_zoo.tokenizers.marked_space import SPACE, marked_bytes, with_marks, without_marks
from model_zoo.tokenizers.recurring import RecurringPieces
from model_zoo.tokenizers.vocabulary import TokenType, Vocabulary, token_scores
from runtime.errors import ModelFileError

_STAND_IN = "\uffff"  # prefix of piece names that occur in no text


# A space after another character. If no token of the vocabulary contains that, nothing merges
# across it.
BEFORE_SPACE = re.compile(f"(?<=[^{SPACE}])(?={SPACE})")
NOWHERE = re.compile("(?!)")


class SentencePieceBPE:
    """Spaces become ▁, and the adjacent pieces whose union has the highest score merge first."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        self._count = len(vocabulary.tokens)
        self._native = _build(vocabulary, token_scores(metadata, self._count))
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
    model.trainer_spec.byte_fallback = vocabulary.types.count(TokenType.BYTE) == 256
    unknown, piece = model.SentencePiece.UNKNOWN, model.SentencePiece
    kinds: dict[int, int] = {TokenType.NORMAL: piece.NORMAL, TokenType.BYTE: piece.BYTE}
    add, ids, control = model.pieces.add, vocabulary.ids, piece.CONTROL
    rows = zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
    for token, (text, score, kind) in enumerate(rows):
        if token == vocabulary.unknown_id:
            add(piece=text, score=score, type=unknown)
        elif ids[text] != token or not text or "\0" in text:  # the library rejects these
            add(piece=f"{_STAND_IN}{token}", score=score, type=control)
        else:  # special tokens are cut out before: they never match
            add(piece=text, score=score, type=kinds.get(kind, control))
    if vocabulary.unknown_id is None:
        add(piece=f"{_STAND_IN}unknown", score=0.0, type=unknown)
    try:
        return SentencePieceProcessor(model_proto=model.SerializeToString())
    except RuntimeError as error:
        raise ModelFileError(f"`tokenizer.ggml.tokens` is no valid vocabulary: {error}.") from error
