"""Gemma 3: an image is a paragraph; its placeholders attend to each other in both directions."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
PARAGRAPH = "\n\n"


class Gemma3Placeholders:
    """Line breaks merge with those of the surrounding text, as in `transformers`."""

    marker = spelled = START
    reserved = (START, PLACE, END)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start = required_token(tokenizer, START)
        self._end = required_token(tokenizer, END)
        # The placeholder token has no row in the embedding of most files.
        place = tokenizer.id_of(PLACE)
        self._place = self._start if place is None else place

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        rows = PlaceholderRows(self._place, image.rows, whole=True)
        return PARAGRAPH, self._start, rows, self._end, PARAGRAPH
