"""Gemma 3: an image is a paragraph; its placeholders attend to each other in both directions."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, PLACE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEXTS = ImageTexts(START, START, (START, PLACE, END))
PARAGRAPH = "\n\n"


def gemma3_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """Line breaks merge with those of the surrounding text, as in `transformers`."""
    start, end = (required_token(tokenizer, text) for text in (START, END))
    # The placeholder token has no row in the embedding of most files.
    place = tokenizer.id_of(PLACE)
    token, before, after = start if place is None else place, (PARAGRAPH, start), (end, PARAGRAPH)
    return PlaceholderRun(TEXTS, token, before, after, whole=True)
