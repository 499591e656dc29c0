"""A tokenizer of bytes and a few control tokens, for tests of grammars."""

import re
from collections.abc import Sequence
from types import SimpleNamespace

END = "<|im_end|>"


class ByteTokenizer:
    """Token n is byte n for n < 256; then the control tokens, of which the first ends replies."""

    def __init__(self, *markers: str) -> None:
        texts = (END, *markers)
        control = {text: 256 + index for index, text in enumerate(texts)}
        self.vocabulary = SimpleNamespace(control=control)
        self.vocab_size = 256 + len(texts)
        self.end_tokens = frozenset({256})
        self.bos_id = None
        self._markers = {token: text for text, token in control.items()}

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        control = self.vocabulary.control
        pieces = re.split("|".join(f"({re.escape(text)})" for text in control), text)
        tokens: list[int] = []
        for piece in filter(None, pieces):
            special = parse_special and piece in control
            tokens += [control[piece]] if special else piece.encode()
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """With the texts of control tokens, as replies have them if they are markup."""
        pieces = [self._markers.get(token, "").encode() or bytes([token]) for token in tokens]
        return b"".join(pieces).decode(errors="replace")
