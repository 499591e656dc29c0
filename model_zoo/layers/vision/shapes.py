"""Shapes of images of which only the area is bounded."""

from math import isqrt


def nearest_square(most: int) -> tuple[int, int]:
    """Sides of a rectangle of as many rows as possible, `most` at most, and near a square."""
    root = isqrt(most)
    sides = range(root, max(root // 2, 1) - 1, -1)
    best = max(sides, key=lambda side: side * (most // side))
    return best, most // best
