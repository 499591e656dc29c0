"""Invalid, damaged and hostile image files are refused before anything is decompressed."""

import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from model_zoo.images import decode as decoding
from model_zoo.images.container import MAX_PARTS
from model_zoo.images.decode import DecodingLimits, decode
from runtime.errors import RequestError
from tests.pictures import photo
from tests.unit.model_zoo.images.image_files import (
    PNG_MAGIC,
    bmp_of,
    chunk,
    gif_frame,
    gif_of,
    png_header,
    png_of,
    saved,
)

LIMITS = DecodingLimits(bytes=2**20, pixels=2**20)
RGB = Image.fromarray(photo(64, 64))
SEQUENCE = [Image.new("L", (4, 4), number % 250) for number in range(1001)]
END = chunk(b"IEND", b"")


def jpeg_of_size(width: int, height: int) -> bytes:
    """A file with one pixel whose header states another size."""
    true, stated = struct.pack(">BHH", 8, 1, 1), struct.pack(">BHH", 8, height, width)
    return saved(RGB.crop((0, 0, 1, 1)), "JPEG").replace(true, stated)


def webp(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data for name, data in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def extended(width: int, height: int) -> tuple[bytes, bytes]:
    sides = (struct.pack("<I", side - 1)[:3] for side in (width, height))
    return b"VP8X", bytes(4) + b"".join(sides)


def png_of_size(width: int, height: int, *extra: bytes) -> bytes:
    header = png_header(width, height, depth=8, colour=2)
    return b"".join([PNG_MAGIC, header, *extra, chunk(b"IDAT", zlib.compress(bytes(9))), END])


NO_IMAGES = {
    "empty": b"",
    "text": b"Please describe this picture.",
    "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "html": b"<!doctype html><title>404</title>",
    "pdf": b"%PDF-1.7\n",
    "tiff": saved(RGB, "TIFF"),
    "ico": saved(RGB, "ICO"),
    "jpeg 2000": saved(RGB, "JPEG2000"),
    "riff of sound": b"RIFF\x24\0\0\0WAVEfmt ",
    "three bytes": b"\xff\xd8",
}
HUGE = {
    "png": png_of_size(65_500, 65_500),
    "png, 2**31 wide": png_of_size(2**31 - 1, 1),
    "jpeg": jpeg_of_size(65_500, 65_500),
    "gif": gif_of([gif_frame()], width=65_500, height=65_500),
    "gif, frame beyond its screen": gif_of(
        [gif_frame(left=60_000, top=60_000, width=5_000, height=5_000)], width=1, height=1
    ),
    "webp": webp(extended(16_777_216, 255)),
    "webp, lossless": webp((b"VP8L", struct.pack("<BI", 0x2F, 0x0FFF_FFFF))),
    "webp, lossy": webp((b"VP8 ", struct.pack("<6xHH", 0x3FFF, 0x3FFF))),
    "bmp": bmp_of(b"", 65_500, 65_500, bits=24),
    "bmp, lowest height": bmp_of(b"", 1, -(2**31), bits=24),
    "bmp, old header": struct.pack("<2sIIIIHHHH", b"BM", 26, 0, 26, 12, 65_500, 65_500, 1, 24),
}
MANY_FRAMES = {
    kind: saved(SEQUENCE[0], kind, save_all=True, append_images=SEQUENCE[1:])
    for kind in ("GIF", "PNG", "WEBP")
}
TRUNCATED = {
    "png": saved(RGB, "PNG")[:-5000],
    "png without its end": saved(RGB, "PNG")[:-12],
    "jpeg": saved(RGB, "JPEG")[:-200],
    "progressive jpeg": saved(RGB, "JPEG", progressive=True)[:-500],
    "jpeg without scans": saved(RGB, "JPEG")[:200],
    "gif": saved(RGB.quantize(), "GIF")[:-100],
    "gif without frames": gif_of([], width=1, height=1),
    "webp": saved(RGB, "WEBP")[:-50],
    "bmp": saved(RGB, "BMP")[:-50],
    "bmp header": saved(RGB, "BMP")[:20],
    "png of few bytes": png_of_size(1000, 1000),
    "jpeg of few bytes": jpeg_of_size(1000, 1000),
    "jpeg of few bytes and others": jpeg_of_size(1000, 1000) + bytes(99_999),
}
DAMAGED = {
    "png without size": png_of_size(0, 7),
    "png with two headers": png_of_size(1, 1, png_header(60_000, 60_000, depth=8, colour=2)),
    "png without header": PNG_MAGIC + chunk(b"IDAT", b"") + END,
    "png with a strange header": PNG_MAGIC + chunk(b"IHDR", bytes(12)) + END,
    "png without pixels": PNG_MAGIC + png_header(1, 1, depth=8, colour=2) + END,
    "png of unknown colours": PNG_MAGIC + png_header(1, 1, depth=8, colour=5) + END,
    "jpeg with two headers": saved(RGB, "JPEG").replace(
        b"\xff\xda", b"\xff\xc0\x00\x0b\x08\xff\xff\xff\xff\x01\x01\x11\x00\xff\xda", 1
    ),
    "webp without an image": webp((b"ICCP", bytes(10))),
    "webp, smaller inside": webp(extended(9, 9), (b"VP8L", bytes(9))),
    "bmp of unknown header": b"BM"
    + bytes(12)
    + struct.pack("<IIiHHI", 41, 2, 2, 1, 24, 0)
    + bytes(99),
}


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes all decoders, so that decoding raises another error."""
    monkeypatch.setattr(decoding, "DECODERS", {})


def refusal(data: bytes, limits: DecodingLimits = LIMITS) -> str:
    """The message of the error; checks that memory is bounded by a few copies of the file."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refused:
            decode(data, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000 + 4 * len(data)
    return str(refused.value)


@pytest.mark.usefixtures("no_decoder")
@pytest.mark.parametrize("name", NO_IMAGES)
def test_data_that_are_no_image_are_refused(name: str) -> None:
    assert "no PNG, JPEG, WebP, GIF or BMP" in refusal(NO_IMAGES[name])


@pytest.mark.usefixtures("no_decoder")
@pytest.mark.parametrize("name", HUGE)
def test_a_size_beyond_the_limit_is_refused_from_the_header(name: str) -> None:
    assert "pixels; at most 1,048,576 are accepted" in refusal(HUGE[name])


@pytest.mark.usefixtures("no_decoder")
@pytest.mark.parametrize("size", [(65_536, 1), (1, 65_536)], ids=str)
def test_a_side_beyond_the_limit_is_refused_from_the_header(size: tuple[int, int]) -> None:
    assert "at most 65,535 on a side" in refusal(png_of_size(*size))


@pytest.mark.usefixtures("no_decoder")
def test_a_file_beyond_the_limit_of_bytes_is_refused_before_reading() -> None:
    assert "1,048,577 bytes; at most 1,048,576" in refusal(PNG_MAGIC + bytes(2**20 - 7))


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_truncated_file_is_refused(name: str) -> None:
    assert "is truncated; send the whole file" in refusal(TRUNCATED[name])


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str) -> None:
    assert "is damaged" in refusal(DAMAGED[name])


def test_limits_are_inclusive() -> None:
    data = saved(RGB, "PNG")
    decode(data, DecodingLimits(bytes=len(data), pixels=64 * 64, side=64))
    for limits in [
        DecodingLimits(bytes=len(data) - 1),
        DecodingLimits(pixels=64 * 64 - 1),
        DecodingLimits(side=63),
    ]:
        with pytest.raises(RequestError):
            decode(data, limits)


@pytest.mark.parametrize("kind", MANY_FRAMES)
def test_an_image_may_have_any_number_of_frames(kind: str) -> None:
    first = np.asarray(SEQUENCE[0].convert("RGB"))
    np.testing.assert_array_equal(decode(MANY_FRAMES[kind], LIMITS), first)


def test_only_the_first_of_many_frames_is_decoded() -> None:
    """Later frames are invalid."""
    rubbish = gif_frame()[:-4] + b"\x03\xff\xff\xff\x00"
    palette = bytes([200, 100, 0, 0, 0, 0])
    data = gif_of([gif_frame(), *[rubbish] * 50], width=1, height=1, palette=palette)
    assert decode(data, LIMITS).tolist() == [[[200, 100, 0]]]


def test_a_profile_with_a_huge_expansion_is_never_unpacked() -> None:
    packed = zlib.compress(bytes(2**28), 9)
    profile = chunk(b"iCCP", b"profile\0\0" + packed)
    texts = [chunk(b"zTXt", key + b"\0\0" + packed) for key in (b"text", b"Raw profile type exif")]
    notes = chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + packed)
    data = png_of(photo(5, 7), 2, extra=[profile, *texts, notes])
    tracemalloc.start()
    try:
        image = decode(data, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(image, photo(5, 7))
    assert peak < 4 * len(data)


def test_a_file_with_too_many_parts_is_refused() -> None:
    limits = DecodingLimits()
    many = MAX_PARTS + 1
    for data in [
        PNG_MAGIC + png_header(1, 1, depth=8, colour=2) + chunk(b"eXIf", b"") * many,
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * many,
        b"\xff\xd8\xff" + b"\xff\x00" * many,
        gif_of([b"!\xfe" + b"\x01a" * many + b"\0"], width=1, height=1),
        gif_of([b"\0" * many], width=1, height=1),
        webp(*[(b"what", b"")] * many),
    ]:
        with pytest.raises(RequestError, match="more than 300,000 parts"):
            decode(data, limits)


def test_a_jpeg_with_too_many_scans_is_refused() -> None:
    data = saved(RGB, "JPEG", progressive=True)
    scan = data[data.index(b"\xff\xda") : -2]
    hiding = (
        b"\xff\x02\xff\xff"  # decoders may skip this marker, but not what looks like its segment
    )
    for before in (b"", hiding):
        with pytest.raises(RequestError, match="more than 200 scans"):
            decode(data[:-2] + before + scan * 40 + data[-2:], LIMITS)


@pytest.mark.parametrize("filler", [b"\xff\x01", b"\xff\xdc\0\2"])
def test_a_jpeg_with_too_many_markers_after_its_scan_is_refused(filler: bytes) -> None:
    data = saved(RGB, "JPEG")
    with pytest.raises(RequestError, match="more than 300,000 parts"):
        decode(data[:-2] + filler * (MAX_PARTS + 1) + data[-2:], DecodingLimits())


@pytest.mark.parametrize(("bits", "compression"), [(8, 1), (4, 2)])
def test_a_run_length_encoded_bmp_is_refused(bits: int, compression: int) -> None:
    data = bmp_of(b"\4\1\0\1", 4, 1, bits=bits, compression=compression, palette=bytes(12))
    with pytest.raises(RequestError, match="Send the image as PNG"):
        decode(data, LIMITS)


KINDS = {
    "PNG": saved(RGB, "PNG"),
    "palette": saved(RGB.quantize(), "PNG", transparency=3),
    "JPEG": saved(
        RGB, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"
    ),
    "WebP": saved(RGB, "WEBP"),
    "GIF": saved(RGB.quantize(), "GIF", save_all=True, append_images=[RGB.rotate(9)]),
    "BMP": saved(RGB, "BMP"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_byte_anywhere_gives_pixels_or_a_refusal(kind: str) -> None:
    draw = random.Random(kind)
    whole = KINDS[kind]
    outcomes = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 4])):
            place = draw.randrange(min(len(data), draw.choice([64, 700, len(data)])))
            data[place] = draw.choice([0, 1, 0x7F, 0xFF, draw.randrange(256)])
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        try:
            image = decode(bytes(data), LIMITS)
            assert image.ndim == 3 and image.shape[2] == 3 and image.size <= 3 * LIMITS.pixels
            outcomes.add("pixels")
        except RequestError as error:
            assert str(error).endswith(".")
            outcomes.add("refused")
    assert outcomes == {"pixels", "refused"}
