"""Idefics 3 and SmolVLM: tiles with their row and column, then the whole image."""

from collections.abc import Sequence

from model_zoo.chat.messages import ImageTexts
from model_zoo.images.tiling import with_whole
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

AROUND, PLACE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
NAMED_SIDE = 6  # vocabularies have tokens for that many rows and columns
LINE = "\n"


def tile(row: int, column: int) -> str:
    """The name of a tile; row and column are counted from 1."""
    return f"<row_{row}_col_{column}>"


_SIDES = range(1, NAMED_SIDE + 1)
_TILES = [tile(row, column) for row in _SIDES for column in _SIDES]
TEXTS = ImageTexts(PLACE, PLACE, (AROUND, PLACE, WHOLE, *_TILES))


class Idefics3Placeholders:
    """The grid counts rows and columns of tiles; a single tile is the whole image.

    Tile names that are not tokens of the vocabulary are encoded as text, as in the reference.
    """

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around = required_token(tokenizer, AROUND)
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        rows, columns = image.grid
        tiles = rows * columns
        length = image.rows // with_whole(tiles)
        if tiles == 1:
            return *self._tile_pieces(WHOLE, length, 0), self._around
        pieces: list[Piece] = []
        for row in range(rows):
            for column in range(columns):
                first = (row * columns + column) * length
                pieces += self._tile_pieces(tile(row + 1, column + 1), length, first)
            pieces.append(LINE)
        return *pieces, LINE, *self._tile_pieces(WHOLE, length, tiles * length), self._around

    def _tile_pieces(self, name: str, length: int, first_row: int) -> Sequence[Piece]:
        token = self._tokenizer.id_of(name)
        return (
            self._around,
            name if token is None else token,
            PlaceholderRows(self._place, length, first_row),
        )
