"""Image rows of a step: the embeddings that they replace, and their positions by axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engine.request import ImageSpan
from runtime.engine.step_plan import Chunk
from runtime.kv.spec import images_within
from runtime.worker.model import RowSpan

AXES = 3  # time, row, column


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


def axes_shift(images: Sequence[ImageSpan]) -> int:
    """What is added to the positions after all images on each axis."""
    return sum(max(image.grid) - image.length for image in images if image.grid is not None)


def axes_of(images: Sequence[ImageSpan], start: int, end: int) -> NDArray[np.int32]:
    """Time, row and column [3, end - start] of the positions [start, end) of a sequence.

    Text advances in all three. An image with a grid has one time and spreads over rows and columns;
    the text after it starts behind the longer side (Bai et al., "Qwen2.5-VL Technical Report",
    section 2.1.2).
    """
    found = np.tile(np.arange(start, end, dtype=np.int32), (AXES, 1))
    shift = 0
    for image in images:
        if image.grid is None or image.start >= end:
            continue
        rows, columns = image.grid
        assert rows * columns == image.length, "the grid is not the image's"
        inside = np.arange(max(image.start, start), min(image.end, end), dtype=np.int32)
        if len(inside):
            offsets = inside - image.start
            part = found[:, inside[0] - start : inside[-1] + 1 - start]
            part[:] = image.start + shift
            part[1] += offsets // columns
            part[2] += offsets % columns
        saved = image.length - max(rows, columns)
        shift -= saved
        found[:, max(image.end - start, 0) :] -= saved
    return found
