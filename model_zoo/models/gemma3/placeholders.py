"""Gemma 3: an image is a paragraph of its own, and its places see each other in both directions."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, Rows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
PARAGRAPH = "\n\n"


class Gemma3Placeholders:
    """The line breaks join with those of the text around them, as `transformers` has it."""

    marker = spelled = START
    reserved = (START, PLACE, END)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start = required_token(tokenizer, START)
        self._end = required_token(tokenizer, END)
        # The token of a place lies beyond the rows that most files have embeddings for.
        place = tokenizer.id_of(PLACE)
        self._place = self._start if place is None else place

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        rows = Rows(self._place, image.rows, whole=True)
        return PARAGRAPH, self._start, rows, self._end, PARAGRAPH
