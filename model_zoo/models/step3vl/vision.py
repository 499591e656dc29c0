"""Step 3 VL's vision model: a transformer on each view, with layer scale and rotation by column and
row; then two convolutions merge rows."""

from functools import partial

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.equal_views import EqualViews
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, slabs, whole
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.of_views import of_all_views
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.plane_convolution import PlaneConvolution
from model_zoo.layers.vision.position_table import (
    add_positions_,
    interpolating,
    position_table,
)
from model_zoo.layers.vision.rotary import PlaneRotary, coordinates
from model_zoo.layers.vision.vision_layer import (
    LayerNeeds,
    VisionLayer,
    layer_norms,
    layers_bytes,
    read_feed_forward,
    read_layer,
)
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from runtime.kernels.pointwise import gelu_quick
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS = 1e-5
EDGE_KEY, MERGED_KEY = "vision.preproc_image_size", "vision.projector.scale_factor"
LONGEST_EDGE = 3024  # if the file states none, as in llama.cpp


class Step3VLTower:
    """See `VisionTower`. pixels and grid: those of `Step3VLProcessor`, as are the rows of features.
    images: the processor of its images."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: Step3VLProcessor) -> None:
        self.images, self._device, self._dtype = images, w.device, w.dtype
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        sizes.quarters()
        v, mm = w.scope("v"), w.scope("mm")
        self._embed = patch_embedding(v, sizes, "patch_embd")
        self._places = interpolating(position_table(v, sizes))
        self._norm = v.layer_norm("pre_ln", sizes.eps, size=sizes.hidden)
        frequencies = plain_frequencies(sizes.head_dim // 2, DEFAULT_BASE).to(w.device)
        self._rotary = PlaneRotary(frequencies, frequencies, Pairs.INTERLEAVED)
        self._layers = [_layer(v.scope("blk", index), sizes) for index in range(sizes.layers)]
        self._halve = PlaneConvolution(mm, "0", hidden=sizes.hidden, side=3, stride=2)
        self._quarter = PlaneConvolution(mm, "1", hidden=self._halve.out, side=3, stride=2)
        width = (mm.shape("model.fc") or (1,))[0]
        self._project = mm.linear("model.fc", shape=(width, self._quarter.out))
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        """The windows of all images are encoded together, before the whole images."""
        views = self.images.views(self.images.largest.grid)
        rows = images * max(each.patches for each in views)
        edges = rows * (2 * self._sizes.patch_elements + 6 * self._sizes.hidden)
        results = images * self.limits.rows * (4 * self.limits.width + self._quarter.out)
        needs: list[LayerNeeds] = [*self._layers, self._halve, self._quarter]
        return 4 * (edges + results) + layers_bytes(self._device, self._sizes, needs, rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        return of_all_views(self.images.views(grid), pixels, partial(self._features, pause=pause))

    def _features(self, pixels: Tensor, views: EqualViews, pause: Pause) -> Tensor:
        """pixels [images, views, patches, values] -> [images, rows, width]."""
        count = len(pixels) * views.count
        x = self._embed(pixels.to(self._dtype).flatten(0, 2))
        down, across = coordinates(views.rows, views.columns, device=x.device)
        add_positions_(x, self._places(views.rows, views.columns), down, across)
        rotation = repeated(self._rotary(across, down), count)
        batch, x = ImageBatch(count, whole(len(down)), rotation, pause), self._norm(x)
        for layer in self._layers:
            x = layer(x, batch)
        merged = self._quarter(self._halve(x, count, pause), count, pause)
        features = torch.empty(
            len(merged), self.limits.width, dtype=merged.dtype, device=merged.device
        )
        for rows in slabs(merged, pause):
            features[rows] = self._project(merged[rows])
        return features.view(len(pixels), -1, self.limits.width)


def _layer(w: TensorScope, sizes: VisionSizes) -> VisionLayer:
    """Outputs are scaled elementwise."""
    return read_layer(
        w,
        sizes,
        LayerNames(),
        layer_norms(w, sizes),
        read_feed_forward(w, sizes, LayerNames(), gelu_quick),
        attn_gate=w.vector("ls1", size=sizes.hidden),
        ffn_gate=w.vector("ls2", size=sizes.hidden),
    )
