"""EXAONE 4.5: an image is one run of placeholders with consecutive positions, as in text."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<vision>", "<|image_pad|>", "</vision>"
# The placeholder of unsupported media, which users must not write, either.
OTHER = "<|video_pad|>"
TEXTS = ImageTexts(PLACE, START + PLACE + END, (START, PLACE, END, OTHER))


def exaone_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Chat templates write the start and end tokens."""
    _, place, _ = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place)
