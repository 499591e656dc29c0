"""Muse Glimmer: an image is a run of placeholders between two tokens."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|image_start|>", "<|patch|>", "<|image_end|>"
TEXTS = ImageTexts(PLACE, PLACE, (START, PLACE, END))


def muse_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    start, place, end = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, (start,), (end,))
