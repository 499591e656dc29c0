"""The placeholders of an image in a prompt: text, tokens, and places for its feature rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model_zoo.chat.messages import ImageTexts
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class PlaceholderRows:
    """`length` copies of `token`, which stand for feature rows of the image from `first_row` on.

    The other fields are those of runtime.engine.request.ImageSpan.
    """

    token: int
    length: int
    first_row: int = 0
    whole: bool = False
    cross_rows: int = 0
    cross_padding: int = 0
    grid: tuple[int, int] | None = None


# Text is encoded together with adjacent text; an int is a token.
Piece = str | int | PlaceholderRows


class Outlined(Protocol):
    """The fields that PreparedImage and ImageOutline share."""

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def rows(self) -> int: ...


class Placeholders(Protocol):
    """How prompts of a family of models represent images. `pieces`: the replacement of the marker
    in a rendered prompt."""

    @property
    def texts(self) -> ImageTexts: ...

    def pieces(self, image: Outlined) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True)
class PlaceholderRun:
    """`Placeholders` that are one run of `token`, between the same pieces for every image.

    whole: as in `PlaceholderRows`. gridded: the run has the positions of a rectangle.
    """

    texts: ImageTexts
    token: int
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    whole: bool = False
    gridded: bool = False

    def pieces(self, image: Outlined) -> Sequence[Piece]:
        grid = image.grid if self.gridded else None
        rows = PlaceholderRows(self.token, image.rows, whole=self.whole, grid=grid)
        return *self.before, rows, *self.after


def required_token(tokenizer: Tokenizer, text: str) -> int:
    """The token with that text, of any type; ModelFileError if the vocabulary has none."""
    token = tokenizer.id_of(text)
    if token is None:
        raise ModelFileError(
            f"The vocabulary has no token `{text}`, which this family of models needs for images."
        )
    return token


def positions(pieces: Sequence[Piece]) -> int:
    """The number of tokens and placeholders in the pieces; text takes further tokens."""
    return sum(1 if isinstance(p, int) else p.length for p in pieces if not isinstance(p, str))
