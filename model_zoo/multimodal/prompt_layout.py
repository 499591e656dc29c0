"""Assembles a prompt's tokens and image spans from texts and the images between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from model_zoo.chat.unforged import Unforged
from model_zoo.multimodal.placeholders import Piece, PlaceholderRows
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.request import ImageSpan


@dataclass(frozen=True, slots=True)
class ImagePieces:
    """The placeholders of one image."""

    pieces: Sequence[Piece]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...]


def lay_out(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    shown: Sequence[ImagePieces],
    *,
    sentinel: str = "",
    bos: bool = True,
) -> Layout:
    """The tokens of `texts` with an image between each two; there is one more text than images.

    There is at most one BOS; `bos` False adds none. Adjacent texts, including those of
    placeholders, are encoded as one. `sentinel` is removed first, as in `encode_chat`.
    """
    assert len(texts) == len(shown) + 1
    parts: list[str | int] = []
    rows: list[tuple[PlaceholderRows, bytes]] = []
    run = texts[0]
    for image, text in zip(shown, texts[1:], strict=True):
        for piece in image.pieces:
            if isinstance(piece, str):
                run += piece
                continue
            parts += Unforged(run, sentinel).cut(tokenizer)
            run = ""
            if isinstance(piece, PlaceholderRows):
                rows.append((piece, image.digest))
                piece = -len(rows)  # negative, so that it is no token id
            parts.append(piece)
        run += text
    parts += Unforged(run, sentinel).cut(tokenizer)
    encoded = tokenizer.encode_parts(parts)
    return _filled(tokenizer.with_bos(encoded) if bos else encoded, rows)


def _filled(encoded: Sequence[int], rows: Sequence[tuple[PlaceholderRows, bytes]]) -> Layout:
    """Replaces -n by the tokens of the n-th entry of `rows`."""
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


def _span(start: int, rows: PlaceholderRows, digest: bytes) -> ImageSpan:
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
