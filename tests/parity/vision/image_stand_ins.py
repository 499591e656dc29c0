"""Stand-ins for image processors of `transformers` that need torchvision, in whole processors."""

from typing import Any

import numpy as np

from model_zoo.images.prepared import prepare
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from tests.parity.vision.lfm2_pixels import lfm2_parts
from tests.parity.vision.step3vl_pixels import step3vl_views


class Tiles:
    """Stands in for the library's processor of Llama 4's images, which needs torchvision."""

    def __init__(self, ours: Llama4Processor) -> None:
        self._ours = ours

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        made = [prepare(np.asarray(image), self._ours, tower=b"") for image in images]
        pixels = np.zeros((1, 3, self._ours.side, self._ours.side))
        return {"pixel_values": pixels, "aspect_ratios": [image.grid for image in made]}


class OcrViews:
    """Stands in for the library's processor of DeepSeek-OCR's images, which needs torchvision."""

    def __init__(self, ours: DeepseekOCRProcessor) -> None:
        self._ours = ours
        self.size, self.tile_size = {"height": ours.side, "width": ours.side}, ours.tile

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        made = [prepare(np.asarray(image), self._ours, tower=b"") for image in images]
        grids = [list(reversed(image.grid)) for image in made]
        counts = [0 if grid == [1, 1] else grid[0] * grid[1] for grid in grids]
        return {"num_local_patches": counts, "patches_grid": grids}


class StepViews:
    """Stands in for the library's processor of Step 3 VL's images, which needs torchvision."""

    downsampler_stride = 4

    def __init__(self, ours: Step3VLProcessor) -> None:
        self._ours = ours
        self.size, self.patch_size = {"height": ours.side}, ours.tile
        self.vision_patch_size = ours.patch

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        settings = {"side": self._ours.side, "tile": self._ours.tile}
        made = [step3vl_views(np.asarray(image), edge=3024, **settings) for image in images]
        names = "num_local_patches", "patch_newline_masks"
        return {name: [_plain(one.get(name, [[]])[0]) for one in made] for name in names}


class Lfm2Parts:
    """Stands in for the library's processor of LFM2-VL's images, which needs torchvision."""

    tile_size, encoder_patch_size, downsample_factor, use_thumbnail = 56, 7, 2, True

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        settings = {"encoder_patch_size": 7, "tile_size": 56, "max_image_tokens": 20}
        settings |= {"min_image_tokens": 4, "max_pixels_tolerance": 1.5}
        pictures = [picture for of_text in images for picture in of_text]
        made = [lfm2_parts(np.asarray(picture), **settings) for picture in pictures]
        names = "image_rows", "image_cols", "image_sizes"
        return {name: [_plain(one[name][0]) for one in made] for name in names}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
