"""Llama 3.2 Vision: an image is a single token; later text attends to it by cross-attention."""

from collections.abc import Sequence
from math import prod

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<|image|>"
TEXTS = ImageTexts(PLACE, PLACE, (PLACE,))


class MllamaPlaceholders:
    """The grid counts rows and columns of tiles; the rest of the `tiles` slots is padding."""

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer, tiles: int) -> None:
        self._place = required_token(tokenizer, PLACE)
        self._tiles = tiles

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        seen = prod(image.grid) * (image.rows // self._tiles)
        return (PlaceholderRows(self._place, 1, cross_rows=seen, cross_padding=image.rows - seen),)
