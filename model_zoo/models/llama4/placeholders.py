"""Llama 4: tiles with separators between them, then the whole image."""

from collections.abc import Sequence
from math import prod

from model_zoo.chat.messages import ImageTexts
from model_zoo.images.tiling import with_whole
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, WHOLE, PLACE, END = "<|image_start|>", "<|image|>", "<|patch|>", "<|image_end|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
TEXTS = ImageTexts(WHOLE, WHOLE, (START, WHOLE, PLACE, END, NEXT_COLUMN, NEXT_ROW))


class Llama4Placeholders:
    """The grid counts rows and columns of tiles; a single tile is the whole image."""

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = {text: required_token(tokenizer, text) for text in TEXTS.reserved}

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        _, columns = image.grid
        tiles = with_whole(prod(image.grid))
        length = image.rows // tiles
        places = [
            PlaceholderRows(self._tokens[PLACE], length, tile * length) for tile in range(tiles)
        ]
        pieces: list[Piece] = [self._tokens[START]]
        for tile, part in enumerate(places[:-1], start=1):
            pieces += (part, self._tokens[NEXT_COLUMN if tile % columns else NEXT_ROW])
        return *pieces, self._tokens[WHOLE], places[-1], self._tokens[END]
