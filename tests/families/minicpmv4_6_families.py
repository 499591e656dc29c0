"""Tiny models of MiniCPM-V 4.6, and what `transformers` computes for the parts of images."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6Config
from transformers.models.qwen3_5 import modeling_qwen3_5

from model_zoo.chat_model import Prompt
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.slicing import Slicing
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.minicpmv.placeholders import MERGED_TEXTS, PAD
from model_zoo.models.minicpmv.vision_v4_6 import MiniCPMV46Tower
from runtime.vision.encoder import VisionTower
from tests.families.delta_rule import step_by_step
from tests.families.qwen_families import QWEN35, SQUARE_STATES
from tests.families.towers import TowerPair, random_pixels
from tests.families.vision_agreement import special_ids

PATCH, SIDE = 4, 64
TEXT = {"model_type": "qwen3_5_text", **QWEN35, **SQUARE_STATES}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 40,
    "patch_size": PATCH,
}


def config(layer: int = 1, text: Mapping[str, Any] = TEXT, **vision: Any) -> MiniCPMV4_6Config:
    return MiniCPMV4_6Config(
        text_config=dict(text),
        vision_config=VISION | vision,
        insert_layer_id=layer,
        image_token_id=special_ids(MERGED_TEXTS.reserved)[PAD],
    )


def images() -> MiniCPMVProcessor:
    return MiniCPMVProcessor(Slicing(SIDE, 4 * PATCH), PATCH, None)


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return MiniCPMV46Tower(w, metadata, images())


def pixels(pair: TowerPair, count: int, size: tuple[int, int]) -> Tensor:
    return random_pixels(count, *images().outline(*size).shape)


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.stack([features(pair.twin, image, size) for image in pixels])


def features(twin: Any, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """pixels [patches, 3 * patch * patch] of an image of that size -> [rows, width]."""
    parts = images().slicing.parts(*size)
    sizes = [parts.overview, *[parts.slice_size] * parts.slices]
    grids = [(high // PATCH, wide // PATCH) for high, wide in sizes]
    lines = [
        part.view(-1, 3, PATCH, PATCH).permute(1, 2, 0, 3).flatten(2)
        for part in pixels.split([high * wide for high, wide in grids])
    ]
    found = twin.model.get_image_features(torch.cat(lines, dim=2)[None], torch.tensor(grids))
    return torch.cat(found.pooler_output)


@torch.inference_mode()
@step_by_step(modeling_qwen3_5)
def expected(twin: Any, prompt: Prompt) -> Tensor:
    """Logits for a prompt with the features of its images."""
    x = twin.get_input_embeddings()(torch.tensor(prompt.tokens))
    shown = {image.digest: features(twin, image.pixels, image.grid) for image in prompt.images}
    for span in prompt.spans:
        x[span.start : span.end] = shown[span.digest][span.first_row : span.first_row + span.length]
    return twin(inputs_embeds=x[None]).logits[0]
