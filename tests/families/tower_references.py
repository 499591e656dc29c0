"""Features of vision towers as `transformers` computes them: pixels [images, ...] and a shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, Gemma4Config
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import (
    HunYuanVLRotaryEmbedding,
    HunYuanVLVisionPatchEmbed,
)
from transformers.models.mllama.image_processing_pil_mllama import (
    build_aspect_ratio_mask_np,
    convert_aspect_ratios_to_ids_np,
)
from transformers.models.mllama.modeling_mllama import MllamaVisionEncoder

from model_zoo.layers.vision.clamped import BOUNDS
from model_zoo.layers.vision.patches import squares
from model_zoo.layers.vision.rotary import coordinates
from model_zoo.models.lfm2.image_processor import ImageParts
from tests.families.towers import TowerPair
from tests.families.vision_configs import lfm2_processor


@torch.inference_mode()
def gemma3(pair: TowerPair, pixels: Tensor, shape: None) -> Tensor:
    return pair.twin.get_image_features(pixels).pooler_output


@torch.inference_mode()
def gemma4(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    patches, positions = gemma4_patches(pixels, gemma4_side(pair.twin))
    each = positions.expand(len(pixels), -1, -1)
    return torch.stack(pair.twin.model.get_image_features(patches, each).pooler_output)


@torch.inference_mode()
def hunyuan(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    merge = pair.twin.config.vision_config.spatial_merge_size
    sizes = torch.tensor([[1, grid[0] * merge, grid[1] * merge]] * len(pixels))
    patches = torch.cat([row_major(image, grid, merge) for image in pixels])
    with tencents_code():
        return torch.stack(pair.twin.model.get_image_features(patches, sizes).pooler_output)


@contextmanager
def tencents_code() -> Iterator[None]:
    """Rotation and positions of patches as in Tencent's code for `transformers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HunYuanVLRotaryEmbedding, "recomposition_frequencies", by_sections)
        patch.setattr(HunYuanVLVisionPatchEmbed, "interpolate_pos_encoding", stretched)
        yield


def by_sections(self, freq: Tensor) -> Tensor:
    """Sections divide each half of a head. `transformers` changed it by mistake, so that the two
    elements of a pair are turned by different angles."""
    parts = freq.split(self.mrope_section, dim=-1)
    half = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    return torch.cat([half, half], dim=-1)


def stretched(self, embeddings: Tensor, height: int, width: int) -> Tensor:
    """Scales of the position table are those of slightly more rows and columns."""
    side = self.position_edge
    table = self.position_embedding.weight[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scales = (int(height) + 0.1) / side, (int(width) + 0.1) / side
    plane = F.interpolate(table, scale_factor=scales, mode="bilinear", align_corners=False)
    return plane.flatten(2).transpose(1, 2)


def row_major(patches: Tensor, grid: tuple[int, int], merge: int) -> Tensor:
    """patches [n, elements], of which those of merged squares are consecutive, in row-major
    order."""
    return patches.view(*grid, merge, merge, -1).transpose(1, 2).reshape(patches.shape)


@torch.inference_mode()
def idefics3(pair: TowerPair, pixels: Tensor, tiles: int) -> Tensor:
    each = [pair.twin.get_image_features(image[None]).pooler_output for image in pixels]
    return torch.stack([torch.cat(parts) for parts in each])


@torch.inference_mode()
def internvl(pair: TowerPair, pixels: Tensor, tiles: int) -> Tensor:
    features = pair.twin.get_image_features(pixels.flatten(0, 1)).pooler_output
    return features.reshape(len(pixels), -1, features.shape[-1])


@torch.inference_mode()
def lfm2(pair: TowerPair, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    config = pair.twin.config
    processor = lfm2_processor(config.vision_config.patch_size, config.downsample_factor)
    each = []
    for image in pixels:
        given = lfm2_inputs(image, processor.parts(*size), config)
        each.append(torch.cat(pair.twin.get_image_features(**given).pooler_output))
    return torch.stack(each)


def lfm2_inputs(pixels: Tensor, parts: ImageParts, config: Any) -> dict[str, Tensor]:
    """pixels [patches, 3 * patch * patch] of one image, as the authors' code takes its parts: with
    patches in row-major order, whose colours are innermost, padded to one number."""
    patch, merge = config.vision_config.patch_size, config.downsample_factor
    by_channel = pixels.unflatten(1, (3, patch, patch)).permute(0, 2, 3, 1).flatten(1)
    made, shapes = [], []
    for count, (rows, columns) in parts.planes:
        high, wide = rows * merge, columns * merge
        down, across = coordinates(high, wide, block=merge, device=pixels.device)
        order = (down * wide + across).argsort()
        plane, by_channel = by_channel.tensor_split([count * high * wide])
        made += [part[order] for part in plane.unflatten(0, (count, -1))]
        shapes += [(high, wide)] * count
    most = max(map(len, made))
    return {
        "pixel_values": torch.stack([F.pad(p, (0, 0, 0, most - len(p))) for p in made]),
        "pixel_attention_mask": torch.stack(
            [torch.arange(most) < high * wide for high, wide in shapes]
        ).int(),
        "spatial_shapes": torch.tensor(shapes),
    }


@torch.inference_mode()
def llama4(pair: TowerPair, pixels: Tensor, tiles: int) -> Tensor:
    rows = pair.twin.get_image_features(pixels.flatten(0, 1), return_dict=True)
    features = pair.twin.multi_modal_projector(rows.last_hidden_state)
    return features.view(len(pixels), -1, features.shape[-1])


@torch.inference_mode()
def llava(pair: TowerPair, pixels: Tensor, shape: None) -> Tensor:
    return torch.stack(pair.twin.get_image_features(pixels).pooler_output)


@torch.inference_mode()
def llava_next(pair: TowerPair, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    sizes = torch.tensor([size] * len(pixels))
    return torch.stack(pair.twin.get_image_features(pixels, sizes).pooler_output)


@torch.inference_mode()
def mistral3(pair: TowerPair, pixels: Tensor, patches: tuple[int, int]) -> Tensor:
    sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
    return torch.stack(pair.twin.model.get_image_features(pixels, sizes).pooler_output)


@torch.inference_mode()
def mllama(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    slots = pixels.shape[1]
    numbers, mask = aspect_ratios([[grid]] * len(pixels), slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MllamaVisionEncoder, "forward", states_before_layers)
        states = pair.twin.model.vision_model(pixels.unsqueeze(1), numbers, mask)
        features = pair.twin.model.multi_modal_projector(states.last_hidden_state)
    return features.flatten(1, -2)


def aspect_ratios(grids: list[list[tuple[int, int]]], slots: int) -> tuple[Tensor, Tensor]:
    """Of the grids of images in each text, as Mllama's processor gives them: the index of each, and
    the slots that hold a tile."""
    numbers = convert_aspect_ratios_to_ids_np(grids, slots)
    return torch.from_numpy(numbers), torch.from_numpy(build_aspect_ratio_mask_np(grids, slots))


@torch.inference_mode()
def paddleocr(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    merge, side = (
        getattr(pair.twin.config.vision_config, name)
        for name in ("spatial_merge_size", "patch_size")
    )
    sizes = torch.tensor([[1, grid[0] * merge, grid[1] * merge]] * len(pixels))
    patches = torch.cat([row_major(image, grid, merge) for image in pixels])
    planes = patches.unflatten(1, (3, side, side))
    return torch.stack(pair.twin.model.get_image_features(planes, sizes).pooler_output)


def qwen25vl(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    return torch.stack(_qwen(pair, pixels, grid).pooler_output)


def qwen3vl(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    found = _qwen(pair, pixels, grid)
    deep = [torch.stack(part) for part in found.deepstack_features]
    return torch.cat([torch.stack(found.pooler_output), *deep], dim=-1)


@torch.inference_mode()
def _qwen(pair: TowerPair, pixels: Tensor, grid: tuple[int, int]) -> Any:
    merge = pair.twin.config.vision_config.spatial_merge_size
    sizes = torch.tensor([[1, grid[0] * merge, grid[1] * merge]] * len(pixels))
    return pair.twin.model.get_image_features(qwen_frames(pixels.flatten(0, 1)), sizes)


def qwen_frames(patches: Tensor) -> Tensor:
    """patches [n, 3 * patch * patch] -> [n, 3 * 2 * patch * patch] with two equal frames."""
    return patches.unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1).flatten(1)


def states_before_layers(self, hidden_states, attention_mask=None):
    """The forward pass of mllama's encoder in Meta's code; `transformers` changed it by mistake."""
    states = ()
    for layer in self.layers:
        states = (*states, hidden_states)
        hidden_states = layer(hidden_states=hidden_states, attention_mask=attention_mask)
    return BaseModelOutput(last_hidden_state=hidden_states, hidden_states=states)


def gemma4_side(twin: Any) -> int:
    """The side of a patch. Patches of the 12B model are squares of usual ones."""
    vision = twin.config.vision_config
    return getattr(vision, "model_patch_size", vision.patch_size)


def gemma4_patches(pixels: Tensor, patch: int) -> tuple[Tensor, Tensor]:
    """pixels [images, 3, high, wide] -> patches [images, n, 3 * patch * patch] with the colours of
    a pixel side by side, and the column and row of each [n, 2]."""
    _, _, high, wide = pixels.shape
    by_channel = squares(pixels, patch).unflatten(2, (3, patch, patch))
    down, across = torch.meshgrid(
        torch.arange(high // patch), torch.arange(wide // patch), indexing="ij"
    )
    positions = torch.stack([across.flatten(), down.flatten()], 1)
    return by_channel.permute(0, 1, 3, 4, 2).flatten(2), positions


class Gemma4Maker:
    """Makes models whose bounds clip values; other buffers are one, not uninitialised memory."""

    @staticmethod
    @torch.no_grad()
    def from_config(config: Gemma4Config, **options: Any) -> nn.Module:
        model = AutoModelForImageTextToText.from_config(config, **options)
        for name, buffer in model.named_buffers():
            if name.endswith(BOUNDS):
                buffer.fill_(-1.0 if name.endswith("min") else 1.0)
            if "std_" in name:
                buffer.fill_(1.0)
        return model
