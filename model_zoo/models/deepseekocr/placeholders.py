"""DeepSeek-OCR: an image is a run of placeholders without delimiters."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<image>"
# Asks for places in the image, which answers write between the others.
GROUNDING = "<|grounding|>"
MARKS = (GROUNDING, "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>")
# In the authors' prompts, a line break follows an image.
TEXTS = ImageTexts(PLACE, PLACE + "\n", (PLACE,), writable=MARKS)


def deepseekocr_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    return PlaceholderRun(TEXTS, required_token(tokenizer, PLACE))
