"""Tiny models of Kimi-VL for the tables of towers and of vision models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config

from model_zoo.chat_model import Prompt
from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.models.kimivl.multimodal import K25, read_processor
from model_zoo.models.kimivl.placeholders import K25_TEXTS, TEXTS
from model_zoo.models.kimivl.vision import KimiVLTower
from model_zoo.multimodal.image_settings import projector_type
from model_zoo.registry import load
from runtime.vision.encoder import VisionTower
from tests.families.deepseek_families import DEEPSEEK2, DEEPSEEK2_GROUPS
from tests.families.kimivl_twin import MERGE, PATCH, KimiVLTwin, write_projector
from tests.families.text_family import rope
from tests.families.towers import TowerPair, load_tower, random_pixels
from tests.families.vision_agreement import CPU, VisionPair, write_checkpoint

PATCHES = 100  # the largest image is then a line without a whole patch


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    apart = projector_type(metadata) == K25
    return KimiVLTower(w, metadata, read_processor(metadata), apart=apart)


def write_tower(folder: Path, kind: str = "kimivl", **settings: Any) -> TowerPair:
    path, twin = folder / "mmproj-tiny.gguf", KimiVLTwin(**settings)
    write_projector(path, twin, patches=PATCHES, kind=kind)
    return TowerPair(load_tower(build_tower, path), twin, path)


def pixels(pair: TowerPair, images: int, grid: tuple[int, int]) -> Tensor:
    return random_pixels(images, 3, *(length * MERGE * PATCH for length in grid))


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    return torch.stack([pair.twin.features(image, grid) for image in pixels])


def write_model(
    folder: Path, files: tuple[str, str], kind: str = "kimivl", **settings: Any
) -> VisionPair:
    texts = K25_TEXTS if kind == K25 else TEXTS
    source, twin = folder / "checkpoint", KimiVLTwin(**settings)
    twin.text = write_checkpoint(
        DeepseekV3Config(**(DEEPSEEK2 | DEEPSEEK2_GROUPS | rope(10000.0)), num_mtp_layers=0),
        source,
        special=texts.reserved,
        spelled=texts.spelled,
    )
    path, projector = (folder / name for name in files)
    convert(source, path, type="f32", flavour="llama.cpp")
    write_projector(projector, twin, patches=PATCHES, kind=kind)
    model = load(path, projector=projector, device=CPU, dtype=torch.float32)
    return VisionPair(model, twin, expected)


@torch.inference_mode()
def expected(twin: KimiVLTwin, prompt: Prompt) -> Tensor:
    """Logits of the text model for a prompt with the features of its images."""
    x = twin.text.get_input_embeddings()(torch.tensor(prompt.tokens))
    shown = {image.digest: twin.features(image.pixels, image.grid) for image in prompt.images}
    for span in prompt.spans:
        x[span.start : span.end] = shown[span.digest]
    return twin.text(inputs_embeds=x[None]).logits[0]
