"""Pixtral's vision model, such as Mistral Small's: row by row, a break behind each but the last."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, Rows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


class PixtralPlaceholders:
    """The grid of an image says how many rows of places it has, and how many places a row."""

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
            pieces += (Rows(self._place, columns, row * columns), self._break)
        pieces[-1] = self._end
        return pieces
