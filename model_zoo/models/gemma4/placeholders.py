"""Gemma 4: an image is a begin token, placeholders and an end token."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|image>", "<|image|>", "<image|>"
# Placeholder and delimiter tokens of unsupported media, which users must not write either.
OTHERS = ("<|video|>", "<|audio>", "<|audio|>", "<audio|>")


class Gemma4Placeholders:
    """Placeholders are computed in one step; the text model decides which layers are
    bidirectional."""

    marker = spelled = PLACE
    reserved = (START, PLACE, END, *OTHERS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._place, self._end = (
            required_token(tokenizer, text) for text in (START, PLACE, END)
        )

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return self._start, PlaceholderRows(self._place, image.rows, whole=True), self._end
