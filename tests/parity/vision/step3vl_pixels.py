"""The image processor of Step 3 VL in `transformers`, without torchvision."""

from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from transformers.image_processing_backends import TorchvisionBackend

from tests.parity.vision.without_torchvision import (
    COMMON,
    as_images,
    normalised,
    original,
    resized_by_pillow,
)

MODULE = "transformers.models.step3p7.image_processing_step3p7"


def _resized(_: Any, images: Tensor, size: Any, resample: Any = None, **__: Any) -> Tensor:
    return resized_by_pillow(images, size, resample)


def _padded(_: Any, images: list[Tensor], pad_size: Any) -> list[Tensor]:
    """The image, padded with zeros at the right and at the bottom."""
    made = [image.new_zeros(3, pad_size.height, pad_size.width) for image in images]
    for square, image in zip(made, images, strict=True):
        square[:, : image.shape[1], : image.shape[2]] = image
    return made


def _normalised(_: Any, images: Tensor, *settings: Any) -> Tensor:
    return normalised(images, *settings)


def step3vl_views(image: np.ndarray, *, side: int, tile: int, edge: int) -> dict[str, Any]:
    """image [height, width, 3] -> the processor's output; `pixel_values_local` may be absent."""
    module = original(MODULE)
    kind = module.Step3p7ImageProcessor
    processor = object.__new__(kind)
    processor.max_image_size = edge
    with mock.patch.multiple(
        TorchvisionBackend, resize=_resized, pad=_padded, rescale_and_normalize=_normalised
    ):
        return processor._preprocess(
            images=as_images(image),
            size=module.SizeDict(height=side, width=side),
            patch_size=tile,
            resample=kind.resample,
            image_mean=kind.image_mean,
            image_std=kind.image_std,
            **COMMON,
        )
