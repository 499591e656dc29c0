"""A vision transformer over rectangles of patches, with learned positions of a square."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.image_attention import ImageBatch, whole
from model_zoo.layers.vision.names import first_table
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.vision_layer import LayerNeeds, VisionLayer, layers_bytes
from model_zoo.layers.vision.vision_sizes import VisionSizes
from runtime.vision.encoder import Pause


class RowMerger(LayerNeeds, Protocol):
    """Makes one row of every `each` consecutive ones of a batch: [rows, hidden] -> [rows / each,
    hidden]."""

    @property
    def each(self) -> int: ...

    def __call__(self, x: Tensor, images: int, pause: Pause) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class MergedAfter:
    """Rows are merged after the layer with this index."""

    layer: int
    merger: RowMerger


class RectangularVit:
    """A patch has the position of the square's cell in which its upper left corner lies when the
    rectangle is stretched to the square, as in Dehghani et al., "Patch n' Pack".

    merged: whether and where patches are merged between layers.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: VisionSizes,
        read_layer: Callable[[TensorScope], VisionLayer],
        merged: MergedAfter | None = None,
    ) -> None:
        self._sizes, self._device, self._dtype = sizes, w.device, w.dtype
        self._embed = patch_embedding(w, sizes, "patch_embd")
        name = "position_embd.weight"
        stored = w.shape(name, whole=True, dimensions=2) or (1, sizes.hidden)
        self._across = isqrt(stored[-2])
        shape = (self._across**2, sizes.hidden)
        self._position_embd = first_table(w, name, shape=shape).to(w.dtype)
        self._norm = w.layer_norm("post_ln", sizes.eps, size=sizes.hidden)
        self._layers: Sequence[VisionLayer] = [
            read_layer(w.scope("blk", index)) for index in range(sizes.layers)
        ]
        self._merged = merged

    def nbytes(self, rows: int, *following: LayerNeeds) -> int:
        """Upper bound of the bytes for encoding `rows` patches, result included, and for the layers
        that follow, which take slabs of at most as many rows."""
        sizes = self._sizes
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        needs: list[LayerNeeds] = [*self._layers, *following]
        if self._merged is not None:
            needs.append(self._merged.merger)
        return 4 * edges + layers_bytes(self._device, sizes, needs, rows)

    def __call__(
        self,
        patches: Tensor,
        rows: int,
        columns: int,
        pause: Pause,
        order: Tensor | None = None,
    ) -> Tensor:
        """patches [images, rows * columns, pixels] -> [images, rows * columns, hidden], or fewer
        rows if they are merged. order: that of the result before merging, as numbers of patches in
        row-major order."""
        images, count, _ = patches.shape
        cells = nearest_cells(rows, columns, self._across, device=patches.device)
        if order is not None:
            patches, cells = patches[:, order], cells[order]
        x = self._embed(patches.to(self._dtype).flatten(0, 1)).view(images, count, -1)
        x = x.add_(self._position_embd[cells]).flatten(0, 1)
        batch = ImageBatch(images, whole(count), pause=pause)
        for index, layer in enumerate(self._layers):
            x = layer(x, batch)
            if self._merged is not None and index == self._merged.layer:
                x = self._merged.merger(x, images, pause)
                batch = ImageBatch(images, whole(len(x) // images), pause=pause)
        return self._norm(x).view(images, len(x) // images, -1)


def nearest_cells(rows: int, columns: int, across: int, *, device: torch.device) -> Tensor:
    """int64 [rows * columns]: the cell of a square of `across` cells per side for each patch of a
    rectangle, both in row-major order."""
    down, right = (
        torch.arange(count, device=device) * across // count for count in (rows, columns)
    )
    return (down[:, None] * across + right).flatten()
