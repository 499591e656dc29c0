"""GIF: the blocks of the first frame, the size, the number of frames.

Reference: Graphics Interchange Format, version 89a.
"""

from model_zoo.images.container import Container, PartCounter, numbers, truncated

MAGICS = (b"GIF87a", b"GIF89a")
KIND = "GIF"
EXTENSION, IMAGE, TRAILER = 0x21, 0x2C, 0x3B
GRAPHIC_CONTROL = 0xF9


def read(data: bytes) -> Container:
    """Leaves out comments and later frames, but counts them. Raises RequestError."""
    width, height, flags = numbers("<HHB", data, 6, KIND)
    offset = 13 + _palette_bytes(flags)
    head, control, frame, frames = data[:offset], b"", b"", 0
    parts = PartCounter(KIND)
    while not frames or offset < len(data):  # after the first frame, the file may end early
        (introducer,) = numbers("B", data, offset, KIND)
        if introducer == EXTENSION:
            (label,) = numbers("B", data, offset + 1, KIND)
            end = _after_blocks(data, offset + 2, parts)
            if label == GRAPHIC_CONTROL and not frames:
                control = data[offset:end]
        elif introducer == IMAGE:
            left, top, wide, high, flags = numbers("<HHHHB", data, offset + 1, KIND)
            end = _after_blocks(data, offset + 11 + _palette_bytes(flags), parts)
            if not frames:
                frame = data[offset:end]
                width, height = max(width, left + wide), max(height, top + high)
            frames += 1
        elif frames:  # the trailer, or data that readers ignore
            break
        elif introducer == TRAILER:
            raise truncated(KIND)
        else:  # readers skip unknown bytes between blocks
            parts.count()
            end = offset + 1
        offset = end
    kept = head + control + frame + bytes([TRAILER])
    return Container(KIND, width, height, kept, len(frame), frames)


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
