"""From texts and the images between them to a prompt's tokens, and where in it the images are."""

from collections.abc import Sequence
from dataclasses import dataclass

from model_zoo.chat.messages import Unforged
from model_zoo.multimodal.placeholders import Piece, Rows
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.request import ImageSpan


@dataclass(frozen=True, slots=True)
class Shown:
    """What a prompt has for one image."""

    pieces: Sequence[Piece]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...]


def lay_out(
    tokenizer: Tokenizer, texts: Sequence[str], shown: Sequence[Shown], *, sentinel: str = ""
) -> Layout:
    """`texts`, one more than images, with an image between each and the next; one BOS at most.

    Text runs are encoded whole, the text that an image brings with its neighbours. `sentinel`
    leaves before, as in `encode_chat`.
    """
    assert len(texts) == len(shown) + 1
    parts: list[str | int] = []
    rows: list[tuple[Rows, bytes]] = []
    run = texts[0]
    for image, text in zip(shown, texts[1:], strict=True):
        for piece in image.pieces:
            if isinstance(piece, str):
                run += piece
                continue
            parts += Unforged(run, sentinel).cut(tokenizer)
            run = ""
            if isinstance(piece, Rows):
                rows.append((piece, image.digest))
                piece = -len(rows)  # no token has such a number
            parts.append(piece)
        run += text
    parts += Unforged(run, sentinel).cut(tokenizer)
    return _filled(tokenizer.with_bos(tokenizer.encode_parts(parts)), rows)


def _filled(encoded: Sequence[int], rows: Sequence[tuple[Rows, bytes]]) -> Layout:
    """With the tokens of the n-th rows in place of -n."""
    tokens: list[int] = []
    spans: list[ImageSpan] = []
    for token in encoded:
        if token >= 0:
            tokens.append(token)
            continue
        filled, digest = rows[-token - 1]
        spans.append(_span(len(tokens), filled, digest))
        tokens += [filled.token] * filled.length
    return Layout(tuple(tokens), tuple(spans))


def _span(start: int, rows: Rows, digest: bytes) -> ImageSpan:
    return ImageSpan(
        start,
        rows.length,
        rows.whole,
        digest,
        cross_rows=rows.cross_rows,
        cross_padding=rows.cross_padding,
        first_row=rows.first_row,
        grid=rows.grid,
    )
