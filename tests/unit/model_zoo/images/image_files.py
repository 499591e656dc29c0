"""Image files for tests, including kinds that Pillow reads but does not write."""

import struct
import zlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2)]
ADAM7 += [(1, 0, 2, 1)]  # first row, first column, row step, column step


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_header(width: int, height: int, *, depth: int, colour: int, interlaced: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))


def png_of(
    samples: np.ndarray, colour: int, *, interlaced: bool = False, extra: Iterable[bytes] = ()
) -> bytes:
    """samples [height, width, channels] of 8 or 16 bits -> a file with `extra` before its data."""
    height, width, _ = samples.shape
    passes = ADAM7 if interlaced else [(0, 0, 1, 1)]
    rows = [
        b"\0" + row.astype(samples.dtype.newbyteorder(">")).tobytes()
        for top, left, down, right in passes
        for row in samples[top::down, left::right]
        if row.size
    ]
    depth = samples.dtype.itemsize * 8
    header = png_header(width, height, depth=depth, colour=colour, interlaced=int(interlaced))
    data = chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"".join([PNG_MAGIC, header, *extra, data, chunk(b"IEND", b"")])


def bmp_of(
    body: bytes,
    width: int,
    height: int,
    *,
    bits: int,
    compression: int = 0,
    masks: tuple[int, ...] = (),
    palette: bytes = b"",
) -> bytes:
    """A file with a BITMAPINFOHEADER; with a negative height, rows begin at the top."""
    tail = struct.pack(f"<{len(masks)}I", *masks) + palette
    offset = 14 + 40 + len(tail)
    header = struct.pack("<2sIII", b"BM", offset + len(body), 0, offset)
    colours = len(palette) // 4
    info = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(body), 0, 0, colours, 0
    )
    return header + info + tail + body


def gif_of(frames: list[bytes], *, width: int, height: int, palette: bytes = bytes(6)) -> bytes:
    """A file with a palette of two colours for all frames."""
    return (
        struct.pack("<6sHHBBB", b"GIF89a", width, height, 0x80, 0, 0)
        + palette
        + b"".join([*frames, b";"])
    )


def gif_frame(*, left: int = 0, top: int = 0, width: int = 1, height: int = 1) -> bytes:
    """A frame of zeros; its data have one pixel whatever size it states."""
    place = struct.pack("<BHHHHB", 0x2C, left, top, width, height, 0)
    return place + b"\x02\x02\x44\x01\x00"
