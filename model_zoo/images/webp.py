"""WebP: the size, Exif and XMP.

Reference: WebP Container Specification; VP8 (RFC 6386) and VP8L bitstream headers.
"""

from model_zoo.images.container import Container, PartCounter, damaged, numbers, truncated

KIND = "WebP"
HEAD_BYTES = 12  # RIFF, length, WEBP


def is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:HEAD_BYTES] == b"WEBP"


def read(data: bytes) -> Container:
    """The structure of the file. Raises RequestError."""
    (riff_bytes,) = numbers("<I", data, 4, KIND)
    end = 8 + riff_bytes
    if end > len(data):
        raise truncated(KIND)
    chunks = _chunks(data, end)
    if not chunks:
        raise truncated(KIND)
    width, height = _size(data, chunks[0])
    named = {name: data[body : body + length] for name, body, length in chunks if name in _NOTES}
    return Container(
        KIND,
        width,
        height,
        data[:end],
        end,
        named.get(b"EXIF", b""),
        named.get(b"XMP ", b""),
    )


_NOTES = (b"EXIF", b"XMP ")


def _chunks(data: bytes, end: int) -> list[tuple[bytes, int, int]]:
    """Name, offset and length of each chunk; a byte of padding follows an odd length."""
    found: list[tuple[bytes, int, int]] = []
    parts, offset = PartCounter(KIND), HEAD_BYTES
    while offset + 8 <= end:
        parts.count()
        name, (length,) = data[offset : offset + 4], numbers("<I", data, offset + 4, KIND)
        if offset + 8 + length > end:
            raise truncated(KIND)
        found.append((name, offset + 8, length))
        offset += 8 + length + length % 2
    return found


def _size(data: bytes, first: tuple[bytes, int, int]) -> tuple[int, int]:
    name, body, _ = first
    match name:
        case b"VP8X":
            low_w, high_w, low_h, high_h = numbers("<HBHB", data, body + 4, KIND)
            return (low_w | high_w << 16) + 1, (low_h | high_h << 16) + 1
        case b"VP8L":
            (bits,) = numbers("<I", data, body + 1, KIND)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = numbers("<HH", data, body + 6, KIND)
            return width & 0x3FFF, height & 0x3FFF
    raise damaged(KIND, "it does not begin with an image")
