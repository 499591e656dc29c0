"""Tiny models of DeepSeek-OCR for the tables of text models, of towers and of vision models.

`transformers` has no class for it, but one for Unlimited-OCR, which computes the same unless tokens
attend to answers: checkpoints of that model are written as those of DeepSeek-OCR.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import UnlimitedOcrConfig

from model_zoo.chat_model import Prompt
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.tiling import Grid
from model_zoo.models.deepseekocr.image_processor import NO_TILES
from model_zoo.models.deepseekocr.multimodal import read_processor
from model_zoo.models.deepseekocr.placeholders import PLACE, TEXTS
from model_zoo.models.deepseekocr.vision import DeepseekOCRTower
from model_zoo.multimodal.vision_loading import PREFIXES
from runtime.vision.encoder import VisionTower
from tests.families.text_family import (
    KEY_LENGTHS,
    SIZES,
    Changes,
    CompleteFile,
    TextFamily,
    Variant,
)
from tests.families.towers import TowerPair, random_pixels
from tests.families.vision_agreement import special_ids
from tests.families.vision_references import images_in_order
from tests.tiny_models import save_pretrained

SPECIAL = (*TEXTS.reserved, *TEXTS.writable)
TEXT = SIZES | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
# Sides of the whole image and of a tile have 16 and 10 patches, and 4 and 3 rows of features.
SAM = {
    "hidden_size": 24,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "window_size": 6,
    "global_attn_indexes": [1],
    "mlp_dim": 40,
    "downsample_channels": [20, 32],
}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
}
UNSTATED_BY_OLLAMA = """
    attention.key_length attention.layer_norm_rms_epsilon attention.value_length
    expert_feed_forward_length expert_shared_count expert_weights_norm expert_weights_scale
    rope.dimension_count rope.freq_base vocab_size
"""
# Settings of language models that no checkpoint of the authors states.
UNSTATED = {"rms_norm_eps", "rope_parameters", "head_dim", "layer_types", "sliding_window"}


def config(
    text: Mapping[str, Any] | None = None, clip: Mapping[str, Any] | None = None, **sam: Any
) -> UnlimitedOcrConfig:
    return UnlimitedOcrConfig(
        text_config=TEXT | (text or {}),
        vision_config={"sam_config": SAM | sam, "encoder_config": CLIP | (clip or {})},
        image_token_id=special_ids(SPECIAL)[PLACE],
    )


def text_config(**settings: Any) -> UnlimitedOcrConfig:
    return config(settings, clip={"num_hidden_layers": 2, "intermediate_size": 8})


def save_deepseekocr(model: Any, folder: Path) -> None:
    """Save Unlimited-OCR as DeepSeek-OCR, whose names of tensors it keeps."""
    save_pretrained(model, folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    text, vision = stored["text_config"], stored["vision_config"]
    sam, clip = vision["sam_config"], vision["encoder_config"]
    dense = text.pop("mlp_layer_types").count("dense")
    shared = {"first_k_dense_replace": dense, "use_mla": False, "v_head_dim": 0}
    shared |= {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "kv_lora_rank": None}
    language = {key: value for key, value in text.items() if key not in UNSTATED} | shared
    widths = {
        "clip-l-14-224": {
            "heads": clip["num_attention_heads"],
            "image_size": clip.get("image_size"),
            "layers": clip["num_hidden_layers"],
            "patch_size": clip.get("patch_size"),
            "width": clip["hidden_size"],
        },
        "sam_vit_b": {
            "downsample_channels": sam["downsample_channels"],
            "global_attn_indexes": sam["global_attn_indexes"],
            "heads": sam["num_attention_heads"],
            "layers": sam["num_hidden_layers"],
            "width": sam["hidden_size"],
        },
    }
    settings = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": language,
        "projector_config": {"model_type": "mlp_projector", "projector_type": "linear"},
        "vision_config": {"image_size": 1024, "model_type": "vision", "width": widths},
    }
    path.write_text(json.dumps(settings))


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return DeepseekOCRTower(w, metadata, read_processor(w, metadata))


def pixels(pair: TowerPair, images: int, grid: Grid) -> Tensor:
    patches = sum(views.patches for views in pair.tower.images.views(grid))
    return random_pixels(images, patches, 3 * pair.tower.images.patch**2)


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, grid: Grid) -> Tensor:
    given = [views_of(pair.twin, image, grid) for image in pixels]
    return torch.stack([features for each in given for features in _features(pair.twin, each)])


def _features(twin: Any, given: Mapping[str, Any]) -> Any:
    return twin.model.get_image_features(**given, return_dict=True).pooler_output


def views_of(twin: Any, pixels: Tensor, grid: Grid) -> dict[str, Any]:
    """pixels [patches, values] of one image, as `transformers` takes its views."""
    sam = twin.config.vision_config.sam_config
    across, patch = sam.image_size // sam.patch_size, sam.patch_size
    tiles, whole = pixels.split([len(pixels) - across**2, across**2])
    given: dict[str, Any] = {"pixel_values": _planes(whole[None], patch)}
    if grid == NO_TILES:
        return given | {"num_local_patches": [0], "patches_grid": [[1, 1]]}
    count = grid[0] * grid[1]
    return given | {
        "pixel_values_local": _planes(tiles.unflatten(0, (count, -1)), patch),
        "num_local_patches": [count],
        "patches_grid": [list(reversed(grid))],
    }


def _planes(views: Tensor, patch: int) -> Tensor:
    """views [n, patches of a square, values] -> [n, 3, side, side]."""
    across = int(views.shape[1] ** 0.5)
    parts = views.unflatten(2, (3, patch, patch)).unflatten(1, (across, across))
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(views), 3, across * patch, across * patch)


def expected(twin: Any, prompt: Prompt) -> Tensor:
    """Logits of the twin, which takes the tiles of all images in one row."""
    ids = torch.tensor([prompt.tokens])
    return twin(input_ids=ids, **views_of_all(twin, prompt)).logits[0]


def views_of_all(twin: Any, prompt: Prompt) -> dict[str, Any]:
    each = [views_of(twin, image.pixels, image.grid) for image in images_in_order(prompt)]
    if not each:
        return {}
    local = [given["pixel_values_local"] for given in each if "pixel_values_local" in given]
    return {
        "pixel_values": torch.cat([given["pixel_values"] for given in each]),
        "pixel_values_local": torch.cat(local) if local else None,
        "num_local_patches": [n for given in each for n in given["num_local_patches"]],
        "patches_grid": [grid for given in each for grid in given["patches_grid"]],
    }


def without_vision(tensors: Mapping[str, np.ndarray]) -> Changes:
    return dict.fromkeys(name for name in tensors if name.startswith(PREFIXES))


FAMILIES: Mapping[str, TextFamily] = {
    "deepseek2-ocr": TextFamily(
        text_config,
        {},
        {"plain": {}},
        wide={"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256},
        options={"save": save_deepseekocr},
        effective_keys={"expert_weights_norm": True, "expert_weights_scale": 0.5},
        refused=[({"attention.sliding_window": 128}, "as in Unlimited-OCR")],
        files=(
            CompleteFile(
                optional_keys="""
                    attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon
                    attention.value_length expert_shared_count expert_weights_norm
                    expert_weights_scale rope.freq_base
                """
            ),
        ),
        variants={
            "of_llama_cpps_converter": Variant(
                keys=KEY_LENGTHS
                | {
                    "rope.dimension_count": 0,
                    "expert_group_count": 1,
                    "expert_group_used_count": 1,
                    "expert_weights_norm": None,
                }
            ),
            "of_ollamas_converter": Variant(
                flavour="ollama",
                keys=dict.fromkeys(UNSTATED_BY_OLLAMA.split()),
                tensors=without_vision,
            ),
        },
    ),
}
