"""Run-length encoded BMP files decode to the same pixels as with Pillow's decoder."""

import random
from io import BytesIO

import numpy as np
import pytest
from PIL import BmpImagePlugin, Image

from model_zoo.images.decode import DecodingLimits, decode
from runtime.errors import RequestError
from tests.unit.model_zoo.images.image_files import bmp_of

PALETTE = bytes(range(64))
RLE8, RLE4 = 1, 2


def reference(data: bytes) -> np.ndarray | None:
    """None if Pillow finds too few pixels."""
    try:
        return np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    except ValueError:
        return None


def ours(data: bytes) -> np.ndarray | None:
    try:
        return decode(data, DecodingLimits())
    except RequestError:
        return None


def runs(draw: random.Random, width: int, height: int, nibbles: bool) -> bytes:
    """Random rows of runs, literals, line ends and jumps; some are too long or too short."""
    found = bytearray()
    for _ in range(height + draw.choice([-2, 0, 0, 0, 2])):
        for _ in range(draw.randrange(1, 5)):
            kind, count = draw.random(), draw.randrange(1, width + 2)
            if kind < 0.6:
                found += bytes([count, draw.randrange(256)])
            elif kind < 0.9:
                count = max(3, count)
                literal = draw.randbytes((count + 1) // 2 if nibbles else count)
                found += bytes([0, count]) + literal + b"\0" * (len(literal) % 2)
            else:
                found += bytes([0, 2, draw.randrange(3), draw.randrange(2)])
        found += b"\0\0"
    if draw.random() < 0.8:
        found += b"\0\1"
    return bytes(found)


@pytest.mark.parametrize("compression", [RLE8, RLE4])
def test_pixels_match_pillow_for_random_runs(compression):
    draw = random.Random(compression)
    outcomes = set()
    for _ in range(1500):
        width, height = draw.randrange(1, 12), draw.randrange(1, 8)
        body = runs(draw, width, height, compression == RLE4)
        if draw.random() < 0.3:
            body = body[: draw.randrange(len(body) + 1)]
        bits = 8 if compression == RLE8 else 4
        data = bmp_of(body, width, height, bits=bits, compression=compression, palette=PALETTE)
        wanted, found = reference(data), ours(data)
        outcomes.add(wanted is None)
        assert (wanted is None) == (found is None), data
        assert wanted is None or np.array_equal(wanted, found), data
    assert outcomes == {True, False}


def test_literal_runs_are_aligned_to_the_file():
    """The palette decides whether data begin at an odd offset."""
    body = bytes([0, 3, 1, 2, 3, 0, 1, 4, 0, 0, 0, 1])
    for padding in (b"", b"x"):
        data = bytearray(bmp_of(padding + body, 4, 1, bits=8, compression=RLE8, palette=PALETTE))
        data[10:14] = (14 + 40 + len(PALETTE) + len(padding)).to_bytes(4, "little")
        wanted = reference(bytes(data))
        found = ours(bytes(data))
        assert (wanted is None) == (found is None)
        assert wanted is None or np.array_equal(wanted, found)


def test_pillow_s_python_decoder_is_not_used(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("Pillow's decoder appends each pixel")

    monkeypatch.setattr(BmpImagePlugin.BmpRleDecoder, "decode", refuse)
    row = bytes([255, 0x12] * 8 + [8, 0x12, 0, 0])
    data = bmp_of(row * 2048 + b"\0\1", 2048, 2048, bits=4, compression=RLE4, palette=PALETTE)
    assert decode(data, DecodingLimits()).shape == (2048, 2048, 3)
