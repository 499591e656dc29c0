"""PNG: the chunks that decoding needs, the size, Exif and XMP.

Reference: Portable Network Graphics (PNG) Specification, third edition, W3C; for Exif as text, the
format that ImageMagick writes.
"""

import zlib

from model_zoo.images.container import Container, PartCounter, damaged, numbers

MAGIC = b"\x89PNG\r\n\x1a\n"
KIND = "PNG"
XMP, EXIF_AS_TEXT = b"XML:com.adobe.xmp\0", b"Raw profile type exif\0"
MAX_NOTE_BYTES = 2**18  # of a decompressed text; the orientation is near its beginning
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # channels by colour type
DEFLATE_RATIO = 1032  # maximum compression ratio of deflate


def read(data: bytes) -> Container:
    """Leaves out colour profiles, texts and later frames. Raises RequestError."""
    header, kept, compressed = b"", [MAGIC], 0
    exif, notes = b"", dict[bytes, bytes]()
    parts, offset = PartCounter(KIND), len(MAGIC)
    while True:
        parts.count()
        length, name = numbers(">I4s", data, offset, KIND)
        body, end = offset + 8, offset + 12 + length
        match name:
            case b"IHDR" if header or length != 13:
                raise damaged(KIND, "its header is not one")
            case b"IHDR":
                header = data[body : body + length]
            case b"eXIf":
                exif = data[body : body + length]
            case b"tEXt" | b"zTXt" | b"iTXt" if data.startswith((XMP, EXIF_AS_TEXT), body):
                keyword, _, rest = data[body : body + length].partition(b"\0")
                notes[keyword] = name + rest
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
        exif or _from_hex(_text(notes.get(EXIF_AS_TEXT[:-1], b""))),
        _text(notes.get(XMP[:-1], b"")),
        least_bytes=width * height * pixel_bits // 8 // DEFLATE_RATIO,
    )


def _text(note: bytes) -> bytes:
    """The text of a chunk, given its name and the data after its keyword; b"" if damaged."""
    name, rest = note[:4], note[4:]
    compressed = name == b"zTXt" or (name == b"iTXt" and rest[:1] != b"\0")
    if name == b"zTXt":
        rest = rest[1:]
    elif name == b"iTXt":
        rest = rest[2:].split(b"\0", 2)[-1]  # after the language and the translated keyword
    if not compressed:
        return rest
    try:
        return zlib.decompressobj().decompress(rest, MAX_NOTE_BYTES)
    except zlib.error:
        return b""


def _from_hex(text: bytes) -> bytes:
    """Decodes lines: an empty one, the kind, the length, and then hexadecimal digits."""
    digits = b"".join(text[:MAX_NOTE_BYTES].split(b"\n")[3:])
    try:
        return bytes.fromhex(digits[: len(digits) // 2 * 2].decode("ascii"))
    except ValueError:
        return b""
