"""BMP: the size and the compression, from the header that Pillow reads without decoding."""

from io import BytesIO

from model_zoo.images.container import Container, undecodable
from model_zoo.images.run_lengths import BmpFile
from runtime.errors import RequestError

MAGIC = b"BM"
KIND = "BMP"
MAX_RUN_LENGTH_BYTES = 2**22  # each run is a step of a Python loop


def read(data: bytes) -> Container:
    """Raises RequestError for a damaged header, and for run lengths that take too long."""
    try:
        with BmpFile(BytesIO(data)) as file:
            width, height = file.size
            run_lengths = file.has_run_lengths
    except Exception as error:  # Pillow does not document the errors of its decoders
        raise undecodable(KIND, error) from error
    if run_lengths and len(data) > MAX_RUN_LENGTH_BYTES:
        raise RequestError(
            f"The BMP image has {len(data):,} bytes; compressed ones may have "
            f"{MAX_RUN_LENGTH_BYTES:,}. Send it as PNG."
        )
    return Container(KIND, width, height, data, len(data))
