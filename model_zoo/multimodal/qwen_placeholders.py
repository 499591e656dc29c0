"""Qwen 2.5-VL and Qwen 3-VL: a rectangle of placeholders with two-dimensional positions."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Placeholders of unsupported media, which users must not write either.
OTHERS = ("<|video_pad|>", "<|vision_pad|>")


class QwenPlaceholders:
    """Chat templates write the start and end tokens."""

    marker, spelled = PLACE, START + PLACE + END
    reserved = (START, PLACE, END, *OTHERS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        required_token(tokenizer, START)
        required_token(tokenizer, END)
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (PlaceholderRows(self._place, image.rows, grid=image.grid),)
