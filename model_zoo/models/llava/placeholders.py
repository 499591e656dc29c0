"""LLaVA: an image is a run of placeholders without delimiters."""

from model_zoo.chat.messages import ImageTexts
from model_zoo.multimodal.placeholders import PlaceholderRun
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<image>"
# The family's templates put a line break after an image.
TEXTS = ImageTexts(PLACE, PLACE + "\n", (PLACE,))


def llava_placeholders(tokenizer: Tokenizer) -> PlaceholderRun:
    """The vocabularies of the authors' checkpoints have no placeholder token. Embeddings of
    placeholders are never used, so any token will do: BOS, or token 0 if there is no BOS."""
    known = tokenizer.id_of(PLACE), tokenizer.bos_id, 0
    return PlaceholderRun(TEXTS, next(token for token in known if token is not None))
