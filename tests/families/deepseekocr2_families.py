"""Tiny vision models of DeepSeek-OCR 2 for the tables of towers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekOcr2Config

from model_zoo.chat_model import Prompt
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.tiling import Grid
from model_zoo.models.deepseekocr.multimodal import read_second_processor
from model_zoo.models.deepseekocr.vision_2 import DeepseekOCR2Tower
from runtime.vision.encoder import VisionTower
from tests.families import deepseekocr_families as first
from tests.families.towers import TowerPair
from tests.families.vision_agreement import special_ids

TEXT = first.TEXT | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
# The twin takes the queries of the whole image for views of more than 144 rows: it has 169 here,
# and tiles 81. So many patches would take long in layers without windows.
SAM = first.SAM | {
    "output_channels": 24,
    "image_size": 98,
    "patch_size": 2,
    "global_attn_indexes": [],
    "downsample_channels": [20, 64],
}
READER = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def config(
    text: Mapping[str, Any] | None = None, reader: Mapping[str, Any] | None = None, **sam: Any
) -> DeepseekOcr2Config:
    return DeepseekOcr2Config(
        text_config=TEXT | (text or {}),
        vision_config={"sam_config": SAM | sam, "encoder_config": READER | (reader or {})},
        image_token_id=special_ids(first.SPECIAL)[first.PLACE],
    )


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return DeepseekOCR2Tower(w, metadata, read_second_processor(w, metadata))


def save_deepseekocr2(model: Any, folder: Path) -> None:
    """Save as the authors do, whose code has the sizes of the second encoder that are stated here
    beside its width."""
    first.save_deepseekocr(model, folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    reader = model.config.vision_config.encoder_config.to_dict()
    sizes = {name: reader[name] for name in READER if name.startswith(("num_", "intermediate_"))}
    widths, sam = stored["vision_config"]["width"], model.config.vision_config.sam_config
    del widths["clip-l-14-224"]
    widths["qwen2-0-5b"] = {"dim": reader["hidden_size"], **sizes}
    widths["sam_vit_b"] |= {"patch_size": sam.patch_size, "window_size": sam.window_size}
    path.write_text(json.dumps(stored | {"architectures": ["DeepseekOCR2ForCausalLM"]}))


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, grid: Grid) -> Tensor:
    return torch.stack([_features(pair.twin, image, grid) for image in pixels])


def _features(twin: Any, pixels: Tensor, grid: Grid) -> Tensor:
    given = first.views_of(twin, pixels, grid)
    del given["patches_grid"]
    return twin.model.get_image_features(**given, return_dict=True).pooler_output[0]


def expected(twin: Any, prompt: Prompt) -> Tensor:
    """Logits of the twin."""
    given = first.views_of_all(twin, prompt)
    given.pop("patches_grid", None)
    return twin(input_ids=torch.tensor([prompt.tokens]), **given).logits[0]
