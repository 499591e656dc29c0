"""Kimi-VL: an image is a run of placeholders; its template writes what is around them."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, CONTENT, PLACE, END = (
    "<|media_start|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)


class KimiVLPlaceholders:
    """The placeholder is replaced by one for each row of features."""

    marker, spelled = PLACE, f"{START}image{CONTENT}{PLACE}{END}"
    reserved = (START, CONTENT, PLACE, END)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (PlaceholderRows(self._place, image.rows),)
