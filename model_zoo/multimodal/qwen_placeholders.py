"""Qwen 2.5-VL and Qwen 3-VL: a rectangle of places, which text positions go around."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, Rows, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Places for what is not served, which nobody may write either.
OTHERS = ("<|video_pad|>", "<|vision_pad|>")


class QwenPlaceholders:
    """Templates write the beginning and the end themselves."""

    marker, spelled = PLACE, START + PLACE + END
    reserved = (START, PLACE, END, *OTHERS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        required_token(tokenizer, START)
        required_token(tokenizer, END)
        self._place = required_token(tokenizer, PLACE)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (Rows(self._place, image.rows, grid=image.grid),)
