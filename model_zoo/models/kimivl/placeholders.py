"""Kimi-VL and Kimi K2.5: an image is a run of placeholders; templates write what is around them."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun, required_token
from model_zoo.tokenizers.tokenizer import Tokenizer

START, CONTENT, PLACE, END = (
    "<|media_start|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
SPELLED = f"{START}image{CONTENT}{PLACE}{END}"
TEXTS = ImageTexts(PLACE, SPELLED, (START, CONTENT, PLACE, END))
BEGIN = "<|media_begin|>"  # in the place of START in Kimi K2.5
K25_TEXTS = ImageTexts(PLACE, SPELLED.replace(START, BEGIN), (BEGIN, CONTENT, PLACE, END))


def kimivl_placeholders(tokenizer: Tokenizer, texts: ImageTexts = TEXTS) -> PlaceholderRun:
    return PlaceholderRun(texts, required_token(tokenizer, PLACE))
