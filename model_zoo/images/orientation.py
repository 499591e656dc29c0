"""Which way up a picture is: the orientation that a camera wrote down, and undoing it.

Reference: Exif 2.3, tag 0x0112, and tiff:Orientation of XMP, which counts where Exif says nothing.
"""

import re
import struct

import numpy as np
from numpy.typing import NDArray

EXIF_PREFIX = b"Exif\0\0"
TAG = 0x0112
# By type, the value of an entry with a single number; some writers take signed ones.
LAYOUTS = {3: "H", 4: "I", 8: "h", 9: "i"}
IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation_of(exif: bytes, xmp: bytes) -> int:
    """1 (upright) to 8; what cannot be read is upright."""
    value = _in_exif(exif.removeprefix(EXIF_PREFIX))
    if value is None and (found := IN_XMP.search(xmp)):
        value = int(found[1])
    return value if value is not None and 1 <= value <= 8 else 1


def upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """image [height, width, 3] -> the same as the photographer saw it, sides maybe exchanged."""
    if exchanges_sides(orientation):
        image = image.transpose(1, 0, 2)
    mirrored_rows = orientation in (3, 4, 7, 8)
    mirrored_columns = orientation in (2, 3, 6, 7)
    image = image[::-1] if mirrored_rows else image
    return image[:, ::-1] if mirrored_columns else image


def exchanges_sides(orientation: int) -> bool:
    """Whether the upright image is as wide as the stored one is high."""
    return orientation >= 5


def _in_exif(tiff: bytes) -> int | None:
    """The tag in the first directory; None where there is none."""
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
