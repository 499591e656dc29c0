"""GLM-4.1V and later, and GLM-OCR: a rectangle of placeholders with two-dimensional positions."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
# Placeholders of unsupported media, which users must not write either.
OTHERS = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")


class GlmPlaceholders:
    """Chat templates write the start and end tokens."""

    marker, spelled = PLACE, START + PLACE + END
    reserved = (START, PLACE, END, *OTHERS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        required_token(tokenizer, START)
        required_token(tokenizer, END)
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (PlaceholderRows(self._place, image.rows, grid=image.grid),)
