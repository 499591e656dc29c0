"""GLM-4.1V and later, and GLM-OCR: a rectangle of placeholders with two-dimensional positions."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
# Placeholders of unsupported media, which users must not write either.
OTHERS = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")
TEXTS = ImageTexts(PLACE, START + PLACE + END, (START, PLACE, END, *OTHERS))


def glm_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Chat templates write the start and end tokens."""
    _, place, _ = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, gridded=True)
