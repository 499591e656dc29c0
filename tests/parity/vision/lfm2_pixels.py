"""The image processor of LFM2-VL in `transformers`, without torchvision."""

from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers.image_processing_backends import TorchvisionBackend

from model_zoo.layers.vision.rotary import coordinates
from tests.parity.vision.without_torchvision import (
    COMMON,
    as_images,
    normalised,
    original,
    resized_by_pillow,
)

MODULE = "transformers.models.lfm2_vl.image_processing_lfm2_vl"


def _resized(_: Any, images: Tensor, size: Any, resample: Any = None, **__: Any) -> Tensor:
    """A single image, as of those that are not cut, has no dimension for its number."""
    batch = images if images.dim() == 4 else images[None]
    made = resized_by_pillow(batch, size, resample)
    return made if images.dim() == 4 else made[0]


def _normalised(_: Any, images: Tensor, *settings: Any) -> Tensor:
    return normalised(images, *settings)


def kind() -> Any:
    return original(MODULE).Lfm2VlImageProcessor


def lfm2_parts(image: np.ndarray, **settings: Any) -> dict[str, Any]:
    """What the processor makes of image [height, width, 3] with other settings."""
    processor = object.__new__(kind())
    own = "downsample_factor min_tiles max_tiles use_thumbnail min_image_tokens max_image_tokens"
    names = [*own.split(), "encoder_patch_size", "tile_size", "max_pixels_tolerance", "resample"]
    names += ["image_mean", "image_std", "do_image_splitting", "do_pad"]
    options = {name: settings.get(name, getattr(kind(), name)) for name in names}
    with mock.patch.multiple(
        TorchvisionBackend, resize=_resized, rescale_and_normalize=_normalised
    ):
        return processor._preprocess(
            images=as_images(image), return_row_col_info=True, **options, **COMMON
        )


def patches_in_blocks(made: dict[str, Any], *, patch: int, merge: int) -> Tensor:
    """Its patches without padding, in the order of merging, channels first."""
    parts = []
    for part, (high, wide) in zip(
        made["pixel_values"], made["spatial_shapes"].tolist(), strict=True
    ):
        down, across = coordinates(high, wide, block=merge, device=torch.device("cpu"))
        ordered = part[down * wide + across].unflatten(1, (patch, patch, 3))
        parts.append(ordered.permute(0, 3, 1, 2).flatten(1))
    return torch.cat(parts)
