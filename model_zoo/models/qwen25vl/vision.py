"""The vision model of Qwen2.5-VL and EXAONE 4.5: any aspect ratio; most layers attend within
windows."""

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.patches import frame_embedding
from model_zoo.layers.vision.rotary import coordinates, halves_rotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import (
    VisionLayer,
    layers_bytes,
    read_gated,
    read_layer,
    rms_norms,
)
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from model_zoo.layers.vision.windows import windows
from runtime.kernels.pointwise import silu_mul
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS, WINDOW, FRAMES = 1e-6, 112, 2
FULL_LAYERS = (7, 15, 23, 31)
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")
OLLAMA_FRAMES = ("patch_embd_0.weight", "patch_embd_1.weight")


class Qwen25VLTower:
    """See `VisionTower`. pixels [images, patches, channels * side * side].

    Patches that are merged are consecutive; these squares are in row-major order of the rectangle
    `grid`.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        self._sizes = sizes = VisionSizes.read(
            metadata, eps=EPS, layers=32, hidden=1280, heads=16, patch=14
        )
        self._device, self._dtype = w.device, w.dtype
        self._merge = merged_side(metadata)
        v = w.scope("v")
        names = OLLAMA_FRAMES if v.has("patch_embd_0") else FILE_FRAMES
        self._embed = frame_embedding(v, sizes, *names)
        self._rotary = halves_rotary(w, sizes)
        self._layers = [_layer(v.scope("blk", i), sizes) for i in range(sizes.layers)]
        self._full = _full_layers(metadata, sizes.layers)
        window = metadata.get_size("vision.window_size", WINDOW)
        self._window = max(1, window // self._merge // sizes.patch)
        self._merger = _merger(w, sizes, self._merge**2)
        self.limits = ImageLimits(images.most_rows, images.largest, self._merger.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, merged = self._sizes, images * self.limits.rows
        rows = merged * self._merge**2
        edges = rows * (3 * sizes.patch_elements + 4 * sizes.hidden)
        return 4 * (edges + 3 * merged * self.limits.width) + layers_bytes(
            self._device, sizes, [*self._layers, self._merger], rows
        )

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, (rows, columns), each = len(pixels), grid, self._merge**2
        arrangement = windows(rows, columns, self._window, each=each, device=pixels.device)
        squares = pixels.to(self._dtype).unflatten(1, (rows * columns, each))
        x = self._embed(arrangement.arranged(squares).flatten(0, 2))
        places = coordinates(
            rows * self._merge, columns * self._merge, block=self._merge, device=x.device
        )
        down, across = (
            arrangement.arranged(place.view(1, rows * columns, each)).flatten() for place in places
        )
        rotation = repeated(self._rotary(down, across), images)
        near = ImageBatch(images, arrangement.spans, rotation, pause)
        far = ImageBatch(images, whole(rows * columns * each), rotation, pause)
        for index, layer in enumerate(self._layers):
            x = layer(x, far if index in self._full else near)
        return arrangement.restored(self._merger(x, pause).view(images, rows * columns, -1))


def _merger(w: TensorScope, sizes: VisionSizes, each: int) -> RowProjector:
    """For every `each` rows, which are normed before."""
    first, second = (known_as(w, f"mm.{name}", f"v.merger.mlp.{name}") for name in ("0", "2"))
    wide, width = sizes.hidden * each, (w.shape(second) or (1,))[0]
    return RowProjector(
        w.linear(first, shape=(wide, wide)),
        w.linear(second, shape=(width, wide)),
        (wide, wide, width),
        w.rms_norm(known_as(w, "v.post_ln", "v.merger.ln_q"), sizes.eps, size=sizes.hidden),
    )


def _layer(w: TensorScope, sizes: VisionSizes) -> VisionLayer:
    """In EXAONE 4.5, heads of queries share keys and values."""
    return read_layer(
        w,
        sizes,
        LayerNames(),
        rms_norms(w, sizes),
        read_gated(w, sizes, silu_mul),
        kv_heads=sizes.kv_heads(default=sizes.heads),
    )


def _full_layers(metadata: Metadata, layers: int) -> frozenset[int]:
    """The layers that attend to the whole image: those listed, or every n-th, or all."""
    if metadata.architecture != "clip":
        listed = metadata.get_array("vision.fullatt_block_indexes", int)
        return frozenset(FULL_LAYERS if listed is None else listed)
    every = metadata.get("vision.n_wa_pattern", int, 0)
    if every <= 0:
        return frozenset(range(layers))
    return frozenset(range(every - 1, layers, every))
