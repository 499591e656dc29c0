"""Image processors that `transformers` has only for torchvision, with Pillow in its place."""

import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def _padded(images: Tensor, padding: list[int], fill: list[int]) -> Tensor:
    assert not any(fill)
    left, top, right, bottom = padding
    return torch.nn.functional.pad(images, [left, right, top, bottom])


@functools.cache
def original(name: str) -> Any:
    """The module itself; where torchvision is missing, `transformers` shows an empty one."""
    stand_ins = {each: ModuleType(each) for each in _NAMES}
    functional = SimpleNamespace(pad=_padded, InterpolationMode=int)
    stand_ins[_NAMES[-1]].functional = functional  # type: ignore[attr-defined]
    path = Path(transformers.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {**stand_ins, name: module}):
        spec.loader.exec_module(module)
    return module


def resized_by_pillow(images: Tensor, size: Any, resample: Any, **_: Any) -> Tensor:
    """images [n, 3, height, width] uint8"""
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    small = [np.array(each.resize((size.width, size.height), resample)) for each in pictures]
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2)


def normalised(images: Tensor, _: bool, factor: float, __: bool, mean: Any, std: Any) -> Tensor:
    """In float32, where some originals do it in bfloat16."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return (images.to(torch.float32) * factor - mean) / std


COMMON: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "disable_grouping": True,
    "return_tensors": "pt",
}


def as_images(image: np.ndarray) -> list[Tensor]:
    """image [height, width, 3] -> [3, height, width], the only one of a list."""
    return [torch.from_numpy(image.copy()).permute(2, 0, 1)]
