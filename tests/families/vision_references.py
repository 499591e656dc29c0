"""Logits [tokens, vocabulary] of whole vision models in `transformers` for a prompt."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mllama.modeling_mllama import MllamaVisionEncoder
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from model_zoo.chat_model import Prompt
from runtime.vision.encoder import PreparedImage
from tests.families.delta_rule import step_by_step
from tests.families.tower_references import (
    aspect_ratios,
    gemma4_patches,
    gemma4_side,
    lfm2_inputs,
    qwen_frames,
    row_major,
    states_before_layers,
    tencents_code,
)
from tests.families.vision_configs import lfm2_processor

MLLAMA_TILES = 4


def images_in_order(prompt: Prompt) -> list[PreparedImage]:
    """The image of each place in the prompt, repeated images as often as they occur."""
    images = {image.digest: image for image in prompt.images}
    firsts = [span for span in prompt.spans if span.first_row == 0]
    return [images[span.digest] for span in firsts]


def _ids(prompt: Prompt) -> Tensor:
    return torch.tensor([prompt.tokens])


def squares(twin: Any, prompt: Prompt) -> Tensor:
    """For models whose images have one size."""
    pixels = [image.pixels for image in images_in_order(prompt)]
    images = {"pixel_values": torch.stack(pixels)} if pixels else {}
    return twin(input_ids=_ids(prompt), **images).logits[0]


def tiles(twin: Any, prompt: Prompt) -> Tensor:
    """For models that take the tiles of all images in one row."""
    pixels = [image.pixels for image in images_in_order(prompt)]
    images = {"pixel_values": torch.cat(pixels)} if pixels else {}
    return twin(input_ids=_ids(prompt), **images).logits[0]


def idefics3(twin: Any, prompt: Prompt) -> Tensor:
    pixels = [image.pixels for image in images_in_order(prompt)]
    images = {"pixel_values": torch.cat(pixels).unsqueeze(0)} if pixels else {}
    return twin(input_ids=_ids(prompt), **images).logits[0]


def gemma3(twin: Any, prompt: Prompt) -> Tensor:
    ids, images = _ids(prompt), images_in_order(prompt)
    pixels = torch.stack([image.pixels for image in images]) if images else None
    kinds = (ids == twin.config.image_token_id).long()
    return twin(input_ids=ids, pixel_values=pixels, token_type_ids=kinds).logits[0]


def gemma4(twin: Any, prompt: Prompt, **masks: Any) -> Tensor:
    ids, images = _ids(prompt), images_in_order(prompt)
    kinds = (ids == twin.config.image_token_id).long()
    if not images:
        return twin(input_ids=ids, mm_token_type_ids=kinds, **masks).logits[0]
    side = gemma4_side(twin)
    shown = [gemma4_patches(image.pixels[None], side) for image in images]
    most = max(len(positions) for _, positions in shown)
    pixels = [F.pad(patches[0], (0, 0, 0, most - len(patches[0]))) for patches, _ in shown]
    positions = [F.pad(p, (0, 0, 0, most - len(p)), value=-1) for _, p in shown]
    return twin(
        input_ids=ids,
        pixel_values=torch.stack(pixels),
        image_position_ids=torch.stack(positions),
        mm_token_type_ids=kinds,
        **masks,
    ).logits[0]


def gemma4_unified(twin: Any, prompt: Prompt) -> Tensor:
    """With the masks of `generate`, in which image rows are causal in layers without a window, as
    in other models of Gemma 4. Those of this model's `forward` alone differ."""
    ids = _ids(prompt)
    masks = twin.create_masks_for_generate(
        twin.config,
        twin.get_input_embeddings()(ids),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=(ids == twin.config.image_token_id).long(),
    )
    return gemma4(twin, prompt, attention_mask=masks)


def lfm2(twin: Any, prompt: Prompt) -> Tensor:
    images = images_in_order(prompt)
    if not images:
        return twin(input_ids=_ids(prompt)).logits[0]
    parts = [lfm2_processor().parts(*image.grid) for image in images]
    given = [lfm2_inputs(i.pixels, p, twin.config) for i, p in zip(images, parts, strict=True)]
    most = max(inputs["pixel_values"].shape[1] for inputs in given)
    padded = {
        name: [
            F.pad(inputs[name], (0, 0) * dims + (0, most - inputs[name].shape[1]))
            for inputs in given
        ]
        for name, dims in (("pixel_values", 1), ("pixel_attention_mask", 0))
    }
    shapes = torch.cat([inputs["spatial_shapes"] for inputs in given])
    joined = {name: torch.cat(parts) for name, parts in padded.items()}
    return twin(input_ids=_ids(prompt), spatial_shapes=shapes, **joined).logits[0]


def llava_next(twin: Any, prompt: Prompt) -> Tensor:
    images = images_in_order(prompt)
    if not images:
        return twin(input_ids=_ids(prompt)).logits[0]
    sizes = torch.tensor([image.grid for image in images])
    most = max(len(image.pixels) for image in images)
    padded = [F.pad(i.pixels, (0, 0) * 3 + (0, most - len(i.pixels))) for i in images]
    pixels = torch.stack(padded)
    return twin(input_ids=_ids(prompt), pixel_values=pixels, image_sizes=sizes).logits[0]


def mistral3(twin: Any, prompt: Prompt) -> Tensor:
    images = [image.pixels for image in images_in_order(prompt)]
    if not images:
        return twin(input_ids=_ids(prompt)).logits[0]
    sizes = torch.tensor([pixels.shape[1:] for pixels in images])
    high, wide = sizes.amax(0).tolist()
    padded = [F.pad(p, (0, wide - p.shape[2], 0, high - p.shape[1])) for p in images]
    pixels = torch.stack(padded)
    return twin(input_ids=_ids(prompt), pixel_values=pixels, image_sizes=sizes).logits[0]


def mllama(twin: Any, prompt: Prompt) -> Tensor:
    ids, images = _ids(prompt), images_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    sparse = get_cross_attention_token_mask(list(prompt.tokens), twin.config.image_token_index)
    counts = [image.grid[0] * image.grid[1] for image in images]
    mask = convert_sparse_cross_attention_mask_to_dense(
        [sparse], [counts], MLLAMA_TILES, ids.shape[1]
    )
    numbers, tiles = aspect_ratios([[image.grid for image in images]], MLLAMA_TILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MllamaVisionEncoder, "forward", states_before_layers)
        return twin(
            input_ids=ids,
            pixel_values=torch.stack([image.pixels for image in images]).unsqueeze(0),
            aspect_ratio_ids=numbers,
            aspect_ratio_mask=tiles,
            cross_attention_mask=torch.from_numpy(mask),
        ).logits[0]


def qwen(twin: Any, prompt: Prompt) -> Tensor:
    kinds = (_ids(prompt) == twin.config.image_token_id).int()
    return exaone45(twin, prompt, mm_token_type_ids=kinds)


def exaone45(twin: Any, prompt: Prompt, **kinds: Tensor) -> Tensor:
    """kinds: the kind of each token, for text models whose positions depend on it."""
    ids, images = _ids(prompt), images_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    merge = twin.config.vision_config.spatial_merge_size
    grids = [[1, image.grid[0] * merge, image.grid[1] * merge] for image in images]
    return twin(
        input_ids=ids,
        pixel_values=qwen_frames(torch.cat([image.pixels for image in images])),
        image_grid_thw=torch.tensor(grids),
        **kinds,
    ).logits[0]


def paddleocr(twin: Any, prompt: Prompt) -> Tensor:
    ids, images = _ids(prompt), images_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    sizes = twin.config.vision_config
    merge, side = sizes.spatial_merge_size, sizes.patch_size
    patches = torch.cat([row_major(image.pixels, image.grid, merge) for image in images])
    return twin(
        input_ids=ids,
        pixel_values=patches.unflatten(1, (3, side, side)),
        image_grid_thw=torch.tensor([[1, *(s * merge for s in image.grid)] for image in images]),
        mm_token_type_ids=(ids == twin.config.image_token_id).int(),
    ).logits[0]


@step_by_step(modeling_qwen3_5, modeling_qwen3_5_moe)
def qwen35(twin: Any, prompt: Prompt) -> Tensor:
    return qwen(twin, prompt)


def hunyuan(twin: Any, prompt: Prompt) -> Tensor:
    ids, images = _ids(prompt), images_in_order(prompt)
    if not images:
        return twin(input_ids=ids).logits[0]
    merge = twin.config.vision_config.spatial_merge_size
    grids = torch.tensor([[1, *(side * merge for side in image.grid)] for image in images])
    patches = [row_major(image.pixels, image.grid, merge) for image in images]
    with tencents_code():
        return twin(
            input_ids=ids,
            pixel_values=torch.cat(patches),
            image_grid_thw=grids,
            mm_token_type_ids=(ids == twin.config.image_token_id).int(),
        ).logits[0]
