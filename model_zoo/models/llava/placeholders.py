"""LLaVA: an image is a run of placeholders without delimiters."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, PlaceholderRows
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<image>"


class LlavaPlaceholders:
    """The family's templates put a line break after an image.

    The vocabularies of the authors' checkpoints have no placeholder token. Embeddings of
    placeholders are never used, so any token will do: BOS, or token 0 if there is no BOS.
    """

    marker, spelled = PLACE, PLACE + "\n"
    reserved = (PLACE,)

    def __init__(self, tokenizer: Tokenizer) -> None:
        known = tokenizer.id_of(PLACE), tokenizer.bos_id, 0
        self._place = next(token for token in known if token is not None)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (PlaceholderRows(self._place, image.rows),)
