"""What stands in a prompt where an image is: text, tokens, and places for rows of its features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Rows:
    """`length` times the same token, for as many rows of the image's features from `first_row` on.

    The other fields are those of runtime.engine.request.ImageSpan.
    """

    token: int
    length: int
    first_row: int = 0
    whole: bool = False
    cross_rows: int = 0
    cross_padding: int = 0
    grid: tuple[int, int] | None = None


# Text is encoded together with what stands around it; a token is by itself.
Piece = str | int | Rows


class Outlined(Protocol):
    """What is known of an image: when it is prepared, and of its Outline before."""

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def rows(self) -> int: ...


class Placeholders(Protocol):
    """How a family of models is shown where an image stands.

    `marker`: what its chat templates write in the image's place. `spelled`: the same with all that
    they write around it, for templates that know of no images. `reserved`: texts that stand for
    something here, so that nobody's ordinary text may hold them. `pieces`: what takes the marker's
    place.
    """

    @property
    def marker(self) -> str: ...

    @property
    def spelled(self) -> str: ...

    @property
    def reserved(self) -> tuple[str, ...]: ...

    def pieces(self, image: Outlined) -> Sequence[Piece]: ...


def required_token(tokenizer: Tokenizer, text: str) -> int:
    """The token of that text, of whatever type; ModelFileError where there is none."""
    token = tokenizer.id_of(text)
    if token is None:
        raise ModelFileError(
            f"The vocabulary has no token `{text}`, with which this family of models marks images."
        )
    return token


def positions(pieces: Sequence[Piece]) -> int:
    """How many places of a prompt they take at least; text may take more."""
    return sum(1 if isinstance(p, int) else p.length for p in pieces if not isinstance(p, str))
