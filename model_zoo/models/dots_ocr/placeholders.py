"""dots.ocr: an image is one run of placeholders with consecutive positions, as in text."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<|img|>", "<|imgpad|>", "<|endofimg|>"
TEXTS = ImageTexts(PLACE, START + PLACE + END, (START, PLACE, END))


def dots_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Chat templates write the start and end tokens."""
    _, place, _ = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place)
