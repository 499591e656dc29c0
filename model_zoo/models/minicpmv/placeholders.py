"""MiniCPM-V: the overview and the lines of slices, each part between markers."""

from collections.abc import Sequence

from model_zoo.images.slicing import Slicing
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

# What the authors' code writes for an image before it knows the image's size.
PLACE = "(<image>./</image>)"
START, END, SLICE, SLICE_END = "<image>", "</image>", "<slice>", "</slice>"
LINE = "\n"


class MiniCPMVPlaceholders:
    """The grid is the height and width of the image.

    enclosed: slices are marked like images, and all of them together as slices, as in MiniCPM-V
    2.5; otherwise each slice is marked as one. The placeholder token is that which starts an image.
    """

    marker, spelled = PLACE, PLACE + LINE
    reserved = (START, END, SLICE, SLICE_END)

    def __init__(self, tokenizer: Tokenizer, slicing: Slicing, *, enclosed: bool) -> None:
        self._slicing, self._enclosed = slicing, enclosed
        self._start, self._end, self._slice, self._slice_end = (
            required_token(tokenizer, text) for text in self.reserved
        )

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        parts = self._slicing.parts(*image.grid)
        length = image.rows // (1 + parts.slices)
        rows = [
            PlaceholderRows(self._start, length, first) for first in range(0, image.rows, length)
        ]
        overview = (self._start, rows[0], self._end)
        if not parts.slices:
            return overview
        marks = (self._start, self._end) if self._enclosed else (self._slice, self._slice_end)
        pieces: list[Piece] = []
        for number, part in enumerate(rows[1:]):
            if number and number % parts.grid[1] == 0:
                pieces.append(LINE)
            pieces += (marks[0], part, marks[1])
        if self._enclosed:
            pieces = [self._slice, *pieces, self._slice_end]
        return *overview, *pieces
