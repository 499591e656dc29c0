"""Shapes of images whose area, but not whose sides, are limited."""

from collections.abc import Iterator
from math import isqrt


def rectangles(most: int) -> Iterator[tuple[int, int]]:
    """For each number of rows, from that of a square down to 1, (rows, columns) of the widest
    rectangle of at most `most` cells."""
    for rows in range(isqrt(most), 0, -1):
        yield rows, most // rows
