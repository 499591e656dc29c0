"""Vision models of rectangles of patches, whose squares become rows of features."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.position_table import add_positions_
from model_zoo.layers.vision.rotary import PlaneRotary, coordinates
from model_zoo.layers.vision.vision_layer import LayerNeeds, VisionLayer, layers_bytes
from model_zoo.layers.vision.vision_sizes import VisionSizes
from runtime.vision.encoder import ImageLimits, Pause, no_pause


class SquareMerger(LayerNeeds, Protocol):
    """Makes one row of the patches of each square: x [patches, hidden] -> [squares, width]."""

    @property
    def width(self) -> int: ...

    def __call__(self, x: Tensor, pause: Pause) -> Tensor: ...


class LineFinish(Protocol):
    """Makes the features of images of their merged rows: x [images, rows, columns, wide] ->
    [images, rows of features, width]. result_elements: elements per row of features."""

    @property
    def width(self) -> int: ...

    @property
    def result_elements(self) -> int: ...

    def __call__(self, x: Tensor, pause: Pause) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class RectangleParts:
    """side: patches along a side of a square. stretched: learned positions [1, hidden, rows,
    columns] of a rectangle. deep: mergers of what the layers with these
    indexes return, whose results are concatenated to those of `merger`. finish: if merged rows are
    not yet the features."""

    sizes: VisionSizes
    side: int
    embed: Callable[[Tensor], Tensor]
    layers: Sequence[VisionLayer]
    merger: SquareMerger
    stretched: Callable[[int, int], Tensor] | None = None
    rotary: PlaneRotary | None = None
    deep: Mapping[int, SquareMerger] = field(default_factory=dict)
    finish: LineFinish | None = None


class RectangleTower:
    """See `VisionTower`. pixels [images, patches, channels * side * side].

    Patches that are merged are consecutive; these squares are in row-major order of the rectangle
    `grid`. images: bounds of its images.
    """

    def __init__(self, w: TensorScope, parts: RectangleParts, images: ImageBounds) -> None:
        self._parts, self._device, self._dtype = parts, w.device, w.dtype
        self.depth = 1 + len(parts.deep)
        width = parts.finish.width if parts.finish else parts.merger.width * self.depth
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        parts, merged = self._parts, images * self.limits.rows
        rows = merged * parts.side**2
        edges = rows * (2 * parts.sizes.patch_elements + 5 * parts.sizes.hidden)
        each = parts.finish.result_elements if parts.finish else 2 * self.limits.width
        needs: list[LayerNeeds] = [*parts.layers, parts.merger, *parts.deep.values()]
        return 4 * (edges + merged * each) + layers_bytes(self._device, parts.sizes, needs, rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        parts, images = self._parts, len(pixels)
        rows, columns = (length * parts.side for length in grid)
        x = parts.embed(pixels.to(self._dtype).flatten(0, 1))
        down, across = coordinates(rows, columns, block=parts.side, device=x.device)
        if parts.stretched is not None:
            add_positions_(x, parts.stretched(rows, columns), down, across)
        rotation = order = None
        if parts.rotary is not None:
            rotation, order = repeated(parts.rotary(down, across), images), parts.rotary.order
        batch, deep = ImageBatch(images, whole(rows * columns), rotation, pause, order), []
        for index, layer in enumerate(parts.layers):
            x = layer(x, batch)
            if index in parts.deep:
                deep.append(parts.deep[index](x, pause))
        merged = parts.merger(x, pause)
        if parts.finish is not None:
            return parts.finish(merged.view(images, *grid, -1), pause)
        features = torch.cat([merged, *deep], dim=1) if deep else merged
        return features.view(images, grid[0] * grid[1], -1)
