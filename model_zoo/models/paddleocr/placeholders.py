"""PaddleOCR-VL: a rectangle of placeholders with two-dimensional positions."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"
TEXTS = ImageTexts(PLACE, START + PLACE + END, (START, PLACE, END))


def paddle_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Chat templates write the start and end tokens."""
    _, place, _ = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, gridded=True)
