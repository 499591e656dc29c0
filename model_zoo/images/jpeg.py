"""JPEG: the segments that decoding needs, the size, the number of scans.

Reference: ITU-T T.81; application segments as Exif 2.3 and XMP part 3 use them.
"""

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


def read(data: bytes) -> Container:
    """Leaves out profiles, thumbnails, comments and further images. Raises RequestError."""
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
    return _container(frame, kept, data[offset - 2 :], b"".join(exif), xmp)


def _next_marker(data: bytes, offset: int, parts: PartCounter) -> tuple[int, int]:
    """The next marker and the offset after it; bytes between markers are skipped."""
    while True:
        parts.count()
        offset = data.find(b"\xff", offset) + 1
        if offset == 0 or offset >= len(data):
            raise truncated(KIND)
        if data[offset] not in (0x00, 0xFF):
            return data[offset], offset + 1


def _container(
    frame: tuple[int, int, int], kept: list[bytes], scans: bytes, exif: bytes, xmp: bytes
) -> Container:
    marker, height, width = frame
    if scans.count(b"\xff\xda") > MAX_SCANS:
        raise RequestError(f"The JPEG image has more than {MAX_SCANS} scans; save it again.")
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
