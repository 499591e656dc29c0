"""Vision model of MiniCPM-V 2.5 to 4.5: SigLIP on parts of an image, and a resampler."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.equal_views import EqualViews
from model_zoo.layers.rope_scaling import DEFAULT_BASE
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.of_views import of_all_views
from model_zoo.layers.vision.rectangular_vit import RectangularVit
from model_zoo.layers.vision.vision_layer import kernel_bytes, plain_layer
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from runtime.kernels.pointwise import gelu
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS = 1e-6
HEAD_DIM = 128  # of the resampler, in all versions


class MiniCPMVTower:
    """See `VisionTower`. pixels and grid: those of `MiniCPMVProcessor`. The rows of features are
    those of the parts, in order. images: the processor of its images."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: MiniCPMVProcessor) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self.images = images
        layer = partial(plain_layer, sizes=sizes, names=LayerNames(), curve=gelu)
        self._vit = RectangularVit(w.scope("v"), sizes, layer)
        self._resampler = Resampler(w.scope("resampler"), sizes)
        self._device, width = w.device, self._resampler.width
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        """The slices of all images are one batch; the resampler takes them one by one."""
        patches = images * self.images.most_patches
        results = 2 * images * self.limits.rows * self.limits.width
        part = self.images.slicing.largest_area // self._sizes.patch**2
        resampled = self._resampler.nbytes(self._device, part)
        elements = results + patches * self._sizes.patch_elements
        return 4 * elements + self._vit.nbytes(patches) + resampled

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        views = self.images.slicing.parts(*grid).views(self._sizes.patch)
        return of_all_views(views, pixels, partial(self._features, pause=pause))

    def _features(self, pixels: Tensor, views: EqualViews, pause: Pause) -> Tensor:
        """pixels [images, views, patches, ...] -> [images, their rows, width]."""
        rows, columns = views.rows, views.columns
        seen = self._vit(pixels.flatten(0, 1), rows, columns, pause)
        features = [self._resampler(part, rows, columns, pause) for part in seen]
        return torch.stack(features).view(len(pixels), -1, self.limits.width)


class Resampler:
    """Learned queries attend to the patches of a part, whose keys have positions (Yao et al.,
    "MiniCPM-V", section 3.2)."""

    def __init__(self, w: TensorScope, sizes: VisionSizes) -> None:
        stored = w.shape("query", whole=True)
        self.queries, self.width = stored if stored and len(stored) == 2 else (1, HEAD_DIM)
        width = self.width
        if width % HEAD_DIM:
            raise sizes.metadata.error(
                "projector_type",
                f"means heads of {HEAD_DIM}, which do not divide the {width:,} of the queries",
            )
        self._hidden = sizes.hidden
        self._query = w.table("query", shape=(self.queries, width)).to(w.dtype)
        self._query_norm, self._norm, self._post_norm = (
            w.layer_norm(name, sizes.eps, size=width) for name in ("ln_q", "ln_kv", "ln_post")
        )
        self._compress = w.linear("kv", shape=(width, sizes.hidden))
        self._to_queries, self._to_keys, self._to_values, self._project, self._output = (
            w.linear(name, shape=(width, width))
            for name in ("attn.q", "attn.k", "attn.v", "attn.out", "proj")
        )
        w.ignore("pos_embed_k", "pos_embd_k")  # computed here

    def nbytes(self, device: torch.device, places: int) -> int:
        """Upper bound of the bytes that a part takes."""
        width = self.width
        matrix = width * max(width, self._hidden)
        kernels = kernel_bytes(device, largest_matrix=matrix, head_dim=HEAD_DIM)
        return 4 * (10 * places + 8 * self.queries) * width + kernels

    def __call__(self, x: Tensor, rows: int, columns: int, pause: Pause) -> Tensor:
        """x [rows * columns, hidden] -> [queries, width]."""
        pause()
        seen = self._norm(self._compress(x))
        places = plane_waves(rows, columns, self.width, device=x.device).to(x.dtype)
        queries = self._to_queries(self._query_norm(self._query))
        parts = queries, self._to_keys(seen + places), self._to_values(seen)
        heads = (part.unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)[None] for part in parts)
        attended = F.scaled_dot_product_attention(*heads)[0].transpose(0, 1).flatten(1)
        return self._output(self._post_norm(self._project(attended)))


def plane_waves(rows: int, columns: int, width: int, *, device: torch.device) -> Tensor:
    """Sines and cosines of the column, then of the row, float32 [rows * columns, width]."""
    quarter = width // 4
    steps = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
    frequencies = 1.0 / DEFAULT_BASE**steps

    def waves(count: int) -> Tensor:
        angles = torch.arange(count, dtype=torch.float32, device=device)[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    across = waves(columns).expand(rows, columns, -1)
    down = waves(rows)[:, None].expand(rows, columns, -1)
    return torch.cat([across, down], dim=2).flatten(0, 1)
