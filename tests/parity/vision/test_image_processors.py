"""The results of image processors, against those of `transformers`."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3 import image_processing_pil_idefics3
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from model_zoo.images.normalise import CLIP
from model_zoo.images.prepared import prepare
from model_zoo.layers.vision.patches import squares
from model_zoo.models.gemma4 import vision as gemma4
from model_zoo.models.glm4v import multimodal as glm4v
from model_zoo.models.idefics3 import image_processor as idefics3
from model_zoo.models.internvl import vision as internvl
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from model_zoo.models.lfm2 import multimodal as lfm2
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llava.image_processor import Fit, LlavaProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mllama import vision as mllama
from model_zoo.models.qwen25vl import multimodal as qwen25vl
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from runtime.errors import RequestError
from tests.parity.vision import lfm2_pixels
from tests.parity.vision.image_processors import PROCESSORS, Row, applied, step3vl
from tests.parity.vision.image_processors import idefics3 as idefics3_row
from tests.parity.vision.llama4_pixels import llama4_tiles
from tests.pictures import photo

# (height, width): a dot, strips, odd ones, exactly a tile or two, larger than most canvases
STRIPS = [(17, 1000), (1000, 17)]
SIZES = [(1, 1), (5, 3), *STRIPS, (56, 56), (112, 56), (57, 56), (333, 517), (500, 290)]
LARGE = [(700, 1100), (1210, 640)]
every_size = pytest.mark.parametrize("size", SIZES + LARGE, ids=str)


def check(row: Row, size: tuple[int, int]) -> None:
    """Pixels to the last bits of float32, where 1/255 is required."""
    (processor, reference), image = row, photo(*size)
    made, expected = prepare(image, processor, tower=b""), reference(image)
    assert made.pixels.dtype == torch.float32 and made.pixels.is_contiguous()
    assert made.pixels.shape == expected.pixels.shape
    torch.testing.assert_close(made.pixels, expected.pixels, rtol=0, atol=1e-6)
    assert expected.grid is None or made.grid == expected.grid
    assert 1 <= made.rows == expected.rows <= processor.most_rows


@every_size
@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_grid_and_rows_are_those_of_transformers(name: str, size: tuple[int, int]) -> None:
    check(PROCESSORS[name], size)


@every_size
def test_idefics3_scales_no_edge_beyond_a_bound(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = image_processing_pil_idefics3.MAX_IMAGE_SIZE
    assert idefics3.MAX_EDGE == bound == 4096
    monkeypatch.setattr(idefics3, "MAX_EDGE", 150)  # the real one takes long
    monkeypatch.setattr(image_processing_pil_idefics3, "MAX_IMAGE_SIZE", 150)
    check(idefics3_row(224), size)


@every_size
def test_llama4_is_within_a_level_of_the_resizing_of_torch(size: tuple[int, int]) -> None:
    image = photo(*size)
    theirs, _ = llama4_tiles(image, side=56, max_tiles=16, resize="torch")
    made = prepare(image, Llama4Processor(side=56, tile_rows=4), tower=b"")
    levels = (made.pixels - theirs) * 0.5 * 255
    assert levels.abs().max() <= 1.001


@pytest.mark.parametrize("size", [(333, 517), (1210, 640)], ids=str)
def test_step3vl_cuts_large_images_after_they_are_scaled_down(size: tuple[int, int]) -> None:
    """As in the authors' code and llama.cpp; `transformers` cuts windows from the original."""
    ours, reference = step3vl(150)
    image, scale = photo(*size), 150 / max(size)
    high, wide = (int(length * scale) for length in size)
    scaled = Image.fromarray(image).resize((wide, high), Image.Resampling.BILINEAR)
    made, expected = prepare(image, ours, tower=b""), reference(np.asarray(scaled))
    torch.testing.assert_close(made.pixels, expected.pixels, rtol=0, atol=1e-6)
    assert made.grid == expected.grid != (0, 0)


@pytest.mark.parametrize("size", [(40, 100), (100, 40), (35, 130)], ids=str)
def test_step3vl_pads_windows_that_exceed_the_image(size: tuple[int, int]) -> None:
    """As in the authors' code and llama.cpp; `transformers` stretches them instead."""
    image = photo(*size)
    processor = Step3VLProcessor(64, 48, 4)
    made = prepare(image, processor, tower=b"")
    rows, columns = made.grid
    high, wide = (n * 48 if n > 1 else length for n, length in zip(made.grid, size, strict=True))
    stretched = Image.fromarray(image).resize((wide, high), Image.Resampling.BILINEAR)
    corners = [(48 * x, 48 * y) for y in range(rows) for x in range(columns)]
    cropped = [stretched.crop((x, y, x + 48, y + 48)) for x, y in corners]
    expected = squares(CLIP(np.stack(list(map(np.asarray, cropped)))), 4).flatten(0, 1)
    assert len(cropped) > 1 and torch.equal(made.pixels[: len(expected)], expected)


def test_step3vl_refuses_strips_of_which_windows_would_be_lines() -> None:
    processor = Step3VLProcessor(728, 504, 14)
    assert processor.outline(32, 6400).grid == (1, 202)
    with pytest.raises(RequestError, match="at most 200 times as long as wide"):
        processor.outline(32, 6401)


def test_padding_a_few_rows_at_a_time_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = LlavaProcessor(side=56, rows=16, fit=Fit.PADDED)
    images = photo(400, 130), photo(130, 400)
    at_once = [prepare(image, processor, tower=b"").pixels for image in images]
    monkeypatch.setattr("model_zoo.images.resize.BAND_PIXELS", 3 * 400)
    for image, pixels in zip(images, at_once, strict=True):
        assert torch.equal(prepare(image, processor, tower=b"").pixels, pixels)


def test_pixtral_keeps_a_row_of_an_image_that_shrinks_to_nothing() -> None:
    made = prepare(photo(1, 900), PixtralProcessor(longest_edge=420, patch=14), tower=b"")
    assert made.grid == (1, 30)


def test_qwen_refuses_what_the_reference_refuses() -> None:
    processor = BoundedProcessor(14, 2, 3136, 200_000, CLIP)
    prepare(photo(3, 600), processor, tower=b"")
    for size in [(3, 601), (601, 3)]:
        with pytest.raises(ValueError, match="aspect ratio"):
            applied(Qwen2VLImageProcessorPil(), photo(*size))
        with pytest.raises(RequestError, match="at most 200 times as long as wide"):
            prepare(photo(*size), processor, tower=b"")


def test_kimivl_refuses_images_with_too_many_patches_along_a_side() -> None:
    """As the authors' code refuses 512; those of an allowed shape have fewer."""
    processor = KimiVLProcessor(patch=14, merge=2)
    assert processor.outline(120, 7140).grid == (5, 255)
    for size in [(60, 7141), (7141, 60), (100, 20_000)]:
        with pytest.raises(RequestError, match="at most 56 times as long as wide"):
            processor.outline(*size)
    assert processor.outline(100, 5600).grid[1] <= 255 >= processor.outline(1000, 56_000).grid[1]


def test_files_that_state_no_limits_mean_those_of_the_reference() -> None:
    """But for the most pixels of Qwen's and GLM's, for which the reference and the checkpoints
    differ."""
    assert Qwen2VLImageProcessorPil.size["shortest_edge"] == qwen25vl.LEAST_PIXELS
    assert Glm4vImageProcessorPil.size["shortest_edge"] == 2 * glm4v.LEAST_PIXELS
    assert Gemma4ImageProcessorPil.max_soft_tokens == gemma4.ROWS
    assert GotOcr2ImageProcessorPil.max_patches == internvl.MOST_TILES
    assert MllamaImageProcessorPil.max_image_tiles == mllama.TILES
    theirs = lfm2_pixels.kind()
    assert (theirs.min_tiles, theirs.max_tiles) == lfm2.TILES
    assert (theirs.min_image_tokens, theirs.max_image_tokens) == lfm2.ROWS
    assert (theirs.tile_size, theirs.max_pixels_tolerance) == (lfm2.TILE, lfm2.TOLERANCE)
    assert theirs.resample == lfm2.FILTERS["bilinear"].value
