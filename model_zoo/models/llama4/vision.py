"""Llama 4's vision model: independent tiles, with pixel shuffle."""

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.rope import Pairs, Rotation
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.merging import check_shuffle, read_shuffle, shuffled_planes
from model_zoo.layers.vision.names import LayerNames, first_table, known_as
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.rotary import PlaneRotary, coordinates
from model_zoo.layers.vision.vision_layer import layers_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import MAX_SIDE, VisionSizes
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS, SIDE = 1e-5, 336
# The side of the squares of patches that become one row.
SHUFFLED = 2
CLASS = ("class_embd", "class_embd.weight", "class_embedding", "class_embedding.weight")
PLACES = ("position_embd.weight", "positional_embedding_vlm", "positional_embedding_vlm.weight")
LAYER = LayerNames(
    attn_norm=("ln1", "attn_norm"),
    output=("attn_out", "attn_output"),
    ffn_norm=("ln2", "attn_post_norm", "ffn_norm"),
    up=("ffn_up", "mlp.fc1"),
    down=("ffn_down", "mlp.fc2"),
)


class Llama4Tower:
    """See `VisionTower`. pixels [images, tiles, 3, side, side]; the grid is unused.

    Rows of features are those of the tiles, in order.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        self._sizes = sizes = read_sizes(metadata)
        self._device, self._dtype = w.device, w.dtype
        self._across = across = sizes.side(SIDE) // sizes.patch
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd", "patch_embedding")
        self._class = first_table(v, *CLASS, shape=(sizes.hidden,)).to(w.dtype)
        places = (across**2 + 1, sizes.hidden)
        self._position_embd = first_table(v, *PLACES, shape=places).to(w.dtype)
        self._pre_norm, self._post_norm = (
            v.layer_norm(known_as(v, *names), sizes.eps, size=sizes.hidden)
            for names in (("pre_ln", "layernorm_pre"), ("post_ln", "layernorm_post"))
        )
        self._rotation = _rotation(w, sizes, across)
        self._layers = [
            plain_layer(v.scope("blk", i), sizes, LAYER, gelu_erf) for i in range(sizes.layers)
        ]
        self._adapter = VisionAdapter(w, sizes, read_shuffled(metadata, across))
        self._tiles = -(-images.most_rows // self._adapter.rows(across))
        self.limits = ImageLimits(images.most_rows, images.largest, self._adapter.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, rows = self._sizes, images * self._tiles * len(self._position_embd)
        edges = rows * (2 * sizes.patch_elements + 4 * sizes.hidden)
        projected = images * self.limits.rows * self._adapter.row_elements
        return 4 * (edges + projected) + layers_bytes(self._device, sizes, self._layers, rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        tiles, (rows, hidden) = pixels.shape[0] * pixels.shape[1], self._position_embd.shape
        patches = squares(pixels.flatten(0, 1).to(self._dtype), self._sizes.patch)
        embedded = self._embed(patches.flatten(0, 1)).view(tiles, rows - 1, hidden)
        last = self._class.expand(tiles, 1, hidden)
        x = torch.cat([embedded, last], dim=1).add_(self._position_embd)
        x = self._pre_norm(x.view(-1, hidden))
        batch = ImageBatch(tiles, whole(rows), repeated(self._rotation, tiles), pause)
        for layer in self._layers:
            x = layer(x, batch)
        x = self._post_norm(x).view(tiles, rows, hidden)[:, :-1].contiguous()
        return self._adapter(x, self._across).view(pixels.shape[0], -1, self._adapter.width)


class VisionAdapter:
    """Pixel shuffle, then three layers, the first two with GELU."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, size: int) -> None:
        self._size, wide = size, sizes.hidden * size**2
        first = known_as(w, "mm.model.mlp.1", "v.vision_adapter.mlp.fc1")
        second = known_as(w, "mm.model.mlp.2", "v.vision_adapter.mlp.fc2")
        last = known_as(w, "mm.model.fc", "mm.linear_1")
        inner, outer = ((w.shape(name) or (1,))[0] for name in (first, second))
        self.width = (w.shape(last) or (1,))[0]
        self._first = w.linear(first, shape=(inner, wide))
        self._second = w.linear(second, shape=(outer, inner))
        self._last = w.linear(last, shape=(self.width, outer))
        self.row_elements = 3 * wide + 4 * inner + 4 * outer + 2 * self.width

    def rows(self, across: int) -> int:
        return (across // self._size) ** 2

    def __call__(self, x: Tensor, across: int) -> Tensor:
        """x [tiles, across * across, hidden] -> [tiles * rows, width]."""
        merged = shuffled_planes(x, across, self._size).flatten(0, 1)
        return self._last(gelu_erf(self._second(gelu_erf(self._first(merged)))))


def read_sizes(metadata: Metadata) -> VisionSizes:
    """The sizes; the flavours of files state the norms' eps under different keys."""
    if metadata.architecture == "clip":
        return VisionSizes.read(metadata, eps=EPS)
    return VisionSizes.read(metadata, eps=EPS, eps_key="vision.layer_norm_epsilon")


def _rotation(w: TensorScope, sizes: VisionSizes, across: int) -> Rotation:
    """The rotation of a tile's patches by column and row, counted from 1. The class row is not
    rotated."""
    sizes.quarters()
    base = sizes.metadata.get_positive("vision.rope.freq_base", DEFAULT_BASE)
    frequencies = plain_frequencies(sizes.head_dim // 2, base)
    down, right = coordinates(across, across, device=frequencies.device)
    still = torch.zeros(1, dtype=torch.int64)
    rotary = PlaneRotary(frequencies, frequencies, Pairs.INTERLEAVED)
    return rotary(torch.cat([right + 1, still]), torch.cat([down + 1, still])).to(w.device)


def read_shuffled(metadata: Metadata, across: int) -> int:
    """The side of the squares of patches that become one row."""
    if metadata.architecture == "clip":
        return read_shuffle(metadata, across, SHUFFLED)
    ratio = metadata.get_positive("vision.pixel_shuffle_ratio", 1 / SHUFFLED)
    size = round(min(1 / ratio, MAX_SIDE))
    check_shuffle(metadata, across, size)
    return size
