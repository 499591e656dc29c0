"""Shapes of images of which only the area is bounded."""

from collections.abc import Iterator
from math import isqrt


def rectangles(most: int) -> Iterator[tuple[int, int]]:
    """(rows, columns) of the largest rectangles with at most so many cells, one for each number of
    rows that is no more than that of columns; the one nearest to a square first."""
    for rows in range(isqrt(most), 0, -1):
        yield rows, most // rows
