"""What an image file says of itself before anything in it is decompressed."""

import struct
from dataclasses import dataclass

from runtime.errors import RequestError

MAX_PARTS = 300_000  # chunks, blocks or segments of one file: each is a step of a Python loop


@dataclass(frozen=True, slots=True)
class Container:
    """The outside of an image file.

    `data` is what the decoder of `format` needs for the first frame, of `width` x `height` pixels,
    and little else. `frames`: how many there are. `exif`, `xmp`: where the orientation may be.
    `least_bytes`: compressed data for so many pixels cannot be shorter; 0: not known.
    """

    format: str
    width: int
    height: int
    data: bytes
    compressed_bytes: int
    frames: int = 1
    exif: bytes = b""
    xmp: bytes = b""
    least_bytes: int = 0


def truncated(kind: str) -> RequestError:
    return RequestError(f"The {kind} image is truncated; send the whole file.")


def damaged(kind: str, how: str) -> RequestError:
    return RequestError(f"The {kind} image is damaged: {how}; send a sound file.")


def numbers(layout: str, data: bytes, offset: int, kind: str) -> tuple[int, ...]:
    """`struct.unpack_from`, where data that end too early are the request's fault."""
    if offset + struct.calcsize(layout) > len(data):
        raise truncated(kind)
    return struct.unpack_from(layout, data, offset)


class Parts:
    """Counts the parts of a file, so that no file is taken apart for minutes."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._seen = 0

    def count(self) -> None:
        self._seen += 1
        if self._seen > MAX_PARTS:
            raise RequestError(
                f"The {self._kind} image has more than {MAX_PARTS:,} parts; save it again."
            )
