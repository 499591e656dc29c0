"""Shapes of images for which only the area is bounded."""

from collections.abc import Iterator
from math import isqrt


def rectangles(most: int) -> Iterator[tuple[int, int]]:
    """(rows, columns) of the widest rectangle of at most `most` cells for each number of rows, from
    the nearest to a square down to one row."""
    for rows in range(isqrt(most), 0, -1):
        yield rows, most // rows
