"""LLaVA: the rows of the image and nothing around them."""

from collections.abc import Sequence

from model_zoo.multimodal.placeholders import Outlined, Piece, Rows
from model_zoo.tokenizers.tokenizer import Tokenizer

PLACE = "<image>"


class LlavaPlaceholders:
    """The family's templates break the line behind an image.

    The vocabularies of the authors' own checkpoints have no token for places. What stands in a
    place is never looked up, so there any token serves: the one that begins texts, else the first.
    """

    marker, spelled = PLACE, PLACE + "\n"
    reserved = (PLACE,)

    def __init__(self, tokenizer: Tokenizer) -> None:
        known = tokenizer.id_of(PLACE), tokenizer.bos_id, 0
        self._place = next(token for token in known if token is not None)

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        return (Rows(self._place, image.rows),)
