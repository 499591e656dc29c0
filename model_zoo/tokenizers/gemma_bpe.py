"""Gemma 4's BPE with the `tokenizers` library: ranked merges of UTF-8 with marked spaces."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.normalizers import Replace

from model_zoo.tokenizers.byte_level import merging_model
from model_zoo.tokenizers.marked_space import SPACE, marked_bytes, with_marks, without_marks
from model_zoo.tokenizers.vocabulary import Vocabulary


class GemmaBPE:
    """Merges whole texts; characters that are not in the vocabulary become bytes."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        unknown = vocabulary.unknown_id
        model = merging_model(
            metadata,
            vocabulary,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        self._native = NativeTokenizer(model)
        self._native.normalizer = Replace(" ", SPACE)

    def surface(self, text: str) -> str:
        return with_marks(text)

    def plain(self, surface: str) -> str:
        return without_marks(surface)

    def encode(self, text: str, *, opens: bool) -> list[int]:
        return self._native.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token: str) -> bytes:
        return marked_bytes(token)
