"""Llama 3.2 Vision: a single token, from which on the text sees the image from the side."""

from collections.abc import Sequence
from math import prod

from model_zoo.multimodal.placeholders import Outlined, Piece, Rows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<|image|>"


class MllamaPlaceholders:
    """The grid is of tiles; of the `tiles` that an image may have the others are padding."""

    marker = spelled = PLACE
    reserved = (PLACE,)

    def __init__(self, tokenizer: Tokenizer, tiles: int) -> None:
        self._place = required_token(tokenizer, PLACE)
        self._tiles = tiles

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        seen = prod(image.grid) * (image.rows // self._tiles)
        return (Rows(self._place, 1, cross_rows=seen, cross_padding=image.rows - seen),)
