"""Qwen 2.5-VL and Qwen 3-VL: a rectangle of placeholders with two-dimensional positions."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Placeholders of unsupported media, which users must not write either.
OTHERS = ("<|video_pad|>", "<|vision_pad|>")
TEXTS = ImageTexts(PLACE, START + PLACE + END, (START, PLACE, END, *OTHERS))


def qwen_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Chat templates write the start and end tokens."""
    _, place, _ = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, gridded=True)
