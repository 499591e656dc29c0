"""MiniMax M3: an image is one run of placeholders with consecutive positions, as in text."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "]<]start of image[>[", "]<]image[>[", "]<]end of image[>["
# The placeholder of unsupported media, which users must not write, either.
OTHER = "]<]video[>["
TEXTS = ImageTexts(PLACE, PLACE, (START, PLACE, END, OTHER))


def minimax_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Chat templates write the placeholder alone."""
    start, place, end = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, (start,), (end,))
