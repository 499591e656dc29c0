"""The image processor of Llama 4 in `transformers`, without torchvision and in float32."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

MODULE = "transformers.models.llama4.image_processing_llama4"


def _padded(images: Tensor, padding: list[int], fill: list[int]) -> Tensor:
    assert not any(fill)
    left, top, right, bottom = padding
    return torch.nn.functional.pad(images, [left, right, top, bottom])


@functools.cache
def original() -> Any:
    """The module itself; where torchvision is missing, `transformers` shows an empty one."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    stand_ins = {name: ModuleType(name) for name in names}
    stand_ins[names[-1]].functional = SimpleNamespace(pad=_padded)  # type: ignore[attr-defined]
    path = Path(transformers.__file__).parent.joinpath(*MODULE.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {**stand_ins, MODULE: module}):
        spec.loader.exec_module(module)
    return module


def _resized_by_pillow(images: Tensor, size: Any, resample: Any) -> Tensor:
    picture = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    small = np.array(picture.resize((size.width, size.height), resample))
    return torch.from_numpy(small).permute(2, 0, 1).unsqueeze(0)


def _resized_by_torch(images: Tensor, size: Any, resample: Any) -> Tensor:
    """What torchvision does for 8-bit images."""
    assert resample == Image.Resampling.BILINEAR
    target = (size.height, size.width)
    return torch.nn.functional.interpolate(images, target, mode="bilinear", antialias=True)


def _normalised(images: Tensor, _: bool, factor: float, __: bool, mean: Any, std: Any) -> Tensor:
    """In float32, where the original does it in bfloat16."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return (images.to(torch.float32) * factor - mean) / std


_RESIZE = {"pillow": _resized_by_pillow, "torch": _resized_by_torch}


def llama4_tiles(
    image: np.ndarray, *, side: int, max_tiles: int, resize: str
) -> tuple[Tensor, tuple[int, int]]:
    """image [height, width, 3] -> pixels [tiles, 3, side, side], grid of the tiles."""
    module = original()
    processor = module.Llama4ImageProcessor
    made = processor._preprocess(
        SimpleNamespace(resize=_RESIZE[resize], rescale_and_normalize=_normalised),
        images=[torch.from_numpy(image.copy()).permute(2, 0, 1)],
        do_resize=True,
        size=module.SizeDict(height=side, width=side),
        resample=processor.resample,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=processor.image_mean,
        image_std=processor.image_std,
        max_patches=max_tiles,
        resize_to_max_canvas=processor.resize_to_max_canvas,
        disable_grouping=True,
        return_tensors="pt",
    )
    rows, columns = made["aspect_ratios"][0].tolist()
    return made["pixel_values"], (rows, columns)
