"""Vision towers of tiny models: writing their files, loading them, and comparing features."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.multimodal.vision_loading import PREFIXES
from runtime.vision.encoder import VisionTower
from tests.memory_profile import peak_bytes, recorded_memory
from tests.tiny_models import Save, save_pretrained, write_tiny

TOLERANCE = 3e-5  # of a row's largest feature
FLAVOURS = ("llama.cpp", "ollama")
Build = Callable[[TensorScope, Metadata], VisionTower]


@dataclass(frozen=True)
class TowerPair:
    """A tower and the model of `transformers` that its file was made of."""

    tower: VisionTower
    twin: Any
    path: Path


def make_tower(
    build: Build,
    config: PreTrainedConfig,
    folder: Path,
    *,
    flavour: str,
    type: str = "f32",
    maker: Any = None,
    save: Save = save_pretrained,
) -> TowerPair:
    """Write the tiny model of `config` and load its vision tower."""
    path = folder / "tiny.gguf"
    twin = write_tiny(path, config, flavour=flavour, type=type, maker=maker, save=save)
    own = folder / "mmproj-tiny.gguf"
    assert own.exists() == (flavour == "llama.cpp")
    path = own if own.exists() else path
    return TowerPair(load_tower(build, path), twin, path)


def load_tower(build: Build, path: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    """No tensor of the vision model may be missing, misshapen or unused."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    draft = TensorScope(file, device=META, dtype=dtype)
    build(draft, metadata)
    for name, tensor in file.tensors.items():
        if not name.startswith(PREFIXES):
            draft.table(name, shape=tensor.shape)
    draft.check()
    return build(TensorScope(file, device=torch.device("cpu"), dtype=dtype), metadata)


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(tower: VisionTower, pixels: Tensor, grid: tuple[int, int] = (1, 1)) -> Tensor:
    paused: list[None] = []
    with torch.inference_mode():
        features = tower.encode(pixels, grid, lambda: paused.append(None))
    assert paused, "the tower never pauses"
    return features


def worst(features: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, as a part of its largest element."""
    assert features.shape == expected.shape, (features.shape, expected.shape)
    largest = expected.abs().amax(-1, keepdim=True)
    return ((features.float() - expected) / largest).abs().max().item()


def check_limits(tower: VisionTower, images: int) -> None:
    """The largest image has as many rows as declared, and takes no more memory than declared."""
    image = tower.limits.largest.blank()
    pixels = torch.stack([image.pixels] * images)
    encoded(tower, pixels, image.grid)
    with recorded_memory() as recorded:
        features = encoded(tower, pixels, image.grid)
    assert features.shape == (images, image.rows, tower.limits.width)
    assert features.dtype == tower.limits.dtype
    assert 0.95 * tower.limits.rows <= image.rows <= tower.limits.rows
    assert 0 < peak_bytes(recorded) <= tower.activation_bytes(images)
