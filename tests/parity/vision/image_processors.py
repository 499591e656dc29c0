"""The table of image processors: settings of ours, and the result of `transformers` for an image.

`test_image_processors.py` checks every row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from PIL import ImageOps
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    HunYuanVLImageProcessorPil,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor as LlavaNextText
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_all_supported_aspect_ratios,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from model_zoo.images.bounded_area import Growth
from model_zoo.images.normalise import CLIP, IMAGENET, STANDARD, Normalisation
from model_zoo.images.prepared import ImageProcessor
from model_zoo.images.slicing import Slicing
from model_zoo.layers.vision.patches import squares
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.gemma3.image_processor import Gemma3Processor
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
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
from tests.parity.vision.lfm2_pixels import lfm2_parts, patches_in_blocks
from tests.parity.vision.llama4_pixels import llama4_tiles
from tests.parity.vision.step3vl_pixels import step3vl_views
from tests.parity.vision.without_torchvision import original

SQUARE = {"height": 56, "width": 56}
CANVASES = ((56, 112), (112, 56), (112, 112), (168, 56), (56, 168))


@dataclass(frozen=True)
class Expected:
    """`grid` is None where the processor of `transformers` does not tell it."""

    pixels: Tensor
    grid: tuple[int, int] | None
    rows: int


Image = np.ndarray  # [height, width, 3]
Row = tuple[ImageProcessor, Callable[[Image], Expected]]


def applied(processor: Any, image: Image) -> Any:
    return processor(image, return_tensors="pt", input_data_format="channels_last")


def square(ours: ImageProcessor, theirs: Any, rows: int) -> Row:
    """Of every image one square, which has so many rows."""

    def expected(image: Image) -> Expected:
        return Expected(applied(theirs, image)["pixel_values"][0], (1, 1), rows)

    return ours, expected


def deepseekocr(most: int, queries: tuple[int, int] | None = None) -> Row:
    """Tiles are those of DeepSeek-OCR 2 in both models; the whole image is made as by the authors'
    code, from which that of `transformers` differs where a half is rounded."""
    theirs = DeepseekOcr2ImageProcessorPil(
        size={"height": 64, "width": 64}, tile_size=40, max_patches=most
    )

    def expected(image: Image) -> Expected:
        whole = ImageOps.pad(Pillow.fromarray(image), (64, 64), color=(127, 127, 127))
        plane = torch.from_numpy(np.array(whole)).permute(2, 0, 1).float() / 255
        patches, made = [squares((plane[None] - 0.5) / 0.5, 4)], applied(theirs, image)
        whole_rows = (queries[1] if queries else 4 * 5) + 1
        if not made["num_local_patches"][0]:
            return Expected(patches[0][0], (1, 1), whole_rows)
        columns, rows = get_optimal_tiled_canvas(image.shape[:2], (40, 40), 2, most)
        patches.insert(0, squares(torch.as_tensor(np.stack(made["pixel_values_local"])), 4))
        tiled = rows * columns * queries[0] if queries else 3 * rows * (3 * columns + 1)
        pixels = torch.cat([views.flatten(0, 1) for views in patches])
        return Expected(pixels, (rows, columns), tiled + whole_rows)

    ours = DeepseekOCRProcessor(side=64, tile=40, patch=4, max_tiles=most, queries=queries)
    return ours, expected


def gemma4(tokens: int, patch: int, pool: int) -> Row:
    options = {"max_soft_tokens": tokens, "patch_size": patch, "pooling_kernel_size": pool}

    def expected(image: Image) -> Expected:
        made = applied(Gemma4ImageProcessorPil(**options), image)
        rows = int(made["num_soft_tokens_per_image"][0])
        right, down = (made["image_position_ids"][0, rows * pool**2 - 1] + 1).tolist()
        patches = made["pixel_values"][0, : down * right].view(down, right, patch, patch, 3)
        pixels = patches.permute(4, 0, 2, 1, 3).reshape(3, down * patch, right * patch)
        return Expected(pixels, (down // pool, right // pool), rows)

    return Gemma4Processor(patch=patch, pool=pool, tokens=tokens), expected


def idefics3(edge: int) -> Row:
    theirs = Idefics3ImageProcessorPil(
        size={"longest_edge": edge},
        max_image_size={"longest_edge": 56},
        do_image_splitting=True,
        return_row_col_info=True,
    )

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        pixels = made["pixel_values"][0]
        grid = made["rows"][0][0] or 1, made["cols"][0][0] or 1
        return Expected(pixels, grid, 4 * len(pixels))

    return Idefics3Processor(side=56, longest_edge=edge, tile_rows=4), expected


def internvl(least: int, most: int) -> Row:
    options = {"crop_to_patches": True, "min_patches": least, "max_patches": most}

    def expected(image: Image) -> Expected:
        made = applied(GotOcr2ImageProcessorPil(size=SQUARE, **options), image)
        return Expected(made["pixel_values"], None, 4 * made["num_patches"][0])

    return InternVLProcessor(56, 4, CLIP, min_tiles=least, max_tiles=most), expected


def kimivl(limit: int) -> Row:
    """As the authors' code computes it, which `transformers` does not have."""

    def expected(image: Image) -> Expected:
        picture = Pillow.fromarray(image)
        count = (picture.width // 14) * (picture.height // 14)
        if count > limit:
            scale = (limit / count) ** 0.5
            size = int(picture.width * scale), int(picture.height * scale)
            picture = picture.resize(size, Pillow.Resampling.BICUBIC)
        right, bottom = -picture.width % 28, -picture.height % 28
        padded = np.pad(np.asarray(picture), ((0, bottom), (0, right), (0, 0)))
        grid = padded.shape[0] // 28, padded.shape[1] // 28
        pixels = torch.from_numpy(padded).permute(2, 0, 1).float() / 255
        return Expected((pixels - 0.5) / 0.5, grid, grid[0] * grid[1])

    return KimiVLProcessor(patch=14, merge=2, patches=limit), expected


def kimik25(limit: int, side: int) -> Row:
    module = original("transformers.models.kimi_k25.image_processing_kimi_k25")

    def expected(image: Image) -> Expected:
        small, padded = module.navit_resize(*image.shape[:2], 14, 2, limit, side)
        picture = Pillow.fromarray(image).resize(small[::-1], Pillow.Resampling.BICUBIC)
        canvas = np.zeros((*padded, 3), np.uint8)
        canvas[: small[0], : small[1]] = np.asarray(picture)
        pixels, grid = torch.from_numpy(canvas).permute(2, 0, 1).float() / 255, padded
        rows, columns = grid[0] // 28, grid[1] // 28
        return Expected((pixels - 0.5) / 0.5, (rows, columns), rows * columns)

    return KimiVLProcessor(patch=14, merge=2, patches=limit, side=side), expected


def muse_glimmer(rows: int) -> Row:
    """Pillow's filter is that of torchvision 0.27 on a CPU, for 8-bit pixels."""
    module = original("transformers.models.muse_glimmer.image_processing_muse_glimmer")

    def expected(image: Image) -> Expected:
        size = module.smart_resize(*image.shape[:2], patch_size=28, max_tokens=rows)
        picture = Pillow.fromarray(image).resize(size[::-1], Pillow.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        grid = size[0] // 28, size[1] // 28
        return Expected((pixels - 0.5) / 0.5, grid, grid[0] * grid[1])

    return MuseProcessor(28, rows), expected


def lfm2(least: int, most: int, tolerance: float = 2.0, **changes: Any) -> Row:
    """With tiles of 56 pixels, whose patches of 7 are merged two by two."""
    settings = {
        "encoder_patch_size": 7,
        "tile_size": 56,
        "min_tiles": least,
        "max_tiles": most,
        "min_image_tokens": 4,
        "max_image_tokens": 40,
        "max_pixels_tolerance": tolerance,
        **changes,
    }
    ours = Lfm2Processor(
        7, 2, 4, 40, 56, least, most, tolerance, settings.get("use_thumbnail", True)
    )

    def expected(image: Image) -> Expected:
        made = lfm2_parts(image, **settings)
        pixels = patches_in_blocks(made, patch=7, merge=2)
        return Expected(pixels, image.shape[:2], len(pixels) // 4)

    return ours, expected


def llama4(most: int) -> Row:
    def expected(image: Image) -> Expected:
        pixels, grid = llama4_tiles(image, side=56, max_tiles=most, resize="pillow")
        return Expected(pixels, grid, 4 * len(pixels))

    return Llama4Processor(side=56, tile_rows=4, max_tiles=most), expected


def llava_next() -> Row:
    theirs = LlavaNextImageProcessorPil(
        size={"shortest_edge": 56}, crop_size=SQUARE, image_grid_pinpoints=[*map(list, CANVASES)]
    )
    text = SimpleNamespace(image_processor=theirs, patch_size=14, num_additional_image_tokens=0)
    text._get_unpadded_features = partial(LlavaNextText._get_unpadded_features, text)

    def expected(image: Image) -> Expected:
        size = image.shape[:2]
        rows = LlavaNextText._get_number_of_features(text, *size, 56, 56)
        return Expected(applied(theirs, image)["pixel_values"][0], size, rows)

    return LlavaNextProcessor(side=56, tile_edge=4, canvases=CANVASES), expected


def minicpmv() -> Row:
    """The processor of MiniCPM-V 4.6, which merges two by two patches, as patches of twice the
    side: the sides of parts are multiples of it."""
    half, processor = 7, MiniCPMVProcessor(Slicing(side=56, unit=14), patch=14, part_rows=5)
    theirs = MiniCPMV4_6ImageProcessorPil(
        scale_resolution=56, patch_size=half, downsample_mode="4x"
    )

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        sizes = [tuple(size) for size in np.asarray(made["target_sizes"]).tolist()]
        lines = torch.as_tensor(made["pixel_values"])[0].split(
            [half * rows * columns for rows, columns in sizes], dim=2
        )
        parts = []
        for (rows, columns), line in zip(sizes, lines, strict=True):
            patches = line.view(3, half, rows, columns, half).permute(0, 2, 1, 3, 4)
            parts.append(squares(patches.reshape(1, 3, rows * half, columns * half), 14)[0])
        return Expected(torch.cat(parts), image.shape[:2], 5 * len(parts))

    return processor, expected


def minicpmv46() -> Row:
    slicing = Slicing(side=64, unit=16)
    processor = MiniCPMVProcessor(slicing, patch=4, part_rows=None)
    theirs = MiniCPMV4_6ImageProcessorPil(scale_resolution=64, patch_size=4)

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        counts = np.asarray(made["target_sizes"]).prod(1).tolist()
        patches = torch.as_tensor(made["pixel_values"])[0].unflatten(2, (-1, 4))
        return Expected(patches.permute(2, 0, 1, 3).flatten(1), image.shape[:2], sum(counts) // 16)

    return processor, expected


def mllama(most: int) -> Row:
    """Slots without a tile are zeros."""
    theirs = MllamaImageProcessorPil(
        size=SQUARE, max_image_tiles=most, image_mean=list(CLIP.mean), image_std=list(CLIP.std)
    )

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        grid = get_all_supported_aspect_ratios(most)[made["aspect_ratio_ids"][0, 0] - 1]
        assert grid[0] * grid[1] == made["num_tiles"][0][0]
        return Expected(made["pixel_values"][0, 0], grid, 17 * most)

    return MllamaProcessor(side=56, tile_rows=17, max_tiles=most), expected


def pixtral(merge: int) -> Row:
    side = 14 * merge
    theirs = PixtralImageProcessorPil(size={"longest_edge": 420}, patch_size=side)

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        height, width = made["image_sizes"][0]
        grid = height // side, width // side
        return Expected(made["pixel_values"][0], grid, grid[0] * grid[1])

    return PixtralProcessor(longest_edge=420, patch=14, merge=merge), expected


def qwen(patch: int, normalisation: Normalisation, least: int, most: int) -> Row:
    theirs = Qwen2VLImageProcessorPil(
        patch_size=patch,
        size={"shortest_edge": least, "longest_edge": most},
        image_mean=list(normalisation.mean),
        image_std=list(normalisation.std),
    )
    return patches(BoundedProcessor(patch, 2, least, most, normalisation), theirs)


def glm(least: int, most: int) -> Row:
    """Its areas count both frames of a patch."""
    theirs = Glm4vImageProcessorPil(size={"shortest_edge": 2 * least, "longest_edge": 2 * most})
    return patches(BoundedProcessor(14, 2, least, most, CLIP, grows=Growth.BOTH), theirs)


def step3vl(edge: int) -> Row:
    """The lines of windows, found by the marker that the processor writes after each."""

    def expected(image: Image) -> Expected:
        made = step3vl_views(image, side=64, tile=48, edge=edge)
        whole = squares(made["pixel_values"], 4).flatten(0, 1)
        count = int(made["num_local_patches"][0])
        if not count:
            return Expected(whole, (0, 0), 16)
        windows = squares(made["pixel_values_local"], 4).flatten(0, 1)
        lines = 1 + sum(made["patch_newline_masks"][0])
        return Expected(torch.cat([windows, whole]), (lines, count // lines), 16 + 9 * count)

    return Step3VLProcessor(64, 48, 4, longest_edge=edge), expected


def patches(ours: BoundedProcessor, theirs: Any) -> Row:
    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        rows, columns = (side // 2 for side in made["image_grid_thw"][0, 1:].tolist())
        first, second = made["pixel_values"].unflatten(1, (3, 2, -1)).unbind(2)
        assert torch.equal(first, second), "the frames of an image are equal"
        return Expected(first.flatten(1), (rows, columns), rows * columns)

    return ours, expected


def hunyuan(patch: int, least: int, most: int) -> Row:
    size = {"shortest_edge": least, "longest_edge": most}
    theirs = HunYuanVLImageProcessorPil(patch_size=patch, size=size)

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        lines, columns = (side // 2 for side in made["image_grid_thw"][0, 1:].tolist())
        squares = made["pixel_values"].view(lines, 2, columns, 2, -1).transpose(1, 2)
        return Expected(squares.flatten(0, 3), (lines, columns), 1 + lines * (columns + 1) + 1)

    return HunyuanProcessor(BoundedProcessor(patch, 2, least, most, CLIP)), expected


def paddleocr(least: int, most: int) -> Row:
    size = {"shortest_edge": least, "longest_edge": most}
    theirs = PaddleOCRVLImageProcessorPil(size=size)

    def expected(image: Image) -> Expected:
        made = applied(theirs, image)
        rows, columns = (side // 2 for side in made["image_grid_thw"][0, 1:].tolist())
        squares = made["pixel_values"].view(rows, 2, columns, 2, -1).transpose(1, 2)
        return Expected(squares.flatten(0, 3), (rows, columns), rows * columns)

    return BoundedProcessor(14, 2, least, most, CLIP, grows=Growth.IN_TURN), expected


CROP = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}
PROCESSORS: Mapping[str, Row] = {
    "clip": square(LlavaProcessor(side=56, rows=16), CLIPImageProcessorPil(**CROP), 16),
    "deepseekocr": deepseekocr(9),
    "deepseekocr of four tiles": deepseekocr(4),
    "deepseekocr2": deepseekocr(6, (9, 16)),
    "gemma3": square(Gemma3Processor(side=56, rows=4), Gemma3ImageProcessorPil(size=SQUARE), 4),
    "gemma4": gemma4(tokens=70, patch=4, pool=3),
    "glm4v": glm(6272, 200_000),
    "hunyuan_vl": hunyuan(16, 65_536, 300_000),
    "idefics3": idefics3(224),
    "idefics3 of an odd edge": idefics3(205),
    "idefics3 of one tile": idefics3(56),
    "internvl": internvl(1, 12),
    "internvl of several tiles": internvl(2, 6),
    "internvl of one tile": internvl(1, 1),
    "kimivl": kimivl(100),
    "kimik25": kimik25(100, 512),
    "kimik25 of short images": kimik25(900, 40),
    "lfm2": lfm2(2, 10),
    "lfm2 without the whole of a large image": lfm2(3, 6, 8.0, use_thumbnail=False),
    "llama4": llama4(16),
    "llama4 of four tiles": llama4(4),
    "llama4 of one tile": llama4(1),
    "llava padded to a square": square(
        LlavaProcessor(side=56, rows=16, fit=Fit.PADDED),
        LlavaImageProcessorPil(**CROP, do_pad=True),
        16,
    ),
    "llava_next": llava_next(),
    "moondream": square(
        LlavaProcessor(side=56, rows=16, fit=Fit.STRETCHED, normalisation=STANDARD),
        SiglipImageProcessorPil(size=SQUARE),
        16,
    ),
    "minicpmv": minicpmv(),
    "muse_glimmer": muse_glimmer(4096),
    "muse_glimmer of small images": muse_glimmer(30),
    "minicpmv46": minicpmv46(),
    "mllama": mllama(4),
    "mllama of six tiles": mllama(6),
    "mllama of one tile": mllama(1),
    "paddleocr": paddleocr(6272, 200_000),
    "pixtral": pixtral(merge=2),
    "pixtral without merging": pixtral(merge=1),
    "qwen2.5": qwen(14, CLIP, 3136, 200_000),
    "qwen3": qwen(16, STANDARD, 65_536, 300_000),
    "qwen of small images": qwen(14, IMAGENET, 1, 9_000),
    "step3vl": step3vl(3024),
}
