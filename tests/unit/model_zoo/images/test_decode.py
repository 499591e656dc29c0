"""Files of all supported formats decode to the pixels of Pillow, with transparency on white like
`convert_to_rgb` of `transformers`."""

import asyncio
import itertools
import pickle
import struct
import subprocess
import sys
import textwrap
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from transformers.image_transforms import convert_to_rgb

from model_zoo.images import jpeg
from model_zoo.images.decode import DecodingLimits, decode
from tests.pictures import photo
from tests.unit.model_zoo.images.image_files import bmp_of, chunk, gif_frame, gif_of, png_of, saved

LIMITS = DecodingLimits()
RGB = Image.fromarray(photo(37, 53))
ALPHA = Image.fromarray(photo(37, 53, seed=1)[..., 0])
GREY = RGB.convert("L")
RGBA = Image.merge("RGBA", (*RGB.split(), ALPHA))
LA = Image.merge("LA", (GREY, ALPHA))
PALETTE = RGB.quantize(200)
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def reference(data: bytes) -> np.ndarray:
    with Image.open(BytesIO(data)) as image:
        return convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True)


def agrees(data: bytes) -> np.ndarray:
    image = decode(data, LIMITS)
    assert image.dtype == np.uint8 and image.flags.c_contiguous
    np.testing.assert_array_equal(image, reference(data))
    return image


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    made[0x010E] = "a description before the orientation"
    return made


PNG_FILES = {
    "bits": saved(RGB.convert("1"), "PNG"),
    "two bits": saved(GREY.quantize(4), "PNG", bits=2),
    "grey": saved(GREY, "PNG"),
    "grey with transparent value": saved(GREY, "PNG", transparency=100),
    "grey and alpha": saved(LA, "PNG"),
    "rgb": saved(RGB, "PNG"),
    "rgb with transparent colour": saved(RGB, "PNG", transparency=RGB.getpixel((3, 4))),
    "rgba": saved(RGBA, "PNG"),
    "palette": saved(PALETTE, "PNG"),
    "palette with transparent entry": saved(PALETTE, "PNG", transparency=7),
    "palette with alphas": saved(PALETTE, "PNG", transparency=bytes(range(200))),
    "16-bit rgb": png_of(photo(37, 53).astype(np.uint16) * 257 + 3, 2),
    "16-bit grey and alpha": png_of(photo(37, 53)[..., :2].astype(np.uint16) * 250, 4),
    "16-bit rgba": png_of(np.asarray(RGBA).astype(np.uint16) * 251, 6),
    "interlaced": png_of(photo(37, 53), 2, interlaced=True),
    "interlaced, one pixel": png_of(photo(1, 1), 2, interlaced=True),
    "interlaced 16-bit": png_of(photo(9, 5).astype(np.uint16) * 257, 2, interlaced=True),
    "animated": saved(RGB, "PNG", save_all=True, append_images=[RGB.rotate(90)]),
    "animated, first image apart": saved(
        RGB, "PNG", save_all=True, default_image=True, append_images=[RGB.rotate(90)]
    ),
    "colour profile": saved(RGB, "PNG", icc_profile=bytes(5000)),
}
JPEG_FILES = {
    "rgb": saved(RGB, "JPEG"),
    "grey": saved(GREY, "JPEG"),
    "cmyk": saved(RGB.convert("CMYK"), "JPEG"),
    "progressive": saved(RGB, "JPEG", progressive=True),
    "progressive cmyk": saved(RGB.convert("CMYK"), "JPEG", progressive=True),
    "all samples": saved(RGB, "JPEG", subsampling=0, quality=97),
    "half samples": saved(RGB, "JPEG", subsampling=2),
    "red, green, blue": saved(RGB, "JPEG", keep_rgb=True),
    "restarts": saved(RGB, "JPEG", restart_marker_rows=1),
    "profile and comment": saved(RGB, "JPEG", icc_profile=bytes(200_000), comment=b"\xff\xd9"),
    "several pictures": saved(RGB, "MPO", save_all=True, append_images=[RGB.rotate(90)]),
}
WEBP_FILES = {
    "lossy": saved(RGB, "WEBP"),
    "lossless": saved(RGB, "WEBP", lossless=True),
    "lossy with alpha": saved(RGBA, "WEBP"),
    "lossless with alpha": saved(RGBA, "WEBP", lossless=True),
    "animated": saved(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(90)]),
    "profile": saved(RGB, "WEBP", icc_profile=bytes(500)),
}
GIF_FILES = {
    "palette": saved(PALETTE, "GIF"),
    "grey": saved(GREY, "GIF"),
    "bits": saved(RGB.convert("1"), "GIF"),
    "transparent": saved(PALETTE, "GIF", transparency=3),
    "interlaced": saved(PALETTE, "GIF", interlace=1),
    "not interlaced": saved(PALETTE, "GIF", interlace=0),
    "animated": saved(
        PALETTE, "GIF", save_all=True, append_images=[RGB.rotate(90)], disposal=2, loop=0
    ),
    "commented": saved(PALETTE, "GIF", comment=b"x" * 900),
    "with bytes between blocks": gif_of([b"\x00\x09", gif_frame()], width=1, height=1),
}
BMP_FILES = {
    "bits": saved(RGB.convert("1"), "BMP"),
    "grey": saved(GREY, "BMP"),
    "palette": saved(PALETTE, "BMP"),
    "rgb": saved(RGB, "BMP"),
    "rgba": saved(RGBA, "BMP"),
    "from the top": bmp_of(photo(4, 8).tobytes(), 8, -4, bits=24),
    "16 bits": bmp_of(
        photo(6, 4).tobytes()[:48], 4, 6, bits=16, compression=3, masks=(0xF800, 0x7E0, 0x1F)
    ),
}
FILES = {
    f"{kind}: {name}": data
    for kind, files in [
        ("PNG", PNG_FILES),
        ("JPEG", JPEG_FILES),
        ("WebP", WEBP_FILES),
        ("GIF", GIF_FILES),
        ("BMP", BMP_FILES),
    ]
    for name, data in files.items()
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_pixels_of_the_reference(name: str) -> None:
    agrees(FILES[name])


RAMP = np.arange(0, 2**16, 257, dtype=np.uint16).reshape(16, 16, 1) - np.uint16(200)


@pytest.mark.parametrize("interlaced", [False, True])
def test_greys_of_16_bits_become_their_high_byte(interlaced: bool) -> None:
    """Pillow clips them to 255, but not those of colours, which are the reference here."""
    grey = decode(png_of(RAMP, 0, interlaced=interlaced), LIMITS)
    np.testing.assert_array_equal(grey, (RAMP >> 8).repeat(3, 2))
    for others in (png_of(RAMP.repeat(3, 2), 2), png_of(np.insert(RAMP, 1, 2**16 - 1, 2), 4)):
        np.testing.assert_array_equal(grey, agrees(others))


def test_a_transparent_grey_of_16_bits_becomes_white_but_not_its_neighbours() -> None:
    near = np.array([0x1234, 0x1235, 0x1334, 0x3412], np.uint16).reshape(2, 2, 1)
    image = decode(png_of(near, 0, extra=[chunk(b"tRNS", b"\x12\x34")]), LIMITS)
    assert image[..., 0].tolist() == [[255, 0x12], [0x13, 0x34]]


@pytest.mark.parametrize("searched", [2, 3, 100, jpeg.SEARCHED_BYTES])
@pytest.mark.parametrize("name", JPEG_FILES)
def test_data_after_a_jpeg_image_are_ignored(name: str, searched: int, monkeypatch) -> None:
    """Cameras append videos and further images."""
    monkeypatch.setattr(jpeg, "SEARCHED_BYTES", searched)
    alone, video = jpeg.read(JPEG_FILES[name]), b"\0\0\0\x18ftypmp42" + b"\xff\xda\0\x02a" * 300
    assert jpeg.read(JPEG_FILES[name] + video) == alone
    agrees(JPEG_FILES[name] + video)


@pytest.mark.parametrize("name", ["rgb", "restarts"])
def test_a_jpeg_image_with_all_rows_needs_no_end(name: str) -> None:
    without_end = JPEG_FILES[name].removesuffix(b"\xff\xd9")
    for appended in (bytes(99), b"\xff\xe1\xff\xff" + bytes(99), bytes(99) + b"\xff\xe1\0"):
        agrees(without_end + appended)


def test_segments_between_scans_may_contain_markers() -> None:
    progressive = JPEG_FILES["progressive"]
    last = progressive.rindex(b"\xff\xda")
    comment = b"\xff\xfe\0\x06\xff\xd9\xff\xda"
    agrees(progressive[:last] + comment + progressive[last:])


def test_transparent_pixels_become_white() -> None:
    clear = Image.new("RGBA", (3, 2), (10, 20, 30, 0))
    half = Image.new("RGBA", (3, 2), (100, 0, 255, 51))
    assert (agrees(saved(clear, "PNG")) == 255).all()
    assert agrees(saved(half, "PNG"))[0, 0].tolist() == [224, 204, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    agrees(saved(RGB, kind, exif=exif(orientation)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_xmp_orientation_is_applied_if_exif_has_none(orientation: int) -> None:
    xmp = XMP % orientation
    agrees(saved(RGB, "JPEG", xmp=xmp))
    agrees(saved(RGB, "WEBP", xmp=xmp))
    agrees(saved(RGB, "JPEG", xmp=xmp, exif=exif(3)))
    agrees(png_of(photo(37, 53), 2, extra=[chunk(b"iTXt", b"XML:com.adobe.xmp" + bytes(5) + xmp)]))


@pytest.mark.parametrize("compressed", [False, True])
def test_orientation_in_png_texts_is_applied(compressed: bool) -> None:
    """The format of ImageMagick from before there was a chunk for Exif; the chunk has priority."""
    lines = textwrap.wrap(exif(6).tobytes().hex(), 72)
    profile = "\n".join(["", "exif", f"{len(exif(6).tobytes()):8}", *lines, ""])
    notes = PngInfo()
    notes.add_text("Raw profile type exif", profile, zip=compressed)
    assert agrees(saved(RGB, "PNG", pnginfo=notes)).shape == (53, 37, 3)
    agrees(saved(RGB, "PNG", pnginfo=notes, exif=exif(3)))
    notes = PngInfo()
    notes.add_itxt("XML:com.adobe.xmp", (XMP % 6).decode(), "en", "picture", zip=compressed)
    assert agrees(saved(RGB, "PNG", pnginfo=notes)).shape == (53, 37, 3)


@pytest.mark.parametrize("note", [b"", b"\0", b"\0\0", b"\0not compressed", b"\nexif\n 9\nxyz"])
@pytest.mark.parametrize("name", [b"tEXt", b"zTXt", b"iTXt"])
def test_damaged_png_texts_are_ignored(name: bytes, note: bytes) -> None:
    for keyword in (b"Raw profile type exif", b"XML:com.adobe.xmp"):
        data = png_of(photo(37, 53), 2, extra=[chunk(name, keyword + b"\0" + note)])
        np.testing.assert_array_equal(decode(data, LIMITS), photo(37, 53))


@pytest.mark.parametrize("kind, layout", [(3, "H"), (4, "I"), (8, "h"), (9, "i")])
def test_orientation_may_have_any_integer_type(kind: int, layout: str) -> None:
    value = struct.pack(f"<{layout}", 6).ljust(4, b"\0")
    tiff = struct.pack("<2sHIHHHI4sI", b"II", 42, 8, 1, 0x0112, kind, 1, value, 0)
    assert agrees(saved(RGB, "JPEG", exif=b"Exif\0\0" + tiff)).shape == (53, 37, 3)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("value", [0, 6, 9, 65535])
def test_both_byte_orders_of_exif_are_read(order: str, value: int) -> None:
    made = exif(value)
    made.endian = order
    agrees(saved(RGB, "JPEG", exif=made.tobytes()))


@pytest.mark.parametrize("cut", range(0, 30, 3))
def test_truncated_exif_is_ignored(cut: int) -> None:
    notes = exif(6).tobytes()
    image = decode(saved(RGB, "JPEG", exif=notes[: len(b"Exif\0\0") + cut]), LIMITS)
    np.testing.assert_array_equal(image, reference(saved(RGB, "JPEG")))


def test_palettes_with_alpha_of_every_depth_match_the_reference() -> None:
    for depth, alphas in itertools.product([1, 2, 4, 8], [b"", b"\x80", bytes(range(0, 250, 50))]):
        palette = RGB.quantize(2**depth)
        agrees(saved(palette, "PNG", bits=depth, **({"transparency": alphas} if alphas else {})))


def test_images_can_be_decoded_concurrently() -> None:
    async def both() -> list[np.ndarray]:
        files = [PNG_FILES["rgba"], JPEG_FILES["progressive"]] * 8
        return await asyncio.gather(*(asyncio.to_thread(decode, data, LIMITS) for data in files))

    first, second, *others = asyncio.run(both())
    for image, other in zip(others, itertools.cycle([first, second])):
        np.testing.assert_array_equal(image, other)


def test_decoding_emits_no_warning_and_keeps_pillow_s_settings() -> None:
    """In a separate process, in which warnings are errors."""
    corrupt = exif(6).tobytes()[:-20] + b"\x12\x01\x02\x00\xff\xff\xff\x7f"
    animation = PNG_FILES["animated"]
    twice = animation.replace(b"\0\0\0\x08acTL", chunk(b"acTL", bytes(8)) + b"\0\0\0\x08acTL")
    files = [*FILES.values(), png_of(RAMP, 0), saved(RGB, "JPEG", exif=corrupt), twice]
    script = """
import pickle, sys, warnings
from PIL import Image, ImageFile
before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
from model_zoo.images.decode import DecodingLimits, decode
warnings.simplefilter("error")
filters = list(warnings.filters)
for data in pickle.load(sys.stdin.buffer):
    decode(data, DecodingLimits())
assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
assert filters == warnings.filters
"""
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(files), check=False)
    assert done.returncode == 0
