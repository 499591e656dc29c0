"""Muse Glimmer in the tables of text families, of towers and of whole vision models."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MuseGlimmerConfig, MuseGlimmerTextConfig

from model_zoo.chat_model import Prompt
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.patches import squares
from model_zoo.models.muse_glimmer.image_processor import MuseProcessor
from model_zoo.models.muse_glimmer.placeholders import PLACE, TEXTS
from model_zoo.models.muse_glimmer.vision import MuseTower
from runtime.vision.encoder import VisionTower
from tests.families.text_family import SIZES, WIDE_HEADS, CompleteFile, TextFamily, rope
from tests.families.tower_family import TowerFamily
from tests.families.tower_inputs import QWEN_GRIDS
from tests.families.towers import TowerPair, random_pixels
from tests.families.vision_agreement import special_ids
from tests.families.vision_references import images_in_order

PATCH, MERGE = 14, 2
VISION = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 6,  # the fourth and the last attend to whole images
    "num_attention_heads": 3,
    "patch_size": PATCH,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
TEXT = SIZES | rope(500000.0) | {"head_dim": 32, "sliding_window": 64}


def muse_glimmer(**settings: Any) -> MuseGlimmerConfig:
    """`transformers` has no class for the text model with its head alone."""
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return MuseGlimmerConfig(
        text_config=MuseGlimmerTextConfig(**settings),
        vision_config=VISION | small,
        out_hidden_size=64,
        projector_hidden_size=16,
        image_token_id=100_000,  # no token of tests
        video_token_id=100_001,
    )


def config(**vision: Any) -> MuseGlimmerConfig:
    settings = VISION | vision
    return MuseGlimmerConfig(
        text_config=TEXT,
        vision_config=settings,
        out_hidden_size=settings["hidden_size"] * MERGE**2,
        projector_hidden_size=56,
        image_token_id=special_ids(TEXTS.reserved)[PLACE],
        video_token_id=100_001,
    )


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return MuseTower(w, metadata, MuseProcessor(PATCH * MERGE, rows=210))


def pixels(pair: TowerPair, images: int, grid: tuple[int, int]) -> Tensor:
    return random_pixels(images, 3, *(length * MERGE * PATCH for length in grid))


@torch.inference_mode()
def tower_features(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Before their norm, which the text model computes."""
    model = pair.twin.model
    found = model.vision_tower(_frames(pixels), grid_thw=_grids([grid] * len(pixels)))
    adapted = model.vision_projection(model.vision_adapter(found.last_hidden_state))
    return adapted.unflatten(0, (len(pixels), -1))


def expected(twin: Any, prompt: Prompt) -> Tensor:
    ids, images = torch.tensor([prompt.tokens]), images_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    return twin(
        input_ids=ids,
        pixel_values=torch.cat([_frames(image.pixels[None]) for image in images]),
        image_grid_thw=_grids([image.grid for image in images]),
    ).logits[0]


def _frames(pixels: Tensor) -> Tensor:
    """pixels [images, 3, height, width] -> [patches, frames * 3 * side * side]."""
    return squares(pixels, PATCH).flatten(0, 1).repeat(1, 2)


def _grids(grids: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor([[1, rows * MERGE, columns * MERGE] for rows, columns in grids])


TOWER = TowerFamily(
    build_tower,
    config,
    {"plain": {}, "windows_of_two": {"pos_emb_height": 2, "pos_emb_width": 2}},
    pixels,
    tower_features,
    shapes=QWEN_GRIDS,
    grids=True,
    flavours=("llama.cpp",),
    limit_images=(1,),
)
FAMILIES: Mapping[str, TextFamily] = {
    "muse-glimmer": TextFamily(
        muse_glimmer,
        SIZES
        | rope(500000.0)
        | {
            "num_hidden_layers": 5,  # the first and the last attend to all tokens
            "head_dim": 32,
            "sliding_window": 9,
            "final_logit_softcapping": 2.0,
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.4,
        },
        {
            "plain": {},
            "window_in_the_last_layer": {
                "layer_types": ["full_attention", *["sliding_attention"] * 4],
                "layer_rope_theta": [0, *[500000.0] * 4],
                "num_key_value_heads": 1,
            },
        },
        wide=WIDE_HEADS,
        effective_keys={
            "attention.sliding_window": 10,
            "attention.sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "logit_scale": 0.5,
        },
        files=(
            CompleteFile(
                "window_in_the_last_layer",
                optional_keys="final_logit_softcapping attention.sliding_window_pattern",
            ),
        ),
    ),
}
