"""GIF: the blocks of the first frame, and its size.

Reference: Graphics Interchange Format, version 89a.
"""

from model_zoo.images.container import Container, PartCounter, numbers, truncated

MAGICS = (b"GIF87a", b"GIF89a")
KIND = "GIF"
EXTENSION, IMAGE, TRAILER = 0x21, 0x2C, 0x3B
GRAPHIC_CONTROL = 0xF9


def read(data: bytes) -> Container:
    """Leaves out comments and later frames. Raises RequestError."""
    width, height, flags = numbers("<HHB", data, 6, KIND)
    offset = 13 + _palette_bytes(flags)
    head, control = data[:offset], b""
    parts = PartCounter(KIND)
    while True:
        (introducer,) = numbers("B", data, offset, KIND)
        if introducer == IMAGE:
            break
        if introducer == TRAILER:
            raise truncated(KIND)
        if introducer == EXTENSION:
            (label,) = numbers("B", data, offset + 1, KIND)
            end = _after_blocks(data, offset + 2, parts)
            if label == GRAPHIC_CONTROL:
                control = data[offset:end]
        else:  # readers skip unknown bytes between blocks
            parts.count()
            end = offset + 1
        offset = end
    left, top, wide, high, flags = numbers("<HHHHB", data, offset + 1, KIND)
    end = _after_blocks(data, offset + 11 + _palette_bytes(flags), parts)
    frame = data[offset:end]
    width, height = max(width, left + wide), max(height, top + high)
    return Container(KIND, width, height, head + control + frame + bytes([TRAILER]), len(frame))


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, offset: int, parts: PartCounter) -> int:
    """The offset after a chain of sub-blocks, each with its length first; an empty one ends it."""
    while True:
        parts.count()
        (length,) = numbers("B", data, offset, KIND)
        offset += 1 + length
        if not length:
            return offset
