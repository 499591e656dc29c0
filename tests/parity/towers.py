"""Tiny models with eyes: both flavours of their files, and features against `transformers`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from runtime.vision.encoder import VisionTower
from tests.memory_profile import peak_bytes
from tests.parity.agreement import CHECKS, Pair, load_decoder
from tests.tiny_models import tiny_tokenizer, write_tiny

TOLERANCE = 3e-5  # of a row's largest feature
FLAVOURS = ("llama.cpp", "ollama")
Build = Callable[[TensorScope, Metadata], VisionTower]


@dataclass(frozen=True)
class VisionModel:
    """A tower and the model of `transformers` that its file was made of."""

    tower: VisionTower
    twin: Any
    path: Path


def make_eyes(
    build: Build,
    config: PreTrainedConfig,
    folder: Path,
    *,
    flavour: str,
    type: str = "f32",
    maker: Any = None,
) -> VisionModel:
    """Write the tiny model of `config` and load the part of it that sees."""
    path = folder / "tiny.gguf"
    twin = write_tiny(path, config, flavour=flavour, type=type, maker=maker)
    own = folder / "mmproj-tiny.gguf"
    assert own.exists() == (flavour == "llama.cpp")
    path = own if own.exists() else path
    return VisionModel(load_tower(build, path), twin, path)


def load_tower(build: Build, path: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    """No tensor of the part that sees may be missing, misshapen or left over."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    draft = TensorScope(file, device=META, dtype=dtype)
    build(draft, metadata)
    for name, tensor in file.tensors.items():
        if not name.startswith(("v.", "vision.", "mm.")):
            draft.table(name, shape=tensor.shape)
    draft.check()
    return build(TensorScope(file, device=torch.device("cpu"), dtype=dtype), metadata)


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(tower: VisionTower, pixels: Tensor, grid: tuple[int, int] = (1, 1)) -> Tensor:
    with torch.inference_mode():
        return tower.encode(pixels, grid)


def worst(features: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, as a part of its largest element."""
    assert features.shape == expected.shape, (features.shape, expected.shape)
    largest = expected.abs().amax(-1, keepdim=True)
    return ((features.float() - expected) / largest).abs().max().item()


def random_tiles(vision: VisionModel, images: int, tiles: int) -> Tensor:
    """For towers that take images in any number of tiles."""
    return random_pixels(images, tiles, *vision.tower.largest().pixels.shape[1:])


def check_features(
    vision: VisionModel, pixels: Tensor, expected: Tensor, grid: tuple[int, int] = (1, 1)
) -> None:
    assert worst(encoded(vision.tower, pixels, grid), expected) <= TOLERANCE


def check_each_alone(vision: VisionModel, pixels: Tensor, grid: tuple[int, int] = (1, 1)) -> None:
    """No image changes what another one gets."""
    together = encoded(vision.tower, pixels, grid)
    assert torch.equal(together[1:2], encoded(vision.tower, pixels[1:2], grid))


def check_text_beside(vision: VisionModel) -> None:
    """The file beside the projector is the text model's, which answers as the twin does."""
    decoder = load_decoder(vision.path.parent / "tiny.gguf")
    CHECKS["whole_prompt"](Pair(decoder, vision.twin, tiny_tokenizer().get_vocab_size()))


def check_limits(tower: VisionTower, images: int) -> None:
    """The largest image has as many rows as declared, and takes no more memory than declared."""
    image = tower.largest()
    pixels = torch.stack([image.pixels] * images)
    encoded(tower, pixels, image.grid)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        features = encoded(tower, pixels, image.grid)
    assert features.shape == (images, image.rows, tower.limits.width)
    assert features.dtype == tower.limits.dtype
    assert 0.95 * tower.limits.rows <= image.rows <= tower.limits.rows
    assert 0 < peak_bytes(recorded) <= tower.activation_bytes(images)
