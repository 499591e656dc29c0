"""Vision model of MiniMax M3: any aspect ratio; heads are turned by time, row and column, and
patches are projected before they are merged two by two."""

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.patches import frame_embedding
from model_zoo.layers.vision.rectangle_tower import RectangleParts, RectangleTower
from model_zoo.layers.vision.rotary import PlaneRotary
from model_zoo.layers.vision.row_projector import RowProjector
from model_zoo.layers.vision.vision_layer import plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes, merged_side
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import Pause

EPS, FRAMES = 1e-5, 2
FILE_FRAMES = ("patch_embd.weight", "patch_embd.weight.1")


def minimax_tower(w: TensorScope, metadata: Metadata, images: ImageBounds) -> RectangleTower:
    v = w.scope("v")
    sizes, side = VisionSizes.read(metadata, eps=EPS), merged_side(metadata)
    embed = frame_embedding(v, sizes, *FILE_FRAMES)
    norm = v.layer_norm("pre_ln", sizes.eps, size=sizes.hidden)
    parts = RectangleParts(
        sizes,
        side,
        lambda pixels: norm(embed(pixels)),
        [
            plain_layer(v.scope("blk", i), sizes, LayerNames(), gelu_erf)
            for i in range(sizes.layers)
        ],
        _Projector(w.scope("mm"), sizes, side**2),
        rotary=_rotary(w, sizes),
    )
    return RectangleTower(w, parts, images)


def pairs_of_an_axis(head_dim: int) -> int:
    """The pairs of a head that are turned by each of time, row and column; the rest is not."""
    return head_dim // 3 // 2


def _rotary(w: TensorScope, sizes: VisionSizes) -> PlaneRotary:
    """In files, the elements turned by time, which is 0 in images, precede those turned by row and
    these those turned by column, each with the first elements of all pairs before the second."""
    each = pairs_of_an_axis(sizes.head_dim)
    if not each:
        raise sizes.metadata.error("vision.embedding_length", "is too small for three axes")
    _, _, *axes = torch.arange(6 * each).split(each)
    turned = torch.cat([axes[0], axes[2], axes[1], axes[3]])
    order = torch.cat([turned, torch.arange(2 * each), torch.arange(6 * each, sizes.head_dim)])
    frequencies = plain_frequencies(2 * each, DEFAULT_BASE).to(w.device)
    return PlaneRotary(frequencies, frequencies, Pairs.NEOX, order=order.to(w.device))


class _Projector:
    """Two layers for each patch, and two for every `each` rows of their results."""

    def __init__(self, mm: TensorScope, sizes: VisionSizes, each: int) -> None:
        between, wide, merging, self.width = (
            (mm.shape(name) or (1,))[0] for name in ("1", "2", "merger.fc1", "merger.fc2")
        )
        self._of_patches = RowProjector(
            mm.linear("1", shape=(between, sizes.hidden)),
            mm.linear("2", shape=(wide, between)),
            (sizes.hidden, between, wide),
            None,
        )
        self._merged = RowProjector(
            mm.linear("merger.fc1", shape=(merging, each * wide)),
            mm.linear("merger.fc2", shape=(self.width, merging)),
            (each * wide, merging, self.width),
            None,
        )
        parts = self._of_patches, self._merged
        self.kept_elements = wide
        self.row_elements = max(part.row_elements for part in parts)
        self.matrix_elements = max(part.matrix_elements for part in parts)

    def __call__(self, x: Tensor, pause: Pause) -> Tensor:
        """x [patches, hidden] -> [patches / each, width]."""
        return self._merged(self._of_patches(x, pause), pause)
