"""Normalises 8-bit pixels for a vision model: scaled to [0, 1], less mean, over deviation."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Triple = tuple[float, float, float]  # red, green, blue


@dataclass(frozen=True, slots=True)
class Normalisation:
    """(value / 255 - mean) / std, in float32."""

    mean: Triple
    std: Triple

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """image [..., height, width, 3] -> float32 [..., 3, height, width], contiguous."""
        *lead, height, width, channels = image.shape
        values = np.empty((*lead, channels, height, width), np.float32)
        for channel, table in enumerate(self._tables()):
            np.take(table, image[..., channel], out=values[..., channel, :, :], mode="clip")
        return torch.from_numpy(values)

    def _tables(self) -> NDArray[np.float32]:
        """[3, 256]: the result for each 8-bit value, rounded in the order of the reference."""
        levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(triple, np.float32)[:, None] for triple in (self.mean, self.std))
        return (levels - mean) / std


STANDARD = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNCHANGED = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
