"""LLaVA and Moondream: an image is a run of placeholders without delimiters."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<image>"
# The family's templates put a line break after an image.
TEXTS = ImageTexts(PLACE, PLACE + "\n", (PLACE,))
# In the prompts of Moondream's authors, an empty line follows.
MOONDREAM_TEXTS = ImageTexts(PLACE, PLACE + "\n\n", (PLACE,))


def llava_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    return _run(TEXTS, tokenizer)


def moondream_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    return _run(MOONDREAM_TEXTS, tokenizer)


def _run(texts: ImageTexts, tokenizer: Tokenizer) -> PlaceholderRun:
    """The vocabularies of the authors' checkpoints have no placeholder token. Embeddings of
    placeholders are never used, so any token will do: BOS, or token 0 if there is no BOS."""
    known = tokenizer.id_of(PLACE), tokenizer.bos_id, 0
    return PlaceholderRun(texts, next(token for token in known if token is not None))
