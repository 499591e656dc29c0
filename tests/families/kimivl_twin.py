"""Kimi K2.5 and Kimi-VL, which `transformers` does not have: its vision model is that of Kimi K2.5
for images of one frame. Projector files are those of llama.cpp's converter."""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn
from transformers import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25VisionModel,
)

from model_zoo.layers.vision.patches import squares
from tests.families.minicpmv_twin import randomise
from tests.gguf_files import finish

PATCH, MERGE, HEADS = 28, 2, 3
VIT = {
    "patch_size": PATCH,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "merge_kernel_size": [MERGE, MERGE],
}
LAYER = {
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


class KimiVLTwin(nn.Module):
    """text: the twin of the text model."""

    def __init__(self, *, width: int = 64, seed: int = 0, **vit: Any) -> None:
        super().__init__()
        settings = VIT | vit
        config = Kimi_K25Config(
            text_config={"model_type": "llama", "hidden_size": width},
            vision_config=settings,
            projection_hidden_size=settings["hidden_size"],
        )
        config._attn_implementation = config.vision_config._attn_implementation = "eager"
        self.config = config.vision_config
        self.vision = Kimi_K25VisionModel(config.vision_config)
        self.projection = Kimi_K25MultimodalProjection(config)
        self.text: Any = None
        self.eval().requires_grad_(False)
        randomise(self, seed)

    def features(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """pixels [3, height, width] -> [rows, width]."""
        patches = squares(pixels[None], PATCH)[0].view(-1, 3, PATCH, PATCH)
        shape = torch.tensor([[1, grid[0] * MERGE, grid[1] * MERGE]])
        return self.projection(self.vision(patches, shape).pooler_output).flatten(0, 1)


def write_projector(path: Path, twin: KimiVLTwin, *, patches: int, kind: str = "kimivl") -> None:
    """kind: the type of the projector."""
    config, writer = twin.config, gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    for key, value in {
        "image_size": 8 * PATCH,
        "patch_size": PATCH,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "projection_dim": twin.projection.out_proj.out_features,
        "attention.head_count": config.num_attention_heads,
        "block_count": config.num_hidden_layers,
        "projector.scale_factor": MERGE,
        "image_max_pixels": patches * PATCH**2,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_bool("clip.use_gelu", True)
    for name, tensor in (_of_k25 if kind == "kimik25" else _named)(twin).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    finish(writer)


def _named(twin: KimiVLTwin) -> dict[str, Tensor]:
    embed = twin.vision.patch_embed
    named = {"v.position_embd.weight": embed.pos_emb.position_embeddings.flatten(0, 1)}
    modules = {
        "v.patch_embd": embed.proj,
        "v.post_ln": twin.vision.final_layernorm,
        "mm.input_norm": twin.projection.pre_norm,
        "mm.1": twin.projection.in_proj,
        "mm.2": twin.projection.out_proj,
    }
    for index, layer in enumerate(twin.vision.layers):
        modules |= {f"v.blk.{index}.{own}": layer.get_submodule(n) for n, own in LAYER.items()}
    for name, module in modules.items():
        turned = name.endswith(("attn_q", "attn_k"))
        for kind, tensor in (("weight", module.weight), ("bias", module.bias)):
            named[f"{name}.{kind}"] = _neighbours(tensor) if turned else tensor
    return {name: tensor.detach() for name, tensor in named.items()}


def _of_k25(twin: KimiVLTwin) -> dict[str, Tensor]:
    """A table of positions by row and column, and one matrix of queries, keys and values, where the
    pairs of rows turned by column precede those turned by row."""
    named = _named(twin)
    named["v.position_embd.weight"] = twin.vision.patch_embed.pos_emb.position_embeddings.detach()
    for index in range(len(twin.vision.layers)):
        for kind in ("weight", "bias"):
            parts = [named.pop(f"v.blk.{index}.attn_{part}.{kind}") for part in "qkv"]
            turned = [_apart(part) for part in parts[:2]]
            named[f"v.blk.{index}.attn_qkv.{kind}"] = torch.cat([*turned, parts[2]])
    return named


def _apart(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (HEADS, -1, 2, 2)).transpose(1, 2).flatten(0, 3)


def _neighbours(rows: Tensor) -> Tensor:
    """The rows that are turned together are neighbours, in the checkpoints of Kimi-VL."""
    return rows.unflatten(0, (HEADS, 2, -1)).transpose(1, 2).flatten(0, 2)
