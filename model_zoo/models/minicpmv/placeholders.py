"""MiniCPM-V: the overview and the lines of slices, each part between markers."""

from collections.abc import Sequence

from model_zoo.chat.messages import ImageTexts
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

# What the authors' code writes for an image before it knows the image's size.
PLACE = "(<image>./</image>)"
START, END, SLICE, SLICE_END = "<image>", "</image>", "<slice>", "</slice>"
LINE = "\n"
MARKS = START, END, SLICE, SLICE_END
TEXTS = ImageTexts(PLACE, PLACE, MARKS, separator=LINE)
# The placeholder of MiniCPM-V 4.6, which is Qwen's.
PAD = "<|image_pad|>"
MERGED_TEXTS = ImageTexts(PAD, PAD + LINE, (*MARKS, PAD))


class MiniCPMVPlaceholders:
    """The grid is the height and width of the image.

    enclosed: slices are marked like images, and all of them together as slices, as in MiniCPM-V
    2.5; otherwise each slice is marked as one. place: the placeholder token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        images: MiniCPMVProcessor,
        *,
        enclosed: bool,
        texts: ImageTexts = TEXTS,
        place: str = START,
    ) -> None:
        self.texts = texts
        self._images, self._enclosed = images, enclosed
        self._start, self._end, self._slice, self._slice_end = (
            required_token(tokenizer, text) for text in MARKS
        )
        self._place = required_token(tokenizer, place)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        parts = self._images.slicing.parts(*image.grid)
        whole, length = (self._images.rows(size) for size in (parts.overview, parts.slice_size))
        overview = (self._start, PlaceholderRows(self._place, whole), self._end)
        if not parts.slices:
            return overview
        marks = (self._start, self._end) if self._enclosed else (self._slice, self._slice_end)
        pieces: list[Piece] = []
        for number in range(parts.slices):
            part = PlaceholderRows(self._place, length, whole + number * length)
            if number and number % parts.grid[1] == 0:
                pieces.append(LINE)
            pieces += (marks[0], part, marks[1])
        if self._enclosed:
            pieces = [self._slice, *pieces, self._slice_end]
        return *overview, *pieces


def minicpmv46_placeholders(
    tokenizer: Tokenizer, images: MiniCPMVProcessor
) -> MiniCPMVPlaceholders:
    """Of MiniCPM-V 4.6. Images are not numbered, as in llama.cpp."""
    return MiniCPMVPlaceholders(tokenizer, images, enclosed=False, texts=MERGED_TEXTS, place=PAD)
