"""Gemma 3's vision model: SigLIP, average pooling and one matrix."""

from functools import partial
from math import isqrt

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import CHANNELS, VisionSizes
from model_zoo.layers.vision.vit import Vit, VitNames
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, ImageOutline, Pause, no_pause

EPS, SIDE = 1e-6, 896
# The key for the side of pooled squares, and the key for the number of rows of an image.
POOLED, ROWS = 4, 256
LAYER = LayerNames(
    attn_norm=("ln1", "layer_norm1"),
    output=("attn_out", "attn_output"),
    ffn_norm=("ln2", "layer_norm2"),
    up=("ffn_up", "mlp.fc1"),
    down=("ffn_down", "mlp.fc2"),
)


NAMES = VitNames(
    patches=("patch_embd", "patch_embedding"),
    places=("position_embd", "position_embedding"),
    post_norm=("post_ln", "post_layernorm"),
)


class Gemma3Tower:
    """See `VisionTower`. pixels [images, 3, side, side]; the grid is unused."""

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        side = sizes.side(SIDE)
        v = w.scope("vision" if w.has("vision.patch_embedding") else "v")
        layer = partial(plain_layer, sizes=sizes, names=LAYER, curve=gelu)
        self._vit = Vit(v, sizes, side, layer, names=NAMES)
        self._pooled = _pooled(metadata, self._vit.across)
        mm = w.scope("mm")
        norm = known_as(mm, "soft_emb_norm", "mm_soft_emb_norm")
        self._pooled_norm = mm.rms_norm(norm, sizes.eps, size=sizes.hidden)
        name = known_as(mm, "input_projection", "mm_input_projection")
        # Stored as (in, out), which the matmul kernel does not support.
        self._projection = mm.table(f"{name}.weight", shape=(sizes.hidden, None)).to(w.dtype)
        rows, width = (self._vit.across // self._pooled) ** 2, self._projection.shape[1]
        largest = ImageOutline((CHANNELS, side, side), (1, 1), rows)
        self.limits = ImageLimits(rows, largest, width, w.dtype, whole=rows)

    def activation_bytes(self, images: int) -> int:
        result = images * self.limits.rows * (2 * self._sizes.hidden + self.limits.width)
        return 4 * result + self._vit.nbytes(images)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        return self._pooled_norm(self._mean(self._vit(pixels, pause))) @ self._projection

    def _mean(self, x: Tensor) -> Tensor:
        """x [images, patches, hidden] -> [images, rows, hidden], the means of squares of
        patches."""
        size, across = self._pooled, self._vit.across
        count = across // size
        plane = x.unflatten(1, (across, across))[:, : size * count, : size * count]
        parts = plane.unflatten(2, (count, size)).unflatten(1, (count, size))
        return parts.mean((2, 4)).flatten(1, 2)


def _pooled(metadata: Metadata, across: int) -> int:
    """The side, in patches, of the squares that are pooled: stated, or computed from the number of
    rows."""
    stated = "vision.projector.scale_factor"
    if metadata.architecture == "clip":
        size = metadata.get_size(stated, POOLED)
    else:
        older = "mm_tokens_per_image"
        key = older if metadata.has(older) else "mm.tokens_per_image"
        size = across // max(1, isqrt(metadata.get_size(key, ROWS)))
    if not 1 <= size <= across:
        raise metadata.error("vision.image_size", f"has {across} patches across, too few to pool")
    return size
