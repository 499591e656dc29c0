"""PaddleOCR-VL: a rectangle of placeholders with two-dimensional positions."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"


class PaddlePlaceholders:
    """Chat templates write the start and end tokens."""

    marker, spelled = PLACE, START + PLACE + END
    reserved = (START, PLACE, END)

    def __init__(self, tokenizer: Tokenizer) -> None:
        required_token(tokenizer, START)
        required_token(tokenizer, END)
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (PlaceholderRows(self._place, image.rows, grid=image.grid),)
