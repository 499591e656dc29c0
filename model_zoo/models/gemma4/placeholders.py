"""Gemma 4: an image is a begin token, placeholders and an end token."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|image>", "<|image|>", "<image|>"
# Placeholder and delimiter tokens of unsupported media, which users must not write either.
OTHERS = ("<|video|>", "<|audio>", "<|audio|>", "<audio|>")
TEXTS = ImageTexts(PLACE, PLACE, (START, PLACE, END, *OTHERS))


def gemma4_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Placeholders are computed in one step; the text model decides which layers are
    bidirectional."""
    start, place, end = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, (start,), (end,), whole=True)
