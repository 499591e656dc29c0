"""BMP: the size and the compression, from the header that Pillow reads without decoding."""

from io import BytesIO

from PIL.BmpImagePlugin import BmpImageFile

from model_zoo.images.container import Container, undecodable
from runtime.errors import RequestError

MAGIC = b"BM"
KIND = "BMP"


def read(data: bytes) -> Container:
    """Raises RequestError for a damaged header, and for run lengths, which Pillow decodes pixel by
    pixel in Python."""
    try:
        with BmpImageFile(BytesIO(data)) as file:
            width, height = file.size
            codecs = {tile.codec_name for tile in file.tile}
    except Exception as error:  # Pillow does not document the errors of its decoders
        raise undecodable(KIND, error) from error
    if codecs - {"raw"}:
        raise RequestError("Compressed BMP images are not accepted. Send the image as PNG.")
    return Container(KIND, width, height, data, len(data))
