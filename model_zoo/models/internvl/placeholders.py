"""InternVL: an image is a begin token, the placeholders of all tiles and an end token."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<img>", "<IMG_CONTEXT>", "</img>"
# The placeholder token of unsupported media, which users must not write either.
OTHER = "<video>"
# The family's templates put a line break after an image.
TEXTS = ImageTexts(PLACE, PLACE + "\n", (START, PLACE, END, OTHER))


def internvl_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    start, place, end = (required_token(tokenizer, text) for text in (START, PLACE, END))
    return PlaceholderRun(TEXTS, place, (start,), (end,))
