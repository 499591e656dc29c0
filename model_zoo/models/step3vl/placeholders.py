"""Step 3 VL: windows between markers, a marker after each line of them, then the whole image."""

from collections.abc import Sequence

from model_zoo.chat.messages import ImageTexts
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<im_start>", "<im_patch>", "<im_end>"
WINDOW, WINDOW_END, LINE_END = "<patch_start>", "<patch_end>", "<patch_newline>"
TEXTS = ImageTexts(PLACE, PLACE, (START, PLACE, END, WINDOW, WINDOW_END, LINE_END))


class Step3VLPlaceholders:
    """The grid counts rows and columns of windows. images: the image processor."""

    texts = TEXTS

    def __init__(self, tokenizer: Tokenizer, images: Step3VLProcessor) -> None:
        self._tokens = {text: required_token(tokenizer, text) for text in TEXTS.reserved}
        self._whole, self._each = (images.rows_of(side) for side in (images.side, images.tile))

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        rows, columns = image.grid
        pieces: list[Piece] = []
        for window in range(rows * columns):
            pieces += self._view(WINDOW, WINDOW_END, self._each, window * self._each)
            if (window + 1) % columns == 0 and window + 1 < rows * columns:
                pieces.append(self._tokens[LINE_END])
        return *pieces, *self._view(START, END, self._whole, image.rows - self._whole)

    def _view(self, start: str, end: str, length: int, first_row: int) -> Sequence[Piece]:
        places = PlaceholderRows(self._tokens[PLACE], length, first_row)
        return self._tokens[start], places, self._tokens[end]
