"""RWKV's World tokenizer: at each place of a text the longest token, byte by byte."""

import re

from model_zoo.tokenizers.vocabulary import TokenType, Vocabulary
from runtime.errors import ModelFileError

_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_CONTROLS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_IN_TEXT = (TokenType.NORMAL, TokenType.BYTE, TokenType.USER_DEFINED)


class WorldTokenizer:
    """Tokens are bytes, which files write as Python writes `bytes`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = {}
        for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
            piece = _unescaped(text)
            if kind in _IN_TEXT and text not in vocabulary.control and piece:
                self._ids.setdefault(piece, token)
                lengths.setdefault(piece[:2], set()).add(len(piece))
        if not all(bytes([value]) in self._ids for value in range(256)):
            raise ModelFileError("The vocabulary lacks the token of a byte.")
        # By the first two bytes, the lengths of longer tokens; every byte is a token.
        self._lengths = {start: sorted(each, reverse=True) for start, each in lengths.items()}

    def surface(self, text: str) -> str:
        return text

    def plain(self, surface: str) -> str:
        return surface

    def encode(self, text: str, *, opens: bool) -> list[int]:
        data, begin, ids = text.encode(), 0, list[int]()
        while begin < len(data):
            for length in (*self._lengths.get(data[begin : begin + 2], ()), 1):
                token = self._ids.get(data[begin : begin + length])
                if token is not None:
                    break
            assert token is not None
            ids.append(token)
            begin += min(length, len(data) - begin)
        return ids

    def token_bytes(self, token: str) -> bytes:
        return _unescaped(token)


def escaped(piece: bytes) -> str:
    """A token as files write it."""
    return repr(piece)[2:-1]


def _unescaped(text: str) -> bytes:
    return _ESCAPE.sub(_byte, text.encode(errors="replace"))


def _byte(found: re.Match[bytes]) -> bytes:
    if found[1] is not None:
        return bytes([int(found[1], 16)])
    return _CONTROLS.get(found[2], found[2])
