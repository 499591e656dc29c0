"""The image processor of Llama 4 in `transformers`, without torchvision and in float32."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.parity.vision.without_torchvision import (
    COMMON,
    as_images,
    normalised,
    original,
    resized_by_pillow,
)

MODULE = "transformers.models.llama4.image_processing_llama4"


def _resized_by_torch(images: Tensor, size: Any, resample: Any) -> Tensor:
    """What torchvision does for 8-bit images."""
    assert resample == Image.Resampling.BILINEAR
    target = (size.height, size.width)
    return torch.nn.functional.interpolate(images, target, mode="bilinear", antialias=True)


_RESIZE = {"pillow": resized_by_pillow, "torch": _resized_by_torch}


def llama4_tiles(
    image: np.ndarray, *, side: int, max_tiles: int, resize: str
) -> tuple[Tensor, tuple[int, int]]:
    """image [height, width, 3] -> pixels [tiles, 3, side, side], grid of the tiles."""
    module = original(MODULE)
    processor = module.Llama4ImageProcessor
    made = processor._preprocess(
        SimpleNamespace(resize=_RESIZE[resize], rescale_and_normalize=normalised),
        images=as_images(image),
        size=module.SizeDict(height=side, width=side),
        resample=processor.resample,
        image_mean=processor.image_mean,
        image_std=processor.image_std,
        max_patches=max_tiles,
        resize_to_max_canvas=processor.resize_to_max_canvas,
        **COMMON,
    )
    rows, columns = made["aspect_ratios"][0].tolist()
    return made["pixel_values"], (rows, columns)
