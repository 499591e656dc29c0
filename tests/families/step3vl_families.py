"""Tiny models of Step 3 VL for the tables of towers and of vision models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Step3p7Config

from model_zoo.chat_model import Prompt
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.tiling import Grid
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from model_zoo.models.step3vl.multimodal import read_processor
from model_zoo.models.step3vl.placeholders import PLACE, TEXTS
from model_zoo.models.step3vl.vision import Step3VLTower
from runtime.vision.encoder import VisionTower
from tests.families.step_families import FAR, NEAR, STEP
from tests.families.towers import TowerPair, random_pixels
from tests.families.vision_agreement import special_ids
from tests.families.vision_references import images_in_order

# The whole image has 16 by 16 patches and 4 by 4 rows of features, a window 12 by 12 and 3 by 3.
SIDE, PATCH = 64, 4
TEXT = STEP | {
    "num_hidden_layers": 2,
    "layer_types": [FAR, NEAR],
    "mlp_layer_types": ["dense", "sparse"],
}


def config(text: Mapping[str, Any] | None = None, **vision: Any) -> Step3p7Config:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 1.5}
    return Step3p7Config(
        text_config=TEXT | (text or {}),
        vision_config=sizes | {"image_size": SIDE, "patch_size": PATCH} | vision,
        image_token_id=special_ids(TEXTS.reserved)[PLACE],
    )


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    """Patches of images with at most twenty windows."""
    return Step3VLTower(w, metadata, replace(read_processor(metadata), most_windows=20))


def pixels(pair: TowerPair, images: int, grid: Grid) -> Tensor:
    patches = sum(each.patches for each in pair.tower.images.views(grid))
    return random_pixels(images, patches, 3 * PATCH**2)


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, grid: Grid) -> Tensor:
    given = [inputs(image, grid, pair.tower.images) for image in pixels]
    found = [pair.twin.model.get_image_features(**each).pooler_output[0] for each in given]
    return torch.stack(found)


def inputs(pixels: Tensor, grid: Grid, images: Step3VLProcessor) -> dict[str, Any]:
    """pixels [patches, 3 * patch * patch] of an image -> the views that `transformers` takes."""
    views = images.views(grid)
    parts = pixels.split([each.patches for each in views])
    *windows, whole = (
        F.fold(
            part.unflatten(0, (each.count, -1)).transpose(1, 2),
            (each.rows * PATCH, each.columns * PATCH),
            kernel_size=PATCH,
            stride=PATCH,
        )
        for part, each in zip(parts, views, strict=True)
    )
    local = windows[0] if windows else None
    counts = [views[0].count] if windows else [0]
    return {"pixel_values": whole, "pixel_values_local": local, "num_local_patches": counts}


def expected(twin: Any, prompt: Prompt) -> Tensor:
    ids, images = torch.tensor([prompt.tokens]), images_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    processor = Step3VLProcessor(SIDE, 48, PATCH)
    each = [inputs(image.pixels, image.grid, processor) for image in images]
    local = [given["pixel_values_local"] for given in each]
    windows = [part for part in local if part is not None]
    return twin(
        input_ids=ids,
        pixel_values=torch.cat([given["pixel_values"] for given in each]),
        pixel_values_local=torch.cat(windows) if windows else None,
        num_local_patches=[given["num_local_patches"][0] for given in each],
    ).logits[0]
