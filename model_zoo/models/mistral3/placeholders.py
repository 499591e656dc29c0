"""Pixtral and Mistral Small: rows of placeholders with a break token after each but the last.
LightOnOCR: placeholders alone."""

from collections.abc import Sequence

from model_zoo.multimodal import qwen_placeholders as qwen
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


class PixtralPlaceholders:
    """The grid is the number of lines of placeholders, and of placeholders per line."""

    marker = spelled = PLACE
    reserved = (PLACE, BREAK, END)

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


class LightOnPlaceholders:
    """The vocabulary is Qwen's, but nothing surrounds the placeholders."""

    marker = spelled = qwen.PLACE
    reserved = (qwen.START, qwen.PLACE, qwen.END, *qwen.OTHERS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._place = required_token(tokenizer, qwen.PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (PlaceholderRows(self._place, image.rows),)
