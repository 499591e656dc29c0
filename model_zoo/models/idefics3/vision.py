"""Vision model of Idefics 3 and SmolVLM: SigLIP on tiles, with pixel shuffle."""

from functools import partial

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.vision.merging import read_shuffle, shuffled_planes
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.layers.vision.vit import Vit
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EDGE_KEY = "vision.preproc_image_size"

EPS = 1e-6
# The side of the squares of patches that become one row.
SHUFFLED = 2


class Idefics3Tower:
    """See `VisionTower`. pixels [images, tiles, 3, side, side]; the grid is unused.

    Rows of features are those of the tiles, in order.
    """

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        layer = partial(plain_layer, sizes=sizes, names=LayerNames(), curve=gelu)
        self._vit = Vit(w.scope("v"), sizes, sizes.side(), layer)
        self._shuffled = read_shuffle(metadata, self._vit.across, SHUFFLED)
        self._wide = sizes.hidden * self._shuffled**2
        width = (w.shape("mm.model.fc") or (1,))[0]
        self._projection = w.linear("mm.model.fc", shape=(width, self._wide))
        self._tiles = -(-images.most_rows // (self._vit.across // self._shuffled) ** 2)
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        projected = images * self.limits.rows * (3 * self._wide + 2 * self.limits.width)
        return 4 * projected + self._vit.nbytes(images * self._tiles)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        rows = self._vit(pixels.flatten(0, 1), pause).contiguous()
        shuffled = shuffled_planes(rows, self._vit.across, self._shuffled)
        return self._projection(shuffled.flatten(0, 1)).view(len(pixels), -1, self.limits.width)
