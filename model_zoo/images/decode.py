"""Decodes image files of untrusted origin to pixels, within limits."""

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model_zoo.images import bmp, gif, jpeg, png, webp
from model_zoo.images.container import Container, damaged, truncated, undecodable
from model_zoo.images.orientation import exchanges_sides, orientation_of, upright
from runtime.errors import RequestError

WHITE = (255, 255, 255, 255)
DECODERS: dict[str, type[ImageFile.ImageFile]] = {
    png.KIND: PngImageFile,
    jpeg.KIND: JpegImageFile,
    gif.KIND: GifImageFile,
    webp.KIND: WebPImageFile,
    bmp.KIND: BmpImageFile,
}


# Peak memory of decoding per pixel; resizing takes up to 48 bytes more for each pixel of a side.
BYTES_PER_PIXEL = 17


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """Limits of one image; `pixels` and `side`, the longer one, apply to its first frame."""

    bytes: int = 32 * 2**20
    pixels: int = 2**26
    side: int = 2**16 - 1  # the maximum of JPEG and GIF


def decode(data: bytes, limits: DecodingLimits) -> NDArray[np.uint8]:
    """The first frame of a PNG, JPEG, WebP, GIF or BMP file as RGB [height, width, 3].

    Rotated as Exif or XMP state, like Pillow's `exif_transpose`, with transparency on white, like
    `convert_to_rgb` of `transformers` (its `load_image` drops the alpha channel instead). Raises
    RequestError if the data are not an image, are damaged or exceed a limit; limits are checked
    before anything is decompressed. Blocks while it decodes: do not call it on an event loop.
    """
    container = _accepted(data, limits)
    image = upright(_pixels(container), orientation_of(container.exif, container.xmp))
    return np.ascontiguousarray(image)


def size_of(data: bytes, limits: DecodingLimits) -> tuple[int, int]:
    """(height, width) of the result of `decode`; checks the same limits without decoding."""
    container = _accepted(data, limits)
    turned = exchanges_sides(orientation_of(container.exif, container.xmp))
    size = container.height, container.width
    return size[::-1] if turned else size


def inspect(data: bytes) -> Container:
    """Reads the file's structure without decompressing pixels. Raises RequestError."""
    if data.startswith(png.MAGIC):
        return png.read(data)
    if data.startswith(jpeg.MAGIC):
        return jpeg.read(data)
    if data.startswith(gif.MAGICS):
        return gif.read(data)
    if webp.is_webp(data):
        return webp.read(data)
    if data.startswith(bmp.MAGIC):
        return bmp.read(data)
    raise RequestError("The image is no PNG, JPEG, WebP, GIF or BMP file; send one of these.")


def _accepted(data: bytes, limits: DecodingLimits) -> Container:
    if len(data) > limits.bytes:
        raise RequestError(
            f"The image has {len(data):,} bytes; at most {limits.bytes:,} are accepted. "
            "Scale it down or compress it more."
        )
    container = inspect(data)
    _check(container, limits)
    return container


def _check(container: Container, limits: DecodingLimits) -> None:
    kind, width, height = container.format, container.width, container.height
    if width * height > limits.pixels:
        raise RequestError(
            f"The {kind} image has {width:,} x {height:,} pixels; at most {limits.pixels:,} are "
            "accepted. Scale it down."
        )
    if max(width, height) > limits.side:
        raise RequestError(
            f"The {kind} image has {width:,} x {height:,} pixels; at most {limits.side:,} on a "
            "side are accepted. Cut it or scale it down."
        )
    if container.compressed_bytes < container.least_bytes:
        raise truncated(kind)


def _pixels(container: Container) -> NDArray[np.uint8]:
    """[height, width, 3]"""
    kind = container.format
    try:
        return np.asarray(_rgb(_first_frame(container)))
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # Pillow does not document the errors of its decoders
        raise undecodable(kind, error) from error


def _first_frame(container: Container) -> Image.Image:
    """A copy, so that the decoder's memory is freed before the next step allocates."""
    with DECODERS[container.format](BytesIO(container.data)) as file:
        if file.size != (container.width, container.height):
            raise damaged(container.format, "it states two sizes")
        file.load()
        return file.copy()


def _rgb(image: Image.Image) -> Image.Image:
    """Puts transparency on white."""
    if image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """The high bytes of 16-bit greys, as `stb_image` and Go's `image/png` give them; Pillow would
    clip greys above 255 to white. A transparent grey becomes white."""
    greys = np.asarray(image)
    high = (greys >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        high[greys == transparent] = 255
    return Image.fromarray(high)
