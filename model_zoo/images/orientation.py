"""The orientation in a file's metadata, and rotating the image accordingly.

Pillow's Exif reader is not used: it reports damaged metadata as Python warnings, which threads
cannot suppress safely. Reference: Exif 2.3, tag 0x0112, and tiff:Orientation of XMP, which applies
if Exif has no orientation.
"""

import re
import struct

import numpy as np
from numpy.typing import NDArray

EXIF_PREFIX = b"Exif\0\0"
TAG = 0x0112
# Layout of an entry with a single number, by its type; some writers use signed types.
LAYOUTS = {3: "H", 4: "I", 8: "h", 9: "i"}
IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation_of(exif: bytes, xmp: bytes) -> int:
    """1 (upright) to 8; 1 if the metadata state none or are damaged."""
    value = _in_exif(exif.removeprefix(EXIF_PREFIX))
    if value is None and (found := IN_XMP.search(xmp)):
        value = int(found[1])
    return value if value is not None and 1 <= value <= 8 else 1


def upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """image [height, width, 3] -> the rotated or mirrored view; sides may be exchanged."""
    if exchanges_sides(orientation):
        image = image.transpose(1, 0, 2)
    mirrored_rows = orientation in (3, 4, 7, 8)
    mirrored_columns = orientation in (2, 3, 6, 7)
    image = image[::-1] if mirrored_rows else image
    return image[:, ::-1] if mirrored_columns else image


def exchanges_sides(orientation: int) -> bool:
    """Whether width and height of the upright image are those of the stored one, exchanged."""
    return orientation >= 5


def _in_exif(tiff: bytes) -> int | None:
    """The orientation in Exif's first directory; None if absent."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return None
    (directory,) = struct.unpack_from(order + "I", tiff, 4)
    if directory + 2 > len(tiff):
        return None
    (entries,) = struct.unpack_from(order + "H", tiff, directory)
    last = min(entries, (len(tiff) - directory - 2) // 12)
    for offset in range(directory + 2, directory + 2 + 12 * last, 12):
        tag, kind, count = struct.unpack_from(order + "HHI", tiff, offset)
        if tag == TAG and kind in LAYOUTS and count == 1:
            return int(struct.unpack_from(order + LAYOUTS[kind], tiff, offset + 8)[0])
    return None
