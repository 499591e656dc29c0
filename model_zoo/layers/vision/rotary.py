"""Rotary embeddings by row and column, each for one half of the pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.rope import Pairs, Rotation
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.vision_sizes import VisionSizes


@dataclass(frozen=True, slots=True, eq=False)
class PlaneRotary:
    """first, second: float32 [head_dim / 4], the frequencies of each coordinate. alternating:
    whether the pairs of both alternate; otherwise those of the first come first. order: of the
    elements of a head, int64 [head_dim], that puts them where `pairs` expects them."""

    first: Tensor
    second: Tensor
    pairs: Pairs
    alternating: bool = False
    order: Tensor | None = None

    def __call__(self, first: Tensor, second: Tensor) -> Rotation:
        """The rotation of rows with these coordinates, int64 [rows] each."""
        turns = [first[:, None].float() * self.first, second[:, None].float() * self.second]
        angles = torch.stack(turns, 2).flatten(1) if self.alternating else torch.cat(turns, 1)
        return Rotation(angles.cos(), angles.sin(), self.pairs)


def halves_rotary(w: TensorScope, sizes: VisionSizes) -> PlaneRotary:
    """Qwen's rotary embedding: the same frequencies, of half a head, for rows and columns."""
    sizes.quarters()
    base = sizes.metadata.get_positive("vision.rope.freq_base", DEFAULT_BASE)
    frequencies = plain_frequencies(sizes.head_dim // 2, base).to(w.device)
    return PlaneRotary(frequencies, frequencies, Pairs.NEOX)


def coordinates(
    rows: int, columns: int, *, block: int = 1, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column of each patch [rows * columns]. The patches of each square of `block` x
    `block` are consecutive; squares are in row-major order."""
    down, right = rows // block, columns // block
    numbers = torch.arange(rows * columns, device=device).view(down, block, right, block)
    ordered = numbers.permute(0, 2, 1, 3).flatten()
    return ordered // columns, ordered % columns
