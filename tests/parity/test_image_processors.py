"""What image processors make of pictures, against those of `transformers`."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3 import image_processing_pil_idefics3
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor as LlavaNextText
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from model_zoo.images.normalise import CLIP, IMAGENET, STANDARD
from model_zoo.images.prepared import ImageProcessor
from model_zoo.images.resize import Filter
from model_zoo.models.gemma3.image_processor import SquareProcessor
from model_zoo.models.gemma4 import vision as gemma4
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.idefics3 import image_processor as idefics3
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl import vision as internvl
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llava.image_processor import ClipProcessor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mllama import vision as mllama
from model_zoo.models.mllama.image_processor import MllamaProcessor, aspect_ratio_id, tile_mask
from model_zoo.models.qwen25vl import multimodal as qwen25vl
from model_zoo.multimodal.qwen_image_processor import QwenVLProcessor
from runtime.errors import RequestError
from runtime.vision.encoder import PreparedImage
from tests.parity.llama4_pixels import llama4_tiles
from tests.pictures import photo

# (height, width): a dot, strips, odd ones, exactly a tile or two, larger than most canvases
STRIPS = [(17, 1000), (1000, 17)]
SIZES = [(1, 1), (5, 3), *STRIPS, (56, 56), (112, 56), (57, 56), (333, 517), (500, 290)]
LARGE = [(700, 1100), (1210, 640)]
every_size = pytest.mark.parametrize("size", SIZES + LARGE, ids=str)

clip_values = {"image_mean": list(CLIP.mean), "image_std": list(CLIP.std)}
square = {"height": 56, "width": 56}


def prepared(processor: ImageProcessor, image: np.ndarray) -> PreparedImage:
    """With what holds for each of them."""
    made = processor.prepare(image, tower=b"")
    assert made.pixels.dtype == torch.float32 and made.pixels.is_contiguous()
    assert 1 <= made.rows <= processor.most_rows
    return made


def reference(processor: Any, image: np.ndarray) -> Any:
    return processor(image, return_tensors="pt", input_data_format="channels_last")


def same(ours: Tensor, theirs: Tensor) -> None:
    """To the last bits of float32; asked for is 1/255."""
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@every_size
def test_gemma3_stretches_to_a_square(size: tuple[int, int]) -> None:
    image = photo(*size)
    theirs = reference(Gemma3ImageProcessorPil(size=square), image)
    made = prepared(SquareProcessor(side=56, rows=4), image)
    same(made.pixels, theirs["pixel_values"][0])
    assert (made.grid, made.rows) == ((1, 1), 4)


@every_size
def test_siglip_stretches_with_the_bicubic_filter(size: tuple[int, int]) -> None:
    image = photo(*size)
    theirs = reference(SiglipImageProcessorPil(size=square), image)
    made = prepared(SquareProcessor(side=56, rows=16, resample=Filter.BICUBIC), image)
    same(made.pixels, theirs["pixel_values"][0])


@every_size
def test_clip_takes_the_middle(size: tuple[int, int]) -> None:
    image = photo(*size)
    theirs = reference(CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=square), image)
    same(prepared(ClipProcessor(side=56, rows=16), image).pixels, theirs["pixel_values"][0])


@every_size
def test_llava_may_pad_to_a_square_of_the_mean_colour(size: tuple[int, int]) -> None:
    image = photo(*size)
    options = {"size": {"shortest_edge": 56}, "crop_size": square, "do_pad": True}
    theirs = reference(LlavaImageProcessorPil(**options), image)
    made = prepared(ClipProcessor(side=56, rows=16, whole=True), image)
    same(made.pixels, theirs["pixel_values"][0])


def test_padding_a_few_rows_at_a_time_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = ClipProcessor(side=56, rows=16, whole=True)
    images = photo(400, 130), photo(130, 400)
    at_once = [processor.prepare(image, tower=b"").pixels for image in images]
    monkeypatch.setattr("model_zoo.images.resize.BAND_PIXELS", 3 * 400)
    for image, pixels in zip(images, at_once, strict=True):
        assert torch.equal(processor.prepare(image, tower=b"").pixels, pixels)


@every_size
@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral_keeps_the_shape(size: tuple[int, int], merge: int) -> None:
    image = photo(*size)
    options = {"size": {"longest_edge": 420}, "patch_size": 14 * merge}
    theirs = reference(PixtralImageProcessorPil(**options), image)
    made = prepared(PixtralProcessor(longest_edge=420, patch=14, merge=merge), image)
    same(made.pixels, theirs["pixel_values"][0])
    height, width = theirs["image_sizes"][0]
    assert made.grid == (height // (14 * merge), width // (14 * merge))
    assert made.rows == made.grid[0] * made.grid[1]


def test_pixtral_keeps_a_row_of_an_image_that_shrinks_to_nothing() -> None:
    made = prepared(PixtralProcessor(longest_edge=420, patch=14), photo(1, 900))
    assert made.grid == (1, 30)


@every_size
@pytest.mark.parametrize(
    ("patch", "normalisation", "bounds"),
    [(14, CLIP, (3136, 200_000)), (16, STANDARD, (65_536, 300_000)), (14, IMAGENET, (1, 9_000))],
    ids=["qwen2.5", "qwen3", "small"],
)
def test_qwen_makes_patches_in_the_order_of_merging(
    size: tuple[int, int], patch: int, normalisation: Any, bounds: tuple[int, int]
) -> None:
    image = photo(*size)
    least, most = bounds
    theirs = reference(
        Qwen2VLImageProcessorPil(
            patch_size=patch,
            size={"shortest_edge": least, "longest_edge": most},
            image_mean=list(normalisation.mean),
            image_std=list(normalisation.std),
        ),
        image,
    )
    made = prepared(QwenVLProcessor(patch, 2, 2, least, most, normalisation), image)
    same(made.pixels, theirs["pixel_values"])
    _, rows, columns = theirs["image_grid_thw"][0]
    assert made.grid == (rows // 2, columns // 2)


def test_qwen_refuses_what_the_reference_refuses() -> None:
    processor = QwenVLProcessor(14, 2, 2, 3136, 200_000, CLIP)
    prepared(processor, photo(3, 600))
    for size in [(3, 601), (601, 3)]:
        with pytest.raises(ValueError, match="aspect ratio"):
            reference(Qwen2VLImageProcessorPil(), photo(*size))
        with pytest.raises(RequestError, match="at most 200 times as long as wide"):
            prepared(processor, photo(*size))


@every_size
@pytest.mark.parametrize("most", [1, 4, 16])
def test_llama4_cuts_tiles_and_adds_the_whole(size: tuple[int, int], most: int) -> None:
    image = photo(*size)
    theirs, grid = llama4_tiles(image, side=56, max_tiles=most, resize="pillow")
    made = prepared(Llama4Processor(side=56, tile_rows=4, max_tiles=most), image)
    assert made.grid == grid
    same(made.pixels, theirs)
    assert made.rows == 4 * len(theirs)


@every_size
def test_llama4_is_within_a_level_of_the_resizing_of_torch(size: tuple[int, int]) -> None:
    image = photo(*size)
    theirs, _ = llama4_tiles(image, side=56, max_tiles=16, resize="torch")
    made = prepared(Llama4Processor(side=56, tile_rows=4), image)
    levels = (made.pixels - theirs) * 0.5 * 255
    assert levels.abs().max() <= 1.001


@every_size
@pytest.mark.parametrize("most", [1, 4, 6])
def test_mllama_fills_slots_with_tiles_and_zeros(size: tuple[int, int], most: int) -> None:
    image = photo(*size)
    options = clip_values | {"size": square, "max_image_tiles": most}
    theirs = reference(MllamaImageProcessorPil(**options), image)
    made = prepared(MllamaProcessor(side=56, tile_rows=17, max_tiles=most), image)
    same(made.pixels, theirs["pixel_values"][0, 0])
    assert aspect_ratio_id(made.grid, most) == theirs["aspect_ratio_ids"][0, 0]
    assert torch.equal(tile_mask(made.grid, most), theirs["aspect_ratio_mask"][0, 0].bool())
    assert tile_mask(made.grid, most).sum() == theirs["num_tiles"][0][0]
    assert made.rows == 17 * most


@every_size
@pytest.mark.parametrize("tiles", [(1, 12), (2, 6), (1, 1)], ids=str)
def test_internvl_takes_the_nearest_grid(size: tuple[int, int], tiles: tuple[int, int]) -> None:
    image = photo(*size)
    least, most = tiles
    options = {"size": square, "crop_to_patches": True, "min_patches": least, "max_patches": most}
    theirs = reference(GotOcr2ImageProcessorPil(**options), image)
    made = prepared(InternVLProcessor(56, 4, CLIP, min_tiles=least, max_tiles=most), image)
    same(made.pixels, theirs["pixel_values"])
    assert made.rows == 4 * theirs["num_patches"][0]


@every_size
@pytest.mark.parametrize("edge", [224, 205, 56])
def test_idefics3_splits_at_one_longest_edge(size: tuple[int, int], edge: int) -> None:
    idefics3_agrees(photo(*size), edge)


@every_size
def test_idefics3_scales_no_edge_beyond_a_bound(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = image_processing_pil_idefics3.MAX_IMAGE_SIZE
    assert idefics3.MAX_EDGE == bound == 4096
    monkeypatch.setattr(idefics3, "MAX_EDGE", 150)  # the real one takes long
    monkeypatch.setattr(image_processing_pil_idefics3, "MAX_IMAGE_SIZE", 150)
    idefics3_agrees(photo(*size), 224)


def idefics3_agrees(image: np.ndarray, edge: int) -> None:
    options = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": 56}}
    theirs = reference(Idefics3ImageProcessorPil(**options, return_row_col_info=True), image)
    made = prepared(Idefics3Processor(side=56, longest_edge=edge, tile_rows=4), image)
    same(made.pixels, theirs["pixel_values"][0])
    split = (theirs["rows"][0][0], theirs["cols"][0][0])
    assert made.grid == (split if split != (0, 0) else (1, 1))


@every_size
def test_idefics3_may_show_the_whole_alone(size: tuple[int, int]) -> None:
    image = photo(*size)
    options = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
    theirs = reference(Idefics3ImageProcessorPil(**options, do_image_splitting=False), image)
    made = prepared(Idefics3Processor(56, 224, 4, split=False), image)
    same(made.pixels, theirs["pixel_values"][0])


PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]


@every_size
def test_llava_next_cuts_the_canvas_that_wastes_least(size: tuple[int, int]) -> None:
    image = photo(*size)
    options = {"size": {"shortest_edge": 56}, "crop_size": square}
    images = LlavaNextImageProcessorPil(**options, image_grid_pinpoints=PINPOINTS)
    theirs = reference(images, image)
    canvases = tuple((high, wide) for high, wide in PINPOINTS)
    made = prepared(LlavaNextProcessor(side=56, tile_edge=4, canvases=canvases), image)
    same(made.pixels, theirs["pixel_values"][0])
    text = SimpleNamespace(image_processor=images, patch_size=14, num_additional_image_tokens=0)
    text._get_unpadded_features = partial(LlavaNextText._get_unpadded_features, text)
    assert made.rows == LlavaNextText._get_number_of_features(text, *size, 56, 56)


@every_size
def test_gemma4_fills_its_budget(size: tuple[int, int]) -> None:
    image = photo(*size)
    options = {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}
    theirs = reference(Gemma4ImageProcessorPil(**options), image)
    made = prepared(Gemma4Processor(patch=4, pool=3, tokens=70), image)
    assert made.rows == theirs["num_soft_tokens_per_image"][0]
    patches = made.pixels.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 3, 4, 0).flatten(2)
    same(patches.flatten(0, 1), theirs["pixel_values"][0, : made.rows * 9])
    last = theirs["image_position_ids"][0, made.rows * 9 - 1]  # (column, row) of the last patch
    assert made.grid == ((last[1] + 1) // 3, (last[0] + 1) // 3)


def test_files_that_state_no_limits_mean_those_of_the_reference() -> None:
    """But for the most pixels of Qwen's, for which the reference and its checkpoints differ."""
    assert Qwen2VLImageProcessorPil.size["shortest_edge"] == qwen25vl.LEAST_PIXELS
    assert Gemma4ImageProcessorPil.max_soft_tokens == gemma4.ROWS
    assert GotOcr2ImageProcessorPil.max_patches == internvl.MOST_TILES
    assert MllamaImageProcessorPil.max_image_tiles == mllama.TILES
