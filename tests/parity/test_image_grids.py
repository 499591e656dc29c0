"""How image processors choose sizes and tiles: many shapes, against `transformers`."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2
from transformers.models.mllama import image_processing_pil_mllama as mllama
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from model_zoo.images.normalise import CLIP
from model_zoo.images.tiles import best_grid, fitting
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.multimodal.qwen_image_processor import QwenVLProcessor
from tests.parity.llama4_pixels import original

SMALL = np.zeros((200, 200, 3), np.uint8)


def shapes(count: int, most: int, *, tile: int = 336) -> Iterator[tuple[int, int]]:
    """Small ones, large ones, narrow ones; multiples of a tile and their neighbours."""
    draw = np.random.default_rng(5)
    for _ in range(count):
        height, width = np.exp(draw.uniform(0, np.log(most), 2)).astype(int).tolist()
        yield height, width
    for _ in range(count // 4):
        sides = draw.integers(1, 6, 2) * tile + draw.integers(-1, 2, 2)
        yield tuple(sides.tolist())


@pytest.mark.parametrize(("side", "most"), [(560, 4), (336, 16), (448, 6)])
def test_tiles_and_the_size_on_them_are_those_of_mllama(side: int, most: int) -> None:
    for height, width in shapes(2000, 9000):
        canvas = mllama.get_optimal_tiled_canvas(height, width, most, side)
        grid = best_grid(height, width, side=side, most=most)
        assert (grid[0] * side, grid[1] * side) == canvas
        theirs = mllama.get_image_size_fit_to_canvas(height, width, *canvas, side)
        assert fitting(height, width, grid=grid, side=side) == theirs


def test_tiles_are_those_of_llama4() -> None:
    module = original()
    size = module.SizeDict(height=336, width=336)
    resolutions = torch.tensor(module.find_supported_resolutions(16, size))
    for shape in shapes(2000, 9000):
        rows, columns = best_grid(*shape, side=336, most=16)
        canvas = module.get_best_fit(shape, resolutions)
        assert [rows * 336, columns * 336] == canvas.tolist()


def test_qwen_resizes_to_the_sides_of_smart_resize_and_keeps_its_bound() -> None:
    for least, most in [(16, 64), (100, 110), (3136, 20_000), (4000, 4000)]:
        processor = QwenVLProcessor(2, 2, 2, least, most, CLIP)
        for height, width in shapes(150, 200, tile=28):
            made = processor.prepare(SMALL[:height, :width], tower=b"")
            theirs = smart_resize(height, width, 4, least, most)
            assert (made.grid[0] * 4, made.grid[1] * 4) == theirs
            assert made.rows <= processor.most_rows


def test_pixtral_resizes_to_the_sides_of_the_reference() -> None:
    processor = PixtralProcessor(longest_edge=100, patch=7)
    for height, width in shapes(300, 200, tile=28):
        image = SMALL[:height, :width]
        made = processor.prepare(image, tower=b"")
        theirs = pixtral.get_resize_output_image_size(image, 100, 7, "channels_last")
        if 0 not in theirs:  # the reference fails
            assert (made.grid[0] * 7, made.grid[1] * 7) == theirs
        assert made.rows <= processor.most_rows


def test_gemma4_resizes_to_the_sides_of_the_reference() -> None:
    processor = Gemma4Processor(patch=2, pool=3, tokens=70)
    for height, width in shapes(300, 200, tile=28):
        made = processor.prepare(SMALL[:height, :width], tower=b"")
        theirs = gemma4.get_aspect_ratio_preserving_size(height, width, 2, 70 * 9, 3)
        assert (made.grid[0] * 6, made.grid[1] * 6) == theirs
        assert made.rows <= processor.most_rows


@pytest.mark.parametrize("tiles", [(1, 12), (1, 4), (4, 9)])
def test_internvl_cuts_the_grid_of_the_reference(tiles: tuple[int, int]) -> None:
    processor = InternVLProcessor(28, 4, CLIP, *tiles)
    for height, width in shapes(300, 200, tile=28):
        made = processor.prepare(SMALL[:height, :width], tower=b"")
        columns, rows = got_ocr2.get_optimal_tiled_canvas((height, width), (28, 28), *tiles)
        assert made.grid == (rows, columns)
        assert made.rows <= processor.most_rows


@pytest.mark.parametrize("edge", [55, 56, 112, 113])
def test_idefics3_keeps_its_bound(edge: int) -> None:
    processor = Idefics3Processor(side=28, longest_edge=edge, tile_rows=4)
    for height, width in shapes(300, 200, tile=28):
        assert processor.prepare(SMALL[:height, :width], tower=b"").rows <= processor.most_rows


def test_llava_next_keeps_its_bound() -> None:
    canvases = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
    processor = LlavaNextProcessor(side=28, tile_edge=4, canvases=canvases)
    for height, width in shapes(300, 200, tile=28):
        assert processor.prepare(SMALL[:height, :width], tower=b"").rows <= processor.most_rows
