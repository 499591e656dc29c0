"""MiniCPM-V with a resampler, which `transformers` does not have: the published algorithm in
float32, and the projector files that its authors' converter writes."""

from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.siglip.modeling_siglip import SiglipEncoder
from transformers.vision_utils import get_vision_nearest_position_ids

from tests.gguf_files import finish

SIDE, PATCH, WIDTH, HEAD = 56, 8, 256, 128
VIT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
# Names in files, in which those of the two matrices of a feed-forward are exchanged.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
}


class ResamplerTwin(nn.Module):
    """places: positions along a side of the learned square. text: the twin of the text model."""

    def __init__(
        self, *, queries: int = 4, places: int = 10, width: int = WIDTH, seed: int = 0, **vit: Any
    ) -> None:
        super().__init__()
        config = SiglipVisionConfig(**(VIT | vit))
        config._attn_implementation = "eager"
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.config, self.places = config, places
        self.patches = nn.Conv2d(3, hidden, PATCH, PATCH)
        self.position = nn.Embedding(places**2, hidden)
        self.encoder = SiglipEncoder(config)
        self.post_norm = nn.LayerNorm(hidden, eps)
        self.query = nn.Parameter(torch.empty(queries, width))
        self.compress = nn.Linear(hidden, width, bias=False)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, width // HEAD, batch_first=True)
        self.projection = nn.Parameter(torch.empty(width, width))
        self.text: Any = None
        self.eval().requires_grad_(False)
        randomise(self, seed)

    def features(self, pixels: Tensor, size: tuple[int, int]) -> Tensor:
        """pixels [patches, 3 * patch * patch] of an image of that size -> [rows, width]."""
        sizes = part_sizes(*size)
        parts = zip(pixels.split([prod(size) for size in sizes]), sizes, strict=True)
        return torch.cat([self._part(patches, high, wide) for patches, (high, wide) in parts])

    def _part(self, patches: Tensor, high: int, wide: int) -> Tensor:
        kept = patches.view(-1, 3, PATCH, PATCH)
        cells = get_vision_nearest_position_ids(torch.tensor([[high, wide]]), self.places)
        x = self.patches(kept).flatten(1) + self.position(cells)
        x = self.post_norm(self.encoder(x[None]).last_hidden_state[0])
        values = self.ln_kv(self.compress(x))
        keys = values + torch.from_numpy(waves(high, wide, values.shape[1]))
        seen, _ = self.attention(self.ln_q(self.query)[None], keys[None], values[None])
        return self.ln_post(seen[0]) @ self.projection


def waves(rows: int, columns: int, width: int) -> np.ndarray:
    """float32 [rows * columns, width]: half of it for columns, half for rows, sines first."""
    omega = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float32) / (width / 4.0))
    down, right = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    turns = [place.reshape(-1, 1) * omega for place in (right, down)]
    halves = [np.concatenate([np.sin(turn), np.cos(turn)], axis=1) for turn in turns]
    return np.concatenate(halves, axis=1).astype(np.float32)


def part_sizes(height: int, width: int) -> list[tuple[int, int]]:
    """Rows and columns of patches of the overview and each slice of an image.

    Sides are multiples of two patches of the newer model, as in which this one's are half as long.
    """
    theirs = sizing()
    grid = theirs.get_sliced_grid((height, width), 9, SIDE)
    options = {"scale_resolution": SIDE, "patch_size": PATCH // 2, "downsample_mode": "4x"}
    whole = theirs.find_best_resize((height, width), allow_upscale=grid is None, **options)
    sizes = [whole]
    if grid is not None:
        high, wide = theirs.get_refine_size((height, width), grid, allow_upscale=True, **options)
        sizes += [(high // grid[0], wide // grid[1])] * prod(grid)
    return [(high // PATCH, wide // PATCH) for high, wide in sizes]


def sizing() -> MiniCPMV4_6ImageProcessorPil:
    return MiniCPMV4_6ImageProcessorPil(
        scale_resolution=SIDE, patch_size=PATCH // 2, downsample_mode="4x"
    )


def write_projector(path: Path, twin: ResamplerTwin, *, version: int) -> None:
    config, writer = twin.config, gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_text_encoder", False)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.has_minicpmv_projector", True)
    writer.add_string("clip.projector_type", "resampler")
    writer.add_int32("clip.minicpmv_version", version)
    writer.add_uint32("clip.minicpmv_query_num", len(twin.query))
    for key, value in {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "projection_dim": 0,
        "attention.head_count": config.num_attention_heads,
        "block_count": config.num_hidden_layers,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", config.layer_norm_eps)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_bool("clip.use_gelu", True)
    for name, tensor in _named(twin).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    finish(writer)


def _named(twin: ResamplerTwin) -> dict[str, Tensor]:
    width = twin.projection.shape[0]
    attention = twin.attention
    named = {
        "v.patch_embd.weight": twin.patches.weight,
        "v.patch_embd.bias": twin.patches.bias,
        "v.position_embd.weight": twin.position.weight,
        "resampler.query": twin.query,
        "resampler.kv.weight": twin.compress.weight,
        "resampler.attn.out.weight": attention.out_proj.weight,
        "resampler.attn.out.bias": attention.out_proj.bias,
        "resampler.proj.weight": twin.projection.T,
        "resampler.pos_embed_k": torch.from_numpy(waves(12, 12, width)),
    }
    matrices, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    for part, weight, bias in zip("qkv", matrices, biases, strict=True):
        named |= {f"resampler.attn.{part}.weight": weight, f"resampler.attn.{part}.bias": bias}
    modules = {"v.post_ln": twin.post_norm}
    modules |= {f"resampler.{name}": getattr(twin, name) for name in ("ln_q", "ln_kv", "ln_post")}
    for index, layer in enumerate(twin.encoder.layers):
        modules |= {f"v.blk.{index}.{own}": layer.get_submodule(n) for n, own in LAYER.items()}
    for name, module in modules.items():
        named |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    return {name: tensor.detach() for name, tensor in named.items()}


def randomise(twin: nn.Module, seed: int) -> None:
    """Weights large enough that every part of the computation shows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in twin.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * 1.5 * prod(parameter.shape[1:]) ** -0.5)
        else:
            parameter.copy_(noise * 0.3 + parameter)
