"""Pixtral and Mistral Small: rows of placeholders with a break token after each but the last.
LightOnOCR: placeholders alone."""

from collections.abc import Sequence
from dataclasses import replace

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal import qwen_placeholders as qwen
from model_zoo.multimodal.placeholders import (
    Outlined,
    Piece,
    PlaceholderRows,
    PlaceholderRun,
    required_token,
)
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
TEXTS = ImageTexts(PLACE, PLACE, (PLACE, BREAK, END))
# The vocabulary is Qwen's, but nothing surrounds the placeholders.
LIGHTON_TEXTS = replace(qwen.TEXTS, spelled=qwen.PLACE)


class PixtralPlaceholders:
    """The grid is the number of lines of placeholders, and of placeholders per line."""

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._place, self._break, self._end = (
            required_token(tokenizer, text) for text in (PLACE, BREAK, END)
        )

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        rows, columns = image.grid
        pieces: list[Piece] = []
        for row in range(rows):
            pieces += (PlaceholderRows(self._place, columns, row * columns), self._break)
        pieces[-1] = self._end
        return pieces


def lighton_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    return PlaceholderRun(LIGHTON_TEXTS, required_token(tokenizer, qwen.PLACE))
