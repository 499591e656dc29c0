"""InternVL's vision model: a transformer with layer scale on tiles, with pixel shuffle."""

from functools import partial

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.merging import read_shuffle, shuffled_planes
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.vision_layer import (
    VisionLayer,
    layer_norms,
    read_feed_forward,
    read_layer,
    rms_norms,
)
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.layers.vision.vit import Vit
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS, PROJECTOR_EPS = 1e-6, 1e-5
SHUFFLED = 2
# The default maximum of tiles per image, without the whole image.
MOST_TILES = 12


class InternVLTower:
    """See `VisionTower`. pixels [images, tiles, 3, side, side]; the grid is unused.

    Rows of features are those of the tiles, in order.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._vit = Vit(
            w.scope("v"),
            sizes,
            sizes.side(),
            partial(_layer, sizes=sizes),
            classed=True,
            post_optional=True,
        )
        self._shuffled = read_shuffle(metadata, self._vit.across, SHUFFLED)
        self._wide = wide = sizes.hidden * self._shuffled**2
        mm = w.scope("mm", "model", "mlp")
        self._norm = mm.layer_norm("0", PROJECTOR_EPS, size=wide)
        width = (mm.shape("3") or (1,))[0]
        self._first = mm.linear("1", shape=(width, wide))
        self._second = mm.linear("3", shape=(width, width))
        self._tiles = -(-images.most_rows // (self._vit.across // self._shuffled) ** 2)
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        projected = images * self.limits.rows * (5 * self._wide + 5 * self.limits.width)
        return 4 * projected + self._vit.nbytes(images * self._tiles)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        rows = self._vit(pixels.flatten(0, 1), pause).contiguous()
        shuffled = shuffled_planes(rows, self._vit.across, self._shuffled).flatten(0, 1)
        features = self._second(gelu_erf(self._first(self._norm(shuffled))))
        return features.view(len(pixels), -1, self.limits.width)


def _layer(w: TensorScope, *, sizes: VisionSizes) -> VisionLayer:
    """Outputs are scaled elementwise; the largest models have RMS norms."""
    feed_forward = read_feed_forward(w, sizes, LayerNames(), gelu_erf)
    bias = w.table("ln1.bias", shape=(sizes.hidden,), optional=True)
    norms = rms_norms(w, sizes) if bias is None else layer_norms(w, sizes)
    return read_layer(
        w,
        sizes,
        LayerNames(),
        norms,
        feed_forward,
        attn_gate=w.vector("ls1", size=sizes.hidden, optional=True),
        ffn_gate=w.vector("ls2", size=sizes.hidden, optional=True),
    )
