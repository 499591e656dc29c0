"""Tiny models of dots.ocr for the tables of towers and of vision models.

`transformers` has no class for it: its vision model is that of Qwen2.5-VL without windows and
biases, and with the norms of the authors' code; its text model is Qwen 2.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen2Config
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLMLP,
)

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.models.dots_ocr.multimodal import read_processor
from model_zoo.models.dots_ocr.placeholders import TEXTS
from model_zoo.models.dots_ocr.vision import dots_tower
from model_zoo.registry import load
from runtime.vision.encoder import VisionTower
from tests.families import kimivl_families
from tests.families.minicpmv_twin import randomise
from tests.families.text_family import SIZES
from tests.families.tower_family import TowerFamily
from tests.families.towers import TowerPair, load_tower, random_pixels
from tests.families.vision_agreement import CPU, VisionPair, write_checkpoint

HIDDEN, PATCH, MERGE, ROWS = 48, 14, 2, 30
PROCESSOR = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * ROWS}
NAMES = {"gate_proj": "fc1", "up_proj": "fc3", "down_proj": "fc2"}


class Patchifier(nn.Module):
    def __init__(self, side: int, eps: float) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, HIDDEN, side, side)
        self.norm = nn.RMSNorm(HIDDEN, eps)

    def forward(self, x: Tensor) -> Tensor:
        side = self.proj.kernel_size[0]
        return self.norm(self.proj(x.view(-1, 3, side, side)).flatten(1))


class DotsTwin(nn.Module):
    """text: the twin of the text model."""

    def __init__(
        self, *, patch: int = PATCH, merge: int = MERGE, eps: float = 1e-5, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = Qwen2_5_VLVisionConfig(
            depth=2,
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_heads=3,
            out_hidden_size=SIZES["hidden_size"],
            patch_size=patch,
            spatial_merge_size=merge,
            fullatt_block_indexes=[0, 1],
        )
        self.config._attn_implementation = "eager"
        self.eps, self.text = eps, None
        self.vision = vision = Qwen2_5_VisionTransformerPretrainedModel(self.config)
        vision.patch_embed = nn.Sequential(OrderedDict(patchifier=Patchifier(patch, eps)))
        for block in vision.blocks:
            block.norm1, block.norm2 = nn.RMSNorm(HIDDEN, eps), nn.RMSNorm(HIDDEN, eps)
            block.attn.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
            block.attn.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
            block.mlp = Qwen2_5_VLMLP(self.config, bias=False)
        vision.post_trunk_norm = last = nn.RMSNorm(HIDDEN, eps)
        vision.merger.ln_q = nn.LayerNorm(HIDDEN, 1e-6)
        vision.merger.register_forward_pre_hook(lambda merger, inputs: (last(*inputs),))
        self.eval().requires_grad_(False)
        randomise(self, seed)

    def features(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """pixels [patches, 3 * side * side], in the processor's order -> [rows, width]."""
        merge = self.config.spatial_merge_size
        shape = torch.tensor([[1, grid[0] * merge, grid[1] * merge]])
        return self.vision(pixels, shape).pooler_output


def build_tower(w: TensorScope, metadata: Metadata) -> VisionTower:
    return dots_tower(w, metadata, read_processor(metadata))


def write_tower(folder: Path, **settings: Any) -> TowerPair:
    path, twin = folder / "mmproj-tiny.gguf", DotsTwin(**settings)
    _write(folder, twin, ("tiny.gguf", path.name))
    return TowerPair(load_tower(build_tower, path), twin, path)


def pixels(pair: TowerPair, images: int, grid: tuple[int, int]) -> Tensor:
    config = pair.twin.config
    patches = grid[0] * grid[1] * config.spatial_merge_size**2
    return random_pixels(images, patches, 3 * config.patch_size**2)


def write_model(folder: Path, files: tuple[str, str], **settings: Any) -> VisionPair:
    twin = DotsTwin(**settings)
    path, projector = _write(folder, twin, files)
    model = load(path, projector=projector, device=CPU, dtype=torch.float32)
    return VisionPair(model, twin, kimivl_families.expected)


def _write(folder: Path, twin: DotsTwin, files: tuple[str, str]) -> tuple[Path, Path]:
    """Write the authors' checkpoint and the files that are converted from it."""
    source = folder / "checkpoint"
    twin.text = write_checkpoint(
        Qwen2Config(**SIZES), source, special=TEXTS.reserved, spelled=TEXTS.spelled
    )
    config, weights = source / "config.json", source / "model.safetensors"
    sizes = {
        "embed_dim": HIDDEN,
        "hidden_size": SIZES["hidden_size"],
        "intermediate_size": twin.config.intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "patch_size": twin.config.patch_size,
        "spatial_merge_size": twin.config.spatial_merge_size,
        "rms_norm_eps": twin.eps,
        "temporal_patch_size": 1,
        "use_bias": False,
        "post_norm": True,
    }
    named = {"architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr"}
    named["vision_config"] = sizes
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    (source / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    tensors = load_file(weights)
    for name, tensor in twin.vision.state_dict().items():
        for own, theirs in NAMES.items():
            name = name.replace(own, theirs)
        tensors[f"vision_tower.{name}"] = tensor
    save_file(tensors, weights)
    path, projector = (folder / name for name in files)
    convert(source, path, type="f32", flavour="llama.cpp")
    return path, projector


TOWER = TowerFamily(
    build_tower,
    PreTrainedConfig,
    {"plain": {}, "other_eps": {"eps": 1e-2}, "no_merging": {"merge": 1, "patch": 28}},
    pixels,
    kimivl_families.tower_features,
    shapes=((4, 4), (1, 7), (5, 2)),
    grids=True,
    flavours=("llama.cpp",),
    limit_images=(1,),
    writer=write_tower,
)
