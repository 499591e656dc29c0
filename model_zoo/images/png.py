"""PNG: the chunks that pixels need, the size, the frames of an animation.

Reference: Portable Network Graphics (PNG) Specification, third edition, W3C.
"""

from model_zoo.images.container import Container, Parts, damaged, numbers, truncated

MAGIC = b"\x89PNG\r\n\x1a\n"
KIND = "PNG"
XMP_KEYWORD = b"XML:com.adobe.xmp\0\0"  # a second zero: not compressed
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
DEFLATE_RATIO = 1032  # no deflate stream expands more


def read(data: bytes) -> Container:
    """Colour profiles, texts and later frames are left out. Raises RequestError."""
    header, kept, compressed, frames = b"", [MAGIC], 0, 0
    exif = xmp = b""
    parts, offset = Parts(KIND), len(MAGIC)
    while True:
        parts.count()
        length, name = numbers(">I4s", data, offset, KIND)
        body, end = offset + 8, offset + 12 + length
        if end > len(data):
            raise truncated(KIND)
        match name:
            case b"IHDR" if header or length != 13:
                raise damaged(KIND, "its header is not one")
            case b"IHDR":
                header = data[body : body + length]
            case b"fcTL":
                frames += 1
            case b"eXIf":
                exif = data[body : body + length]
            case b"iTXt" if data.startswith(XMP_KEYWORD, body):
                xmp = data[body : body + length]
        if not header:
            raise damaged(KIND, "it does not begin with its header")
        if name == b"IDAT":
            compressed += length
        if name in (b"IHDR", b"IDAT", b"IEND") or (name in (b"PLTE", b"tRNS") and not compressed):
            kept.append(data[offset:end])
        if name == b"IEND":
            break
        offset = end
    width, height, depth, colour = numbers(">IIBB", header, 0, KIND)
    pixel_bits = depth * CHANNELS.get(colour, 0)
    return Container(
        KIND,
        width,
        height,
        b"".join(kept),
        compressed,
        max(frames, 1),
        exif,
        xmp,
        least_bytes=width * height * pixel_bits // 8 // DEFLATE_RATIO,
    )
