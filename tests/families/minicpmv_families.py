"""Tiny models of MiniCPM-V with a resampler, for the tables of towers and of vision models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen2Config

from model_zoo.chat_model import Prompt
from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.models.minicpmv import placeholders
from model_zoo.models.minicpmv.multimodal import read_processor
from model_zoo.models.minicpmv.vision import MiniCPMVTower
from model_zoo.registry import load
from runtime.vision.encoder import VisionTower
from tests.families.minicpm_families import MiniCPMConfig
from tests.families.minicpmv_twin import WIDTH, ResamplerTwin, write_projector
from tests.families.text_family import SIZES
from tests.families.towers import TowerPair, load_tower, random_pixels
from tests.families.vision_agreement import CPU, VisionPair, write_checkpoint

TEXTS: Mapping[str, type[PreTrainedConfig]] = {
    "minicpm": MiniCPMConfig,
    "qwen2": Qwen2Config,
}


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return MiniCPMVTower(w, metadata, read_processor(w, metadata))


def write_tower(folder: Path, *, version: int = 3, **settings: Any) -> TowerPair:
    path, twin = folder / "mmproj-tiny.gguf", ResamplerTwin(**settings)
    write_projector(path, twin, version=version)
    return TowerPair(load_tower(build_tower, path), twin, path)


def pixels(pair: TowerPair, images: int, size: tuple[int, int]) -> Tensor:
    parts = pair.tower.images.outline(*size).shape
    return random_pixels(images, *parts)


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.stack([pair.twin.features(image, size) for image in pixels])


def write_model(
    folder: Path, files: tuple[str, str], *, version: int = 3, text: str = "qwen2", **settings: Any
) -> VisionPair:
    special = placeholders.TEXTS.reserved
    config = TEXTS[text](**(SIZES | {"hidden_size": WIDTH}))
    source = folder / "checkpoint"
    twin = ResamplerTwin(**settings)
    twin.text = write_checkpoint(
        config, source, special=special, spelled=placeholders.TEXTS.spelled
    )
    path, projector = (folder / name for name in files)
    convert(source, path, type="f32", flavour="llama.cpp")
    write_projector(projector, twin, version=version)
    model = load(path, projector=projector, device=CPU, dtype=torch.float32)
    return VisionPair(model, twin, expected)


@torch.inference_mode()
def expected(twin: ResamplerTwin, prompt: Prompt) -> Tensor:
    """Logits of the text model for a prompt with the features of its images."""
    x = twin.text.get_input_embeddings()(torch.tensor(prompt.tokens))
    factor = getattr(
        twin.text.config, "embedding_multiplier", 1.0
    )  # of all rows, in `transformers`
    shown = {image.digest: twin.features(image.pixels, image.grid) for image in prompt.images}
    for span in prompt.spans:
        rows = shown[span.digest][span.first_row : span.first_row + span.length]
        x[span.start : span.end] = rows / factor
    return twin.text(inputs_embeds=x[None]).logits[0]
