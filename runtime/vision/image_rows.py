"""Image rows of a step: the embeddings that they replace, and their positions by axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engine.request import ImageSpan
from runtime.engine.step_plan import Chunk
from runtime.kv.cache_kinds import images_within
from runtime.worker.model import RowSpan

# Numbers of axes: time, row and column; or token, column, row and image.
BY_TIME, BY_IMAGE = 3, 4
MOST_AXES = BY_IMAGE


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The rows [begin, end) of the features of image `digest`."""

    digest: bytes
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Insertions:
    """The rows of a batch whose embeddings are replaced, and the feature rows that replace them, in
    the same order."""

    rows: tuple[int, ...]
    parts: tuple[FeatureRows, ...]


def plan_insertions(chunks: Sequence[Chunk], spans: Sequence[RowSpan]) -> Insertions:
    """`spans`: the rows of each chunk, which may contain a part of an image."""
    rows: list[int] = []
    parts: list[FeatureRows] = []
    for chunk, span in zip(chunks, spans, strict=True):
        stop = chunk.start + chunk.length
        for image in images_within(chunk.sequence.inserted, chunk.start, stop):
            start, end = max(image.start, chunk.start), min(image.end, stop)
            before, first = span.begin - chunk.start, image.first_row - image.start
            rows += range(before + start, before + end)
            parts.append(FeatureRows(image.digest, first + start, first + end))
    return Insertions(tuple(rows), tuple(parts))


def axes_shift(images: Sequence[ImageSpan], axes: int) -> int:
    """What is added to the positions after all images on each axis."""
    if axes == BY_IMAGE:
        return 0
    return sum(max(image.grid) - image.length for image in images if image.grid is not None)


def axes_of(images: Sequence[ImageSpan], start: int, end: int, axes: int) -> NDArray[np.int32]:
    """The places [axes, end - start] of the positions [start, end) of a sequence. Text advances on
    all axes."""
    return (_by_image if axes == BY_IMAGE else _by_time)(images, start, end)


def _by_image(images: Sequence[ImageSpan], start: int, end: int) -> NDArray[np.int32]:
    """Token, column, row and image. Images with a grid count from 0, as do their columns and rows;
    tokens do so regardless of images (`get_rope_index` of `hunyuan_vl` in transformers)."""
    found = np.tile(np.arange(start, end, dtype=np.int32), (BY_IMAGE, 1))
    shaped = (image for image in images if image.grid is not None)
    for number, image in enumerate(shaped):
        inside, part = _inside(image, found, start, end)
        if len(inside):
            row, column = np.divmod(inside - image.start, _columns(image))
            part[1:] = column, row, np.full_like(row, number)
    return found


def _by_time(images: Sequence[ImageSpan], start: int, end: int) -> NDArray[np.int32]:
    """Time, row and column. An image with a grid has one time and spreads over rows and columns;
    the text after it starts behind the longer side (Bai et al., "Qwen2.5-VL Technical Report",
    section 2.1.2)."""
    found = np.tile(np.arange(start, end, dtype=np.int32), (BY_TIME, 1))
    shift = 0
    for image in images:
        if image.grid is None or image.start >= end:
            continue
        inside, part = _inside(image, found, start, end)
        if len(inside):
            row, column = np.divmod(inside - image.start, _columns(image))
            part[:] = image.start + shift
            part[1:] += row, column
        saved = image.length - max(image.grid)
        shift -= saved
        found[:, max(image.end - start, 0) :] -= saved
    return found


def _inside(
    image: ImageSpan, found: NDArray[np.int32], start: int, end: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The positions of the image in [start, end), and their part of `found`."""
    first, last = max(image.start, start), min(image.end, end)
    inside = np.arange(first, last, dtype=np.int32)
    return inside, found[:, first - start : max(last, first) - start]


def _columns(image: ImageSpan) -> int:
    assert image.grid is not None
    rows, columns = image.grid
    assert rows * columns == image.length, "the grid is not the image's"
    return columns
