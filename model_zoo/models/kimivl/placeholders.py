"""Kimi-VL: an image is a run of placeholders; its template writes what is around them."""

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


def kimivl_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    return PlaceholderRun(TEXTS, required_token(tokenizer, PLACE))
