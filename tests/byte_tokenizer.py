"""A tokenizer of bytes and a few control tokens, for tests of grammars."""

import re
from collections.abc import Sequence
from types import SimpleNamespace

END = "<|im_end|>"
# Markers of formats that vocabularies have as tokens.
TOKEN = re.compile(r"\]<\]minimax\[>\[|<[^<>]{4,}>|\[[A-Z_/]+\]")


class ByteTokenizer:
    """Token n is byte n for n < 256; then the control tokens, of which the first ends replies; then
    `texts`, which `encode` does not use."""

    def __init__(self, *markers: str, texts: Sequence[str] = ()) -> None:
        markers = (END, *markers)
        control = {text: 256 + index for index, text in enumerate(markers)}
        self._texts = [text.encode() for text in texts]
        self.vocabulary = SimpleNamespace(control=control)
        self.vocab_size = 256 + len(markers) + len(texts)
        self.end_tokens = frozenset({256})
        self.bos_id = None
        self._markers = {token: text for text, token in control.items()}
        self._pieces = re.compile("|".join(f"({re.escape(text)})" for text in control))

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return b"" if token in self._markers else self._texts[token - 256 - len(self._markers)]

    def encode(self, text: str, *, parse_special: bool = False, exact: bool = True) -> list[int]:
        control = self.vocabulary.control
        tokens: list[int] = []
        for piece in filter(None, self._pieces.split(text)):
            special = parse_special and piece in control
            tokens += [control[piece]] if special else piece.encode()
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """With the texts of control tokens, as replies have them if they are markup."""
        pieces = [
            self._markers.get(token, "").encode() or self.token_bytes(token) for token in tokens
        ]
        return b"".join(pieces).decode(errors="replace")
