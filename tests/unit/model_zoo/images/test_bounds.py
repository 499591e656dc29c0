"""The bounds of image processors hold for all images and settings."""

from collections.abc import Iterator
from math import isqrt, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.images.normalise import CLIP
from model_zoo.images.prepared import ImageProcessor
from model_zoo.images.resize import MAX_ASPECT
from model_zoo.images.shapes import rectangles
from model_zoo.images.slicing import Slicing
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.gemma3.image_processor import Gemma3Processor
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from model_zoo.models.lfm2.image_processor import Lfm2Processor
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llava.image_processor import Fit, LlavaProcessor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mllama.image_processor import MllamaProcessor
from model_zoo.models.muse_glimmer.image_processor import MuseProcessor
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from runtime.errors import RequestError

SIDES, PATCHES, ROWS = st.integers(1, 600), st.integers(1, 32), st.integers(1, 64)


@st.composite
def qwen(draw: st.DrawFn) -> BoundedProcessor:
    """Areas from less than a patch to the maximum that a file may state."""
    areas = st.one_of(st.integers(1, 3000), st.integers(1, 300_000), st.integers(1, 1 << 26))
    least, most = sorted((draw(areas), draw(areas)))
    if draw(st.booleans()):
        least = most
    return BoundedProcessor(draw(PATCHES), draw(st.integers(1, 4)), least, most, CLIP)


@st.composite
def deepseekocr(draw: st.DrawFn) -> DeepseekOCRProcessor:
    patch, tile = draw(PATCHES), draw(st.integers(1, 20))
    side = tile + draw(st.integers(0, 20))
    least = draw(st.integers(2, 4))
    most = draw(st.integers(least, 12))
    numbers = st.tuples(st.integers(1, 300), st.integers(1, 300))
    return DeepseekOCRProcessor(
        side * patch,
        tile * patch,
        patch,
        min_tiles=least,
        max_tiles=most,
        queries=draw(st.one_of(st.none(), numbers)),
    )


@st.composite
def internvl(draw: st.DrawFn) -> InternVLProcessor:
    most = draw(st.integers(1, 24))
    return InternVLProcessor(draw(SIDES), draw(ROWS), CLIP, draw(st.integers(1, most)), most)


@st.composite
def lfm2(draw: st.DrawFn) -> Lfm2Processor:
    patch, merge = draw(PATCHES), draw(st.integers(1, 4))
    least, most = sorted((draw(st.integers(1, 600)), draw(st.integers(1, 600))))
    tile = patch * merge * draw(st.integers(1, 20))
    tiles = draw(st.sampled_from([(1, 1), (2, 2), (2, 5)]))
    tolerance, whole = draw(st.floats(0.1, 100)), draw(st.booleans())
    return Lfm2Processor(patch, merge, least, most, tile, *tiles, tolerance, whole)


@st.composite
def llava_next(draw: st.DrawFn) -> LlavaNextProcessor:
    side = draw(st.integers(1, 400))
    canvas = st.tuples(st.integers(1, 9), st.integers(1, 7))
    tiles = draw(st.lists(canvas, min_size=1, max_size=6))
    canvases = tuple((high * side, wide * side) for high, wide in tiles)
    return LlavaNextProcessor(side, draw(st.integers(1, 30)), canvases)


@st.composite
def minicpmv(draw: st.DrawFn) -> MiniCPMVProcessor:
    patch = draw(PATCHES)
    slicing = Slicing(draw(st.integers(patch, 600)), patch * draw(st.integers(1, 4)), 9)
    return MiniCPMVProcessor(slicing, patch, draw(ROWS | st.none()))


@st.composite
def step3vl(draw: st.DrawFn) -> Step3VLProcessor:
    patch = draw(PATCHES)
    side, tile = (4 * patch * draw(st.integers(1, 14)) for _ in range(2))
    return Step3VLProcessor(side, min(side, tile), patch, draw(st.integers(1, 6000)))


PROCESSORS: dict[str, st.SearchStrategy[ImageProcessor]] = {
    "clip": st.builds(LlavaProcessor, SIDES, ROWS, fit=st.sampled_from(Fit)),
    "deepseekocr": deepseekocr(),
    "gemma4": st.builds(Gemma4Processor, PATCHES, st.integers(1, 4), st.integers(1, 3000)),
    "idefics3": st.builds(Idefics3Processor, SIDES.filter(lambda n: n > 2), SIDES, ROWS),
    "idefics3_of_large_images": st.builds(
        Idefics3Processor, st.integers(100, 600), st.integers(4000, 6000), ROWS
    ),
    "internvl": internvl(),
    "kimik25": st.builds(
        KimiVLProcessor, PATCHES, st.integers(1, 4), st.integers(100, 5000), st.just(512)
    ),
    "kimivl": st.builds(KimiVLProcessor, PATCHES, st.integers(1, 4), st.integers(100, 5000)),
    "lfm2": lfm2(),
    "llama4": st.builds(Llama4Processor, SIDES, ROWS, max_tiles=st.integers(1, 20)),
    "llava_next": llava_next(),
    "minicpmv": minicpmv(),
    "mllama": st.builds(MllamaProcessor, SIDES, ROWS, max_tiles=st.integers(1, 8)),
    "muse_glimmer": st.builds(MuseProcessor, SIDES, rows=st.integers(1, 5000)),
    "pixtral": st.builds(PixtralProcessor, SIDES, PATCHES, merge=st.integers(1, 3)),
    "qwen": qwen(),
    "square": st.builds(Gemma3Processor, SIDES, ROWS),
    "step3vl": step3vl(),
}
# Bounds of new slices are searched for, so two kinds are enough.
SLICING = (
    MiniCPMVProcessor(Slicing(56, 14, 3), 14, 5),
    MiniCPMVProcessor(Slicing(64, 16, 3), 4, None),
)
UNSCALED = {"clip", "gemma4", "mllama", "square"}
SCALABLE = {name: each for name, each in PROCESSORS.items() if name not in UNSCALED}
SCALABLE["minicpmv"] = st.sampled_from(SLICING)
LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 1 << 20))
IMAGES = st.one_of(
    st.tuples(LENGTHS, LENGTHS),
    st.builds(lambda side, times: (side, side * times), LENGTHS, st.integers(1, MAX_ASPECT)),
    st.builds(lambda side, times: (side * times, side), LENGTHS, st.integers(1, MAX_ASPECT)),
)


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=25)
@given(data=st.data())
def test_no_image_has_more_rows_or_pixels_than_memory_is_planned_for(name, data) -> None:
    check_bounds(data.draw(PROCESSORS[name]), data)


@pytest.mark.parametrize("name", SCALABLE)
@settings(max_examples=20)
@given(data=st.data())
def test_these_bounds_hold_also_for_images_that_are_scaled_to_a_context(name, data) -> None:
    processor = data.draw(SCALABLE[name])
    rows = data.draw(st.integers(1, 2 * processor.most_rows))
    check_bounds(processor.within(rows), data)


def check_bounds(processor: ImageProcessor, data: st.DataObject) -> None:
    largest, most = processor.largest, processor.most_rows
    assert 1 <= largest.rows <= most
    for height, width in data.draw(st.lists(IMAGES, min_size=1, max_size=8)):
        try:
            outline = processor.outline(height, width)
        except RequestError:
            continue
        assert 1 <= outline.rows <= most
        assert len(outline.shape) == len(largest.shape)
        assert prod(outline.shape) * largest.rows <= prod(largest.shape) * most


def every_image(sides: int) -> Iterator[tuple[int, int]]:
    """All sizes whose shorter side is at most `sides`, with an allowed aspect."""
    for short in range(1, sides + 1):
        for long in range(short, MAX_ASPECT * short + 1):
            yield short, long
            yield long, short


SMALL: list[ImageProcessor] = [
    *(BoundedProcessor(1, 2, least, 53, CLIP) for least in (1, 20, 53)),
    *(BoundedProcessor(3, 1, least, 211, CLIP) for least in (1, 100, 211)),
    *(BoundedProcessor(2, 2, least, 900, CLIP) for least in (1, 450, 900)),
    *(Gemma4Processor(1, 2, tokens) for tokens in (1, 7, 12, 53)),
    *(Idefics3Processor(4, edge, 1) for edge in (1, 3, 4, 5, 11, 12, 13)),
    *(PixtralProcessor(edge, 3) for edge in (1, 2, 3, 4, 11, 12)),
    *(DeepseekOCRProcessor(8, 5, 1, max_tiles=most) for most in (0, 2, 9)),
    DeepseekOCRProcessor(8, 6, 1, max_tiles=6, queries=(9, 16)),
    *(InternVLProcessor(2, 1, CLIP, least, 7) for least in (1, 5, 7)),
    Lfm2Processor(1, 1, 1, 9, 4, 2, 5, tolerance=1.0),
    LlavaNextProcessor(2, 3, ((2, 10), (8, 2), (4, 4))),
    MiniCPMVProcessor(Slicing(32, 4), 4, 3),
    *(MiniCPMVProcessor(Slicing(32, unit), 4, None) for unit in (4, 8)),
]


@pytest.mark.parametrize("processor", SMALL)
def test_the_processor_can_produce_the_largest_image(processor) -> None:
    """No other image has more pixels, and the bound of rows is nearly reached."""
    sides = 10 if isinstance(processor, MiniCPMVProcessor | PixtralProcessor) else 4
    made = {processor.outline(*size) for size in every_image(sides)}
    largest = processor.largest
    assert largest in made
    assert max(outline.rows for outline in made) >= 0.8 * processor.most_rows
    assert prod(largest.shape) >= 0.9 * max(prod(outline.shape) for outline in made)


@given(data=st.data())
def test_no_part_of_minicpmv_is_larger_than_memory_is_planned_for(data) -> None:
    processor = data.draw(minicpmv())
    for height, width in data.draw(st.lists(IMAGES, min_size=1, max_size=20)):
        if max(height, width) <= MAX_ASPECT * min(height, width):
            parts = processor.slicing.parts(height, width)
            for size in (parts.overview, parts.slice_size):
                assert prod(size) <= processor.slicing.largest_area


@pytest.mark.parametrize("unit", [28, 32])
@given(least=st.integers(3136, 200_000), most=st.integers(3136, 1 << 24))
def test_the_largest_image_of_qwen_nearly_fills_the_planned_memory(unit, least, most) -> None:
    """So that encoding it at start tests whether there is enough memory."""
    least, most = min(least, most), max(least, most)
    processor = BoundedProcessor(unit // 2, 2, least, most, CLIP)
    assert processor.largest.rows >= 0.9 * processor.most_rows


def test_qwen_fills_its_area_exactly_if_a_rectangle_does() -> None:
    """2 << 20 pixels, the bound of files that state none, hold 2,674 squares of 28 pixels."""
    processor = BoundedProcessor(14, 2, 56 * 56, 2 << 20, CLIP)
    assert processor.most_rows == processor.largest.rows == 2674 == 14 * 191
    assert processor.largest.grid == (14, 191)


@pytest.mark.parametrize("most", [1, 2, 3, 53, 2674, 16_384])
def test_rectangles_are_maximal_and_begin_with_the_nearest_square(
    most: int,
) -> None:
    found = list(rectangles(most))
    assert [rows for rows, _ in found] == list(range(isqrt(most), 0, -1))
    assert all(rows * columns <= most < rows * (columns + 1) for rows, columns in found)
    assert found[-1] == (1, most)
