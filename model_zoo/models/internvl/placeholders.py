"""InternVL: an image is a begin token, the placeholders of all tiles and an end token."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<img>", "<IMG_CONTEXT>", "</img>"
# The placeholder token of unsupported media, which users must not write either.
OTHER = "<video>"


class InternVLPlaceholders:
    """The family's templates put a line break after an image."""

    marker, spelled = PLACE, PLACE + "\n"
    reserved = (START, PLACE, END, OTHER)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._place, self._end = (
            required_token(tokenizer, text) for text in (START, PLACE, END)
        )

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return self._start, PlaceholderRows(self._place, image.rows), self._end
