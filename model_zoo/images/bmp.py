"""BMP: the size, and whether it is compressed.

Reference: BITMAPCOREHEADER and BITMAPINFOHEADER, Windows GDI.
"""

from model_zoo.images.container import Container, numbers
from runtime.errors import RequestError

MAGIC = b"BM"
KIND = "BMP"
CORE_HEADER_BYTES = 12
RUN_LENGTH = (1, 2)
MAX_RUN_LENGTH_BYTES = 2**22  # each run is a step of a Python loop


def read(data: bytes) -> Container:
    """Raises RequestError."""
    (header_bytes,) = numbers("<I", data, 14, KIND)
    if header_bytes == CORE_HEADER_BYTES:
        width, height = numbers("<HH", data, 18, KIND)
        return Container(KIND, width, height, data, len(data))
    width, height, _, _, compression = numbers("<IiHHI", data, 18, KIND)
    if compression in RUN_LENGTH and len(data) > MAX_RUN_LENGTH_BYTES:
        raise RequestError(
            f"The BMP image has {len(data):,} bytes; compressed ones may have "
            f"{MAX_RUN_LENGTH_BYTES:,}. Send it as PNG."
        )
    return Container(KIND, width, abs(height), data, len(data))
