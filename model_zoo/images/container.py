"""The structure of an image file, read before anything in it is decompressed.

Pillow decodes the pixels. PNG, JPEG, GIF and WebP files are scanned here first, because Pillow's
readers have no limits: opening a WebP file allocates canvases of the stated size, opening a PNG
file decompresses its profiles and texts, the frames of a GIF file are counted by reading each of
them, and the number of parts of a file is not limited.
"""

import struct
from dataclasses import dataclass

from runtime.errors import RequestError

MAX_PARTS = 300_000  # chunks, blocks or segments of a file; each costs an iteration in Python


@dataclass(frozen=True, slots=True)
class Container:
    """Structure and metadata of an image file.

    `data`: the parts of the file that decoding the first frame needs; `width`, `height`: its size
    in pixels. `exif`, `xmp`: metadata that may state the orientation. `least_bytes`: a lower bound
    of the compressed data for that size; 0 if unknown.
    """

    format: str
    width: int
    height: int
    data: bytes
    compressed_bytes: int
    exif: bytes = b""
    xmp: bytes = b""
    least_bytes: int = 0


def truncated(kind: str) -> RequestError:
    return RequestError(f"The {kind} image is truncated; send the whole file.")


def damaged(kind: str, how: str) -> RequestError:
    return RequestError(f"The {kind} image is damaged: {how}; send a sound file.")


def undecodable(kind: str, error: Exception) -> RequestError:
    """The error for an exception of Pillow's decoders."""
    if "truncated" in str(error).lower():
        return truncated(kind)
    return damaged(kind, "it cannot be decoded")


def numbers(layout: str, data: bytes, offset: int, kind: str) -> tuple[int, ...]:
    """`struct.unpack_from`; raises RequestError if the data end too early."""
    if offset + struct.calcsize(layout) > len(data):
        raise truncated(kind)
    return struct.unpack_from(layout, data, offset)


class PartCounter:
    """Counts the parts of a file; raises RequestError beyond `MAX_PARTS`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._seen = 0

    def count(self) -> None:
        self._seen += 1
        if self._seen > MAX_PARTS:
            raise RequestError(
                f"The {self._kind} image has more than {MAX_PARTS:,} parts; save it again."
            )
