"""How image processors choose sizes and tiles: many shapes, against `transformers`."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2
from transformers.models.mllama import image_processing_pil_mllama as mllama
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as paddleocr
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from model_zoo.images.bounded_area import Growth
from model_zoo.images.normalise import CLIP
from model_zoo.images.prepared import ImageProcessor
from model_zoo.images.tiling import best_grid, fitting
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from tests.parity.vision.llama4_pixels import MODULE as LLAMA4
from tests.parity.vision.without_torchvision import original

Size = tuple[int, int]
Grid = Callable[[int, int], Size]


def shapes(count: int, most: int, *, tile: int = 336) -> Iterator[Size]:
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
    module = original(LLAMA4)
    size = module.SizeDict(height=336, width=336)
    resolutions = torch.tensor(module.find_supported_resolutions(16, size))
    for shape in shapes(2000, 9000):
        rows, columns = best_grid(*shape, side=336, most=16)
        canvas = module.get_best_fit(shape, resolutions)
        assert [rows * 336, columns * 336] == canvas.tolist()


def gemma4_grid(height: int, width: int) -> Size:
    high, wide = gemma4.get_aspect_ratio_preserving_size(height, width, 2, 70 * 9, 3)
    return high // 6, wide // 6


def pixtral_grid(height: int, width: int) -> Size:
    """A side of zero, for which the reference fails, is one here."""
    image = np.broadcast_to(np.uint8(0), (height, width, 3))
    high, wide = pixtral.get_resize_output_image_size(image, 100, 7, "channels_last")
    return max(high // 7, 1), max(wide // 7, 1)


def lighton_grid(height: int, width: int) -> Size:
    """Half the patches of the reference, rounded up; LightOnOcrProcessor rounds down."""
    rows, columns = pixtral_grid(height, width)
    return (rows + 1) // 2, (columns + 1) // 2


def internvl_grid(tiles: Size) -> Grid:
    def grid(height: int, width: int) -> Size:
        columns, rows = got_ocr2.get_optimal_tiled_canvas((height, width), (28, 28), *tiles)
        return rows, columns

    return grid


def qwen_grid(least: int, most: int) -> Grid:
    def grid(height: int, width: int) -> Size:
        high, wide = smart_resize(height, width, 4, least, most)
        return high // 4, wide // 4

    return grid


def glm_grid(least: int, most: int) -> Grid:
    def grid(height: int, width: int) -> Size:
        high, wide = glm4v.smart_resize(2, height, width, 2, 28, 2 * least, 2 * most)
        return high // 28, wide // 28

    return grid


def paddle_grid(least: int, most: int) -> Grid:
    def grid(height: int, width: int) -> Size:
        high, wide = paddleocr.smart_resize(height, width, 28, least, most)
        return high // 28, wide // 28

    return grid


EDGES = (55, 56, 112, 113)
CANVASES = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
ROWS: list[tuple[ImageProcessor, Grid | None]] = [
    (Gemma4Processor(patch=2, pool=3, tokens=70), gemma4_grid),
    (PixtralProcessor(longest_edge=100, patch=7), pixtral_grid),
    (PixtralProcessor(longest_edge=100, patch=7, merge=2), lighton_grid),
    *(
        (InternVLProcessor(28, 4, CLIP, *tiles), internvl_grid(tiles))
        for tiles in [(1, 12), (1, 4), (4, 9)]
    ),
    *(
        (BoundedProcessor(2, 2, *bounds, CLIP), qwen_grid(*bounds))
        for bounds in [(16, 64), (100, 110), (3136, 20_000), (4000, 4000)]
    ),
    *(
        (BoundedProcessor(14, 2, *bounds, CLIP, grows=Growth.BOTH), glm_grid(*bounds))
        for bounds in [(1, 9_000), (6272, 100_000)]
    ),
    *(
        (
            BoundedProcessor(14, 2, *bounds, CLIP, grows=Growth.IN_TURN),
            paddle_grid(*bounds),
        )
        for bounds in [(1, 9_000), (6272, 100_000)]
    ),
    *(
        (HunyuanProcessor(BoundedProcessor(2, 2, *bounds, CLIP)), qwen_grid(*bounds))
        for bounds in [(16, 64), (3136, 20_000)]
    ),
    *((Idefics3Processor(side=28, longest_edge=edge, tile_rows=4), None) for edge in EDGES),
    (LlavaNextProcessor(side=28, tile_edge=4, canvases=CANVASES), None),
]


@pytest.mark.parametrize(("processor", "grid"), ROWS, ids=lambda each: type(each).__name__)
def test_grids_are_those_of_the_reference_and_rows_keep_their_bound(
    processor: ImageProcessor, grid: Grid | None
) -> None:
    for height, width in shapes(300, 200, tile=28):
        outline = processor.outline(height, width)
        assert grid is None or outline.grid == grid(height, width)
        assert outline.rows <= processor.most_rows
