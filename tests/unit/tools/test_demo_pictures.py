"""The pixels of drawn pictures agree with their facts."""

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.unit.tools.pixel_blobs import blobs, inked
from tools.demo_pictures import COLOURS, PLACES, SHAPES, draw, invent, is_reserved


@pytest.mark.parametrize("held", [False, True])
def test_pixels_show_every_item_once_in_its_colour_and_place(held):
    for seed in range(60):
        picture = invent(Random(seed), held=held)
        seen = [(blob.colour, blob.place) for blob in blobs(picture, 96)]
        assert seen == [(item.colour, item.place) for item in picture.items], picture


def test_pixels_show_the_outline_of_the_shape():
    seen = set()
    for seed in range(40):
        picture = invent(Random(seed), held=False, shapes=1)
        assert [blob.shape for blob in blobs(picture, 224)] == [picture.items[0].shape], picture
        seen.add(picture.items[0].shape)
    assert seen == set(SHAPES)


def test_pixels_show_the_digits_of_the_number():
    for seed in range(20):
        picture = invent(Random(seed), held=False, shapes=0, number=True)
        straight = replace(picture.items[0], turn=0.0, font="plain")
        picture = replace(picture, items=(straight,))
        rows, columns = (np.flatnonzero(inked(picture, 224).any(axis=axis)) for axis in (1, 0))
        ink = inked(picture, 224)[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        least = min(range(100), key=lambda number: _unlike(ink, str(number)))
        assert str(least) == straight.shape


def _unlike(ink, digits):
    """The share of pixels that differ from the digits that Pillow draws in that box."""
    glyphs = _glyphs(digits)
    shape = abs(glyphs.width / glyphs.height - ink.shape[1] / ink.shape[0])
    return np.mean((np.asarray(glyphs.resize(ink.shape[::-1])) > 127) != ink) + shape


@cache
def _glyphs(digits):
    canvas = Image.new("L", (300, 150))
    face = ImageFont.load_default(64)
    ImageDraw.Draw(canvas).text((20, 20), digits, fill=255, font=face, stroke_width=1)
    return canvas.crop(canvas.getbbox())


def test_nothing_is_cut_off_at_the_border():
    for seed in range(60):
        ink = inked(invent(Random(seed), held=False, number=seed % 3 == 0), 96)
        assert ink.any()
        assert not (ink[0].any() or ink[-1].any() or ink[:, 0].any() or ink[:, -1].any()), seed


def test_equal_seeds_draw_equal_pixels_and_others_do_not():
    first, again, other = (invent(Random(seed), held=False) for seed in (5, 5, 6))
    assert draw(first, 112).tobytes() == draw(again, 112).tobytes()
    assert draw(first, 112).tobytes() != draw(other, 112).tobytes()
    assert draw(first, 112).size == (112, 112)
    assert draw(first, 112).mode == "RGB"


def test_no_item_is_in_pictures_of_both_splits():
    shown = {
        held: {
            item.facts
            for seed in range(1500)
            for item in invent(Random(seed), held=held, number=seed % 4 == 0).items
        }
        for held in (False, True)
    }
    assert len(shown[False]) > 300
    assert len(shown[True]) > 100
    assert not shown[False] & shown[True]


def test_every_colour_shape_and_place_is_in_both_splits():
    combinations = [
        (colour, shape, place)
        for colour in COLOURS
        for shape in SHAPES
        for place in range(len(PLACES))
    ]
    reserved = [facts for facts in combinations if is_reserved(*facts)]
    assert 0.1 < len(reserved) / len(combinations) < 0.2
    for split in (reserved, [facts for facts in combinations if facts not in reserved]):
        assert {colour for colour, _, _ in split} == set(COLOURS)
        assert {shape for _, shape, _ in split} == set(SHAPES)
        assert {place for _, _, place in split} == set(range(len(PLACES)))


def test_a_picture_has_as_many_items_as_asked():
    for shapes in range(1, 6):
        for number in (False, True):
            picture = invent(Random(shapes), held=True, shapes=shapes, number=number)
            assert len(picture.shapes) == shapes
            assert (picture.number is not None) == number
            places = [item.place for item in picture.items]
            assert places == sorted(set(places))
