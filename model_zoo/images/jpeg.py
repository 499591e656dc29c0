"""JPEG: the segments that decoding needs, the size, the number of scans.

Reference: ITU-T T.81; application segments as Exif 2.3 and XMP part 3 use them.
"""

import re

from model_zoo.images.container import Container, PartCounter, damaged, numbers, truncated
from runtime.errors import RequestError

MAGIC = b"\xff\xd8\xff"
KIND = "JPEG"
EXIF, XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
STANDALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a segment
FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
HUFFMAN_CODED = {0xC0, 0xC1, 0xC2}
# JFIF and Adobe's segment state the colour coding; the others hold profiles and metadata.
UNNEEDED = (set(range(0xE1, 0xF0)) - {0xEE}) | {0xFE}
MAX_SCANS = 200  # each scan costs a pass over all pixels; progressive files have about ten
# A marker that ends coded data; bytes FF 00 and restart markers belong to the data.
ENDS_DATA = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
SEARCHED_BYTES = 2**16  # in one search, during which other threads wait
FIRST_SEGMENT = 0xC0  # decoders ignore markers below it in scans


def read(data: bytes) -> Container:
    """Leaves out profiles, thumbnails, comments, and what follows the image: further images, videos
    of cameras. Raises RequestError."""
    kept, exif, xmp = [data[:2]], list[bytes](), b""
    frame: tuple[int, int, int] | None = None  # marker, height, width
    parts, offset = PartCounter(KIND), 2
    while True:
        marker, offset = _next_marker(data, offset, parts)
        if marker in STANDALONE:
            continue
        if marker == END_OF_IMAGE:
            raise truncated(KIND)
        if marker == START_OF_SCAN:
            break
        (length,) = numbers(">H", data, offset, KIND)
        end = offset + length
        if length < 2 or end > len(data):
            raise truncated(KIND)
        body = data[offset + 2 : end]
        if marker in FRAMES:
            if frame is not None:
                raise damaged(KIND, "it has two headers")
            _, height, width = numbers(">BHH", body, 0, KIND)
            frame = marker, height, width
        elif marker == 0xE1 and body.startswith(EXIF):
            exif.append(body[len(EXIF) :])
        elif marker == 0xE1 and body.startswith(XMP):
            xmp = body
        if marker not in UNNEEDED:
            kept.append(data[offset - 2 : end])
        offset = end
    if frame is None:
        raise damaged(KIND, "its header is missing")
    scans = data[offset - 2 : _end(data, offset - 2, parts)]
    return _container(frame, kept, scans, b"".join(exif), xmp)


def _next_marker(data: bytes, offset: int, parts: PartCounter) -> tuple[int, int]:
    """The next marker and the offset after it; bytes between markers are skipped."""
    while True:
        parts.count()
        offset = data.find(b"\xff", offset) + 1
        if offset == 0 or offset >= len(data):
            raise truncated(KIND)
        if data[offset] not in (0x00, 0xFF):
            return data[offset], offset + 1


def _end(data: bytes, offset: int, parts: PartCounter) -> int:
    """The end of the image whose first scan begins at `offset`; without a marker, that of the file.
    Raises RequestError for too many scans."""
    scans = 0
    while offset < len(data):
        found = ENDS_DATA.search(data, offset, offset + SEARCHED_BYTES)
        if found is None:
            offset += SEARCHED_BYTES - 1  # the last byte may be the first one of a marker
            continue
        parts.count()
        offset = found.end()
        marker = data[offset - 1]
        if marker == END_OF_IMAGE:
            return offset
        scans += marker == START_OF_SCAN
        if scans > MAX_SCANS:
            raise RequestError(f"The JPEG image has more than {MAX_SCANS} scans; save it again.")
        if marker >= FIRST_SEGMENT and marker not in STANDALONE:
            offset += max(2, int.from_bytes(data[offset : offset + 2]))
    return len(data)


def _container(
    frame: tuple[int, int, int], kept: list[bytes], scans: bytes, exif: bytes, xmp: bytes
) -> Container:
    marker, height, width = frame
    # A block takes at least a bit, and one component has pixels / 64 blocks, or half as many.
    blocks = width * height // 128
    return Container(
        KIND,
        width,
        height,
        b"".join([*kept, scans]),
        len(scans),
        exif=exif,
        xmp=xmp,
        least_bytes=blocks // 8 if marker in HUFFMAN_CODED else 0,
    )
