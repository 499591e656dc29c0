"""Properties of all image processors: digests, limits of shapes, arithmetic."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from model_zoo.images import resize as resizing
from model_zoo.images.normalise import CLIP, STANDARD, Normalisation
from model_zoo.images.prepared import ImageProcessor, prepare
from model_zoo.images.resize import Filter, resized
from model_zoo.images.tiling import cut, on_canvas
from model_zoo.models.gemma3.image_processor import Gemma3Processor
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llava.image_processor import Fit, LlavaProcessor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mllama.image_processor import MllamaProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from runtime.errors import RequestError
from tests.pictures import photo

PROCESSORS: list[ImageProcessor] = [
    Gemma3Processor(side=28, rows=4),
    LlavaProcessor(side=28, rows=4),
    LlavaProcessor(side=28, rows=4, fit=Fit.PADDED),
    PixtralProcessor(longest_edge=56, patch=14),
    BoundedProcessor(14, 2, 3136, 20_000, CLIP),
    Llama4Processor(side=28, tile_rows=4),
    MllamaProcessor(side=28, tile_rows=5),
    InternVLProcessor(28, 4, CLIP),
    Idefics3Processor(side=28, longest_edge=56, tile_rows=4),
    LlavaNextProcessor(side=28, tile_edge=2, canvases=((28, 56), (56, 28))),
    Gemma4Processor(tokens=70),
]
every_processor = pytest.mark.parametrize(
    "processor", PROCESSORS, ids=lambda processor: type(processor).__name__
)


@every_processor
def test_equal_images_have_equal_digests_and_pixels(processor: ImageProcessor) -> None:
    image = photo(40, 30)
    spread = np.zeros((40, 60, 3), np.uint8)
    spread[:, ::2] = image
    first, second = (prepare(each, processor, tower=b"t") for each in (image, spread[:, ::2]))
    assert first.digest == second.digest and len(first.digest) >= 16
    assert torch.equal(first.pixels, second.pixels)
    assert (first.grid, first.rows) == (second.grid, second.rows)


@every_processor
def test_a_level_of_one_pixel_changes_the_digest(processor: ImageProcessor) -> None:
    image = photo(40, 30)
    changed = image.copy()
    changed[39, 29, 2] ^= 1
    flat = image.reshape(30, 40, 3)  # the same bytes in another shape
    digests = {prepare(each, processor, tower=b"").digest for each in (image, changed, flat)}
    digests.add(prepare(image, processor, tower=b"another").digest)
    assert len(digests) == 4


def test_no_two_processors_share_a_digest() -> None:
    image = photo(40, 30)
    several = [*PROCESSORS, *(replace(each, normalisation=STANDARD) for each in PROCESSORS)]
    several += [replace(PROCESSORS[0], rows=5)]
    distinct = set(several)
    assert len({prepare(image, each, tower=b"").digest for each in distinct}) == len(distinct)


@every_processor
@pytest.mark.parametrize("shape", [(2**12, 16), (16, 2**12), (2**16, 1)], ids=str)
def test_an_extreme_shape_needs_bounded_memory_or_is_refused(
    processor: ImageProcessor, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in Pillow, including intermediate ones, never exceed the limit."""
    monkeypatch.setattr(resizing, "MAX_BETWEEN_PIXELS", 2**16)  # in earnest it is more
    resize = Image.Image.resize

    def watched(image: Image.Image, size: tuple[int, int], *rest: object) -> Image.Image:
        assert size[0] * image.height <= 2**16
        return resize(image, size, *rest)

    monkeypatch.setattr(Image.Image, "resize", watched)
    image = np.broadcast_to(np.uint8(9), (*shape, 3))
    try:
        made = prepare(image, processor, tower=b"")
    except RequestError as error:
        assert "pixels; for this model it may be at most" in str(error)
    else:
        assert made.rows <= processor.most_rows


def test_every_level_is_normalised_as_float32_arithmetic_does() -> None:
    levels = np.arange(256, dtype=np.uint8)
    image = np.stack([levels] * 3, axis=-1)[None]
    normalisation = Normalisation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    made = normalisation(image)
    for channel, (mean, std) in enumerate(zip((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), strict=True)):
        scaled = (levels.astype(np.float64) / 255).astype(np.float32)
        expected = (scaled - np.float32(mean)) / np.float32(std)
        np.testing.assert_allclose(made[channel, 0], expected, rtol=0, atol=1e-6)


def test_tiles_are_cut_row_by_row() -> None:
    image = photo(6, 8)
    tiles = cut(image, 3, 2)
    for index, (row, column) in enumerate(itertools.product(range(3), range(2))):
        expected = image[2 * row : 2 * row + 2, 4 * column : 4 * column + 4]
        np.testing.assert_array_equal(tiles[index], expected)


def test_a_canvas_is_black_around_the_image() -> None:
    image = photo(2, 3)
    canvas = on_canvas(image, 5, 4, top=1)
    np.testing.assert_array_equal(canvas[1:3, :3], image)
    assert canvas.sum() == image.sum()


def test_an_image_of_the_right_size_is_left_alone() -> None:
    image = photo(5, 7)
    assert resized(image, 5, 7, Filter.LANCZOS) is image
