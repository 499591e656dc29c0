"""Gemma 4: the rows of the image between a beginning and an end."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, Rows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|image>", "<|image|>", "<image|>"
# Places and bounds for what is not served, which nobody may write either.
OTHERS = ("<|video|>", "<|audio>", "<|audio|>", "<audio|>")


class Gemma4Placeholders:
    """Places are computed together; in which layers they see each other is the text model's."""

    marker = spelled = PLACE
    reserved = (START, PLACE, END, *OTHERS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start, self._place, self._end = (
            required_token(tokenizer, text) for text in (START, PLACE, END)
        )

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return self._start, Rows(self._place, image.rows, whole=True), self._end
