"""HunyuanOCR and Hunyuan-VL: begin, lines with their ends, and end of an image."""

from collections.abc import Sequence

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, END, PLACE = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 101, 102))
TEXTS = ImageTexts(PLACE, START + PLACE + END, (START, PLACE, END))


class HunyuanPlaceholders:
    """Chat templates write the start and end tokens. Only lines are places in a rectangle."""

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        required_token(tokenizer, START)
        required_token(tokenizer, END)
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        lines, columns = image.grid
        length = lines * (columns + 1)
        return (
            PlaceholderRows(self._place, 1),
            PlaceholderRows(self._place, length, 1, grid=(lines, columns + 1)),
            PlaceholderRows(self._place, 1, 1 + length),
        )
