"""Images as `transformers` hands them to Gemma 4's tower."""

import torch
from torch import Tensor

from model_zoo.layers.vision.patches import squares


def as_patches(pixels: Tensor, patch: int) -> tuple[Tensor, Tensor]:
    """pixels [images, 3, high, wide] -> patches [images, n, 3 * patch * patch] with the colours of
    a pixel side by side, and the column and row of each [n, 2]."""
    _, _, high, wide = pixels.shape
    by_channel = squares(pixels, patch).unflatten(2, (3, patch, patch))
    down, across = torch.meshgrid(
        torch.arange(high // patch), torch.arange(wide // patch), indexing="ij"
    )
    places = torch.stack([across.flatten(), down.flatten()], 1)
    return by_channel.permute(0, 1, 3, 4, 2).flatten(2), places
