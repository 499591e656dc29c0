"""Items of a picture, found in its pixels alone."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tools.demo_pictures import COLOURS, Picture, draw

DARKEST_CHANGE = 60  # of three channels together; less is noise cut off at black or white


@dataclass(frozen=True)
class Blob:
    """A connected patch that is not background: its nearest colour, its ninth, its outline."""

    colour: str
    place: int
    shape: str


def blobs(picture: Picture, size: int) -> list[Blob]:
    """The blobs, in reading order of their ninths."""
    pixels = _pixels(picture, size)
    found = [_described(pixels, patch) for patch in _patches(_inked(picture, pixels))]
    return sorted(found, key=lambda blob: blob.place)


def inked(picture: Picture, size: int) -> NDArray[np.bool_]:
    """[size, size]: where the picture differs from its background."""
    return _inked(picture, _pixels(picture, size))


def _inked(picture: Picture, pixels: NDArray[np.int16]) -> NDArray[np.bool_]:
    empty = _pixels(replace(picture, items=()), len(pixels))
    return np.abs(pixels - empty).sum(axis=-1) > DARKEST_CHANGE


def _pixels(picture: Picture, size: int) -> NDArray[np.int16]:
    """[size, size, 3]"""
    return np.asarray(draw(picture, size)).astype(np.int16)


def _patches(mask: NDArray[np.bool_]) -> list[NDArray[np.int_]]:
    """Each [pixels, 2], row and column; small specks are ignored."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    patches = []
    while left:
        patch = [left.pop()]
        for y, x in patch:
            near = {(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & left
            left -= near
            patch += near
        if len(patch) > 20:
            patches.append(np.array(patch))
    return patches


def _described(pixels: NDArray[np.int16], patch: NDArray[np.int_]) -> Blob:
    colour = np.median(pixels[patch[:, 0], patch[:, 1]], axis=0)
    name = min(COLOURS, key=lambda each: math.dist(COLOURS[each], colour))
    row, column = (int(3 * middle / len(pixels)) for middle in patch.mean(axis=0))
    return Blob(name, 3 * row + column, _outline(patch))


def _outline(patch: NDArray[np.int_]) -> str:
    """From the periods of the distance to the centre: three for a triangle, five for a star."""
    y, x = (patch - patch.mean(axis=0)).T
    sector = (np.arctan2(y, x) / (2 * np.pi) * 48 % 48).astype(int)
    reach = np.array([np.hypot(x, y)[sector == each].max(initial=0) for each in range(48)])
    waves = np.abs(np.fft.fft(reach))[:7] / reach.sum()
    strong = {int(each) for each in np.flatnonzero(waves > 0.045) if each}
    if strong == {4}:
        return "cross" if waves[4] > 0.11 else "square"
    kinds = {
        (): "circle",
        (3,): "triangle",
        (3, 6): "triangle",
        (5,): "star",
        (2, 3): "heart",
        (2, 4): "diamond",
    }
    return kinds.get(tuple(sorted(strong)), f"waves {sorted(strong)}")
