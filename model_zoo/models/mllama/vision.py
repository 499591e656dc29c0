"""Llama 3.2 Vision's vision model: encodes all tiles of an image together, and returns the states
of several layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import MAX_LAYERS, Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.tiling import grids
from model_zoo.layers.vision.image_attention import AttentionSpan, ImageBatch, slabs, whole
from model_zoo.layers.vision.names import LayerNames, first_table
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.vision_layer import (
    VisionLayer,
    layer_norms,
    layers_bytes,
    plain_layer,
    read_feed_forward,
    read_layer,
)
from model_zoo.layers.vision.vision_sizes import CHANNELS, VisionSizes
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import ImageLimits, ImageOutline, Pause, no_pause

EPS, TILES = 1e-5, 4
KEPT_LAYERS = (3, 7, 15, 23, 30)
# Rows of a tile are padded with zeros to a multiple of this; real rows attend to padding.
ROUNDED = 8
LAYER = LayerNames(attn_norm=("attn_norm",), output=("attn_output",), ffn_norm=("ffn_norm",))


class MllamaTower:
    """See `VisionTower`. pixels [images, slots, 3, side, side], of which the first hold tiles in a
    rectangle `grid`; features are rows of all slots.

    Rows of tiles attend to empty slots and padding rows, which do not attend to each other. A row
    of features consists of the state after the last layer and the states before some other layers.
    """

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        side, self._device, self._dtype = sizes.side(), w.device, w.dtype
        self._slots = metadata.get_size("vision.max_num_tiles", TILES, at_most=64)
        self._rows = (side // sizes.patch) ** 2 + 1
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._class = first_table(v, "class_embd", "class_embd.weight", shape=(sizes.hidden,))
        self._tile_positions = TilePositions(v, sizes, self._slots, self._rows)
        self._pre_norm, self._post_norm = (
            v.layer_norm(name, EPS, size=sizes.hidden) for name in ("pre_ln", "post_ln")
        )
        self._local = [
            plain_layer(v.scope("blk", i), sizes, LAYER, gelu_erf) for i in range(sizes.layers)
        ]
        count = metadata.require_size("vision.global.block_count", at_most=MAX_LAYERS)
        self._global = [_gated_layer(v.scope("global", "blk", i), sizes) for i in range(count)]
        self._kept = _kept_layers(metadata, sizes.layers)
        name, wide = "mm.0", sizes.hidden * (1 + len(self._kept))
        self._width = (w.shape(name) or (1,))[0]
        self._projection = w.linear(name, shape=(self._width, wide))
        shape, rows = (self._slots, CHANNELS, side, side), self._slots * self._rows
        largest = ImageOutline(shape, (1, self._slots), rows)
        self.limits = ImageLimits(rows, largest, self._width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, rows = self._sizes, images * self._slots * (self._rows + ROUNDED)
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        places = self._slots * self._rows * 3 * sizes.hidden
        kept = rows * len(self._kept) * sizes.hidden
        wide = rows * self._width + min(rows, 1024) * (
            3 * sizes.hidden * (1 + len(self._kept)) + 2 * self._width
        )
        layers = [*self._local, *self._global]
        return 4 * (edges + places + kept + wide) + layers_bytes(self._device, sizes, layers, rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, hidden = len(pixels), self._sizes.hidden
        x = self._embedded(pixels, grid)
        batch = ImageBatch(images, self._spans(grid[0] * grid[1], x.shape[1]), pause=pause)
        x, kept = x.flatten(0, 1), []
        for index, layer in enumerate(self._local):
            if index in self._kept:
                kept.append(self._without_filling(x, images).clone())
            x = layer(x, batch)
        x = self._post_norm(x).view(images, -1, hidden)
        x = self._tile_positions.after(x, grid).flatten(0, 1)
        for layer in self._global:
            x = layer(x, batch)
        return self._projected(self._without_filling(x, images), kept).view(images, -1, self._width)

    def _embedded(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """[images, rows, hidden]: rows of all slots, then padding rows."""
        images, slots = pixels.shape[:2]
        assert slots == self._slots, (slots, self._slots)
        patches = squares(pixels.flatten(0, 1).to(self._dtype), self._sizes.patch)
        x = self._embed(patches.flatten(0, 1)).view(images, slots, self._rows - 1, -1)
        x = self._tile_positions.before(x, grid)
        first = self._class.to(x.dtype).expand(images, slots, 1, -1)
        x = self._tile_positions.inside(torch.cat([first, x], dim=2), grid)
        filling = slots * (-self._rows % ROUNDED)
        return F.pad(self._pre_norm(x).flatten(1, 2), (0, 0, 0, filling))

    def _spans(self, tiles: int, rows: int) -> tuple[AttentionSpan, ...]:
        """Rows of tiles attend to all rows; the other rows attend to the rows of tiles."""
        shown = tiles * self._rows
        if shown == rows:
            return whole(rows)
        return AttentionSpan(0, shown, 0, rows), AttentionSpan(shown, rows, 0, shown)

    def _without_filling(self, x: Tensor, images: int) -> Tensor:
        """x [images * rows, hidden] -> [images * rows of the slots, hidden], without padding
        rows."""
        return x.view(images, -1, x.shape[1])[:, : self.limits.rows].flatten(0, 1)

    def _projected(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        """x and each of `kept` [rows, hidden] -> [rows, width]."""
        result = x.new_empty(len(x), self._width)
        for rows in slabs(x):
            states = torch.stack([state[rows] for state in kept], dim=-1).flatten(1)
            result[rows] = self._projection(torch.cat([x[rows], states], dim=1))
        return result


class TilePositions:
    """Gated position tables: one for rows in a tile, one for tiles in a grid."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, slots: int, rows: int) -> None:
        self._grids, self._rows = grids(slots), rows
        shape, hidden = (1 + len(self._grids), slots, 1, sizes.hidden), sizes.hidden
        flat = (shape[0], slots * hidden)
        self._before, self._after = (
            (w.table(f"{name}.weight", shape=flat) * _gate(w, f"{name}.gate")).view(shape)
            for name in ("pre_tile_position_embd", "post_tile_position_embd")
        )
        inside = w.table("position_embd.weight", shape=(rows, hidden))
        self._inside = inside * _gate(w, "position_embd.gate")
        # The largest table by far, so its rows are read on demand.
        name = "tile_position_embd"
        self._tiles = w.embedding(name, shape=(shape[0], slots * rows * hidden))
        self._tiles_gate = _gate(w, f"{name}.gate")
        self._numbers = torch.arange(shape[0], device=w.device)

    def before(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [images, slots, patches, hidden], overwritten."""
        return x.add_(self._before[self._number(grid)].to(x.dtype))

    def inside(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [images, slots, rows, hidden], overwritten."""
        number = self._number(grid)
        tiles = self._tiles(self._numbers[number : number + 1]).mul_(self._tiles_gate)
        x.add_(self._inside.to(x.dtype))
        return x.add_(tiles.view(x.shape[1:]).to(x.dtype))

    def after(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [images, rows, hidden], with padding rows at the end; overwritten."""
        table = self._after[self._number(grid)].to(x.dtype)
        slots, hidden = table.shape[0], table.shape[2]
        for part in (x[:, : slots * self._rows], x[:, slots * self._rows :]):
            part.view(len(x), slots, -1, hidden).add_(table)
        return x

    def _number(self, grid: tuple[int, int]) -> int:
        """The index of the grid among all grids, from 1; row 0 of a table is for no image."""
        return self._grids.index(grid) + 1


def _gate(w: TensorScope, name: str) -> Tensor:
    """float32 [1]: the factor of a gate."""
    return w.vector(name, size=1, bare=True)


def _gated_layer(w: TensorScope, sizes: VisionSizes) -> VisionLayer:
    feed_forward = read_feed_forward(w, sizes, LAYER, gelu_erf)
    return read_layer(
        w,
        sizes,
        LAYER,
        layer_norms(w, sizes),
        feed_forward,
        attn_gate=_gate(w, "attn_gate"),
        ffn_gate=_gate(w, "ffn_gate"),
    )


def _kept_layers(metadata: Metadata, layers: int) -> tuple[int, ...]:
    key = "vision.intermediate_layers_indices"
    listed = metadata.get_array(key, int)
    listed = KEPT_LAYERS if listed is None else listed
    if not listed:
        raise metadata.error(key, "is empty; features take the states of at least one layer")
    if list(listed) != sorted(set(listed)) or not all(0 <= index < layers for index in listed):
        raise metadata.error(key, f"names {listed} of {layers} layers, or not in order")
    return listed
