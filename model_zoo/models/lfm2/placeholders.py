"""LFM2-VL: tiles with their row and column, then the whole image, between two tokens."""

from collections.abc import Sequence
from math import prod

from model_zoo.chat.messages import ImageTexts
from model_zoo.images.tiling import Grid, grids
from model_zoo.models.lfm2.image_processor import Lfm2Processor
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, WHOLE, END = "<|image_start|>", "<image>", "<|img_thumbnail|>", "<|image_end|>"
NAMED_SIDE = 10  # vocabularies have tokens for that many rows and columns


def tile(row: int, column: int) -> str:
    """The token before a tile; row and column are counted from 1."""
    return f"<|img_row_{row}_col_{column}|>"


_SIDES = range(1, NAMED_SIDE + 1)
_TILES = [tile(row, column) for row in _SIDES for column in _SIDES]
TEXTS = ImageTexts(PLACE, PLACE, (START, PLACE, WHOLE, END, *_TILES))


class Lfm2Placeholders:
    """The grid is the size of the image, of which `processor` makes tiles."""

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer, processor: Lfm2Processor) -> None:
        self._processor = processor
        self._start, self._place, self._end = (
            required_token(tokenizer, text) for text in (START, PLACE, END)
        )
        cutting = processor.max_tiles > 1
        self._whole = required_token(tokenizer, WHOLE) if cutting else None
        named = grids(processor.max_tiles) if cutting else []
        self._tiles = {
            cell: required_token(tokenizer, tile(cell[0] + 1, cell[1] + 1))
            for grid in named
            for cell in _cells(grid)
        }

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        parts = self._processor.parts_of(image.grid, image.rows)
        length = parts.tile_edge**2
        pieces: list[Piece] = []
        for index, cell in enumerate(_cells(parts.tiles)):
            pieces += (self._tiles[cell], PlaceholderRows(self._place, length, index * length))
        if prod(parts.whole):
            before = prod(parts.tiles)
            if self._whole is not None and before:
                pieces.append(self._whole)
            pieces.append(PlaceholderRows(self._place, prod(parts.whole), before * length))
        return self._start, *pieces, self._end


def _cells(grid: Grid) -> list[tuple[int, int]]:
    """(row, column) of each tile in row-major order, counted from 0."""
    return [(row, column) for row in range(grid[0]) for column in range(grid[1])]
