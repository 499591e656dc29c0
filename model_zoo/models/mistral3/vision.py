"""Vision model of Mistral Small 3.1, Pixtral and LightOnOCR: any aspect ratio, merged patches."""

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.prepared import ImageBounds
from model_zoo.layers.rope import Pairs
from model_zoo.layers.rope_scaling import DEFAULT_BASE, plain_frequencies
from model_zoo.layers.vision.image_attention import ImageBatch, repeated, whole
from model_zoo.layers.vision.merging import merged_planes
from model_zoo.layers.vision.names import LayerNames, known_as
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.rotary import PlaneRotary, coordinates
from model_zoo.layers.vision.vision_layer import (
    VisionLayer,
    layers_bytes,
    read_gated,
    read_layer,
    rms_norms,
)
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.multimodal.image_settings import projector_type
from runtime.kernels.pointwise import Gate, gelu_erf, gelu_erf_mul, gelu_quick_mul, silu_mul
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS, SIDE, MERGED = 1e-5, 1540, 2
PROJECTOR_EPS, EDGE_KEY = "vision.projector.layer_norm_epsilon", "vision.longest_edge"
# LightOnOCR's type of projector, and the eps of its text model, which no key states.
LIGHTON, LIGHTON_EPS = "lightonocr", 1e-6
LAYER = LayerNames(
    attn_norm=("ln1", "attn_norm"), output=("attn_out", "attn_output"), ffn_norm=("ln2", "ffn_norm")
)


class PixtralTower:
    """See `VisionTower`. pixels [images, 3, height, width], both sides multiples of the side of a
    merged patch; rows are in row-major order."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: ImageBounds) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS)
        self._device, self._dtype = w.device, w.dtype
        v = w.scope("v")
        self._embed = patch_embedding(v, sizes, "patch_embd", "patch_conv")
        norm = known_as(v, "pre_ln", "encoder_norm")
        self._norm = v.rms_norm(norm, sizes.eps, size=sizes.hidden)
        self._rotary = _rotary(w, sizes)
        self._layers = [_layer(v.scope("blk", i), sizes) for i in range(sizes.layers)]
        self._merge = read_merge(metadata)
        self._projector = PatchMerger(w.scope("mm"), sizes, self._merge)
        v.table("token_embd.img_break", shape=(None,), optional=True)  # in both files
        self.limits = ImageLimits(images.most_rows, images.largest, self._projector.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        sizes, rows = self._sizes, images * self.limits.rows * self._merge**2
        edges = rows * (2 * sizes.patch_elements + 3 * sizes.hidden)
        projected = images * self.limits.rows * self._projector.row_elements
        return 4 * (edges + projected) + layers_bytes(self._device, sizes, self._layers, rows)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        images, rows, columns = len(pixels), *(s // self._sizes.patch for s in pixels.shape[2:])
        patches = squares(pixels.to(self._dtype), self._sizes.patch)
        x = self._norm(self._embed(patches.flatten(0, 1)))
        rotation = repeated(self._rotary(*coordinates(rows, columns, device=x.device)), images)
        batch = ImageBatch(images, whole(rows * columns), rotation, pause)
        for layer in self._layers:
            x = layer(x, batch)
        return self._projector(x.view(images, rows * columns, -1), rows, columns)


class PatchMerger:
    """Merges squares of rows and applies two layers; without a norm and a merging matrix, each row
    is projected by itself. row_elements: elements of activations per merged row."""

    def __init__(self, w: TensorScope, sizes: VisionSizes, size: int) -> None:
        self._size = size
        norm = known_as(w, "input_norm", "norm")
        merging = known_as(w, "patch_merger", "patch_merger.merging_layer")
        shape = (sizes.hidden, sizes.hidden * size**2)
        alone = size == 1 and not w.has(merging)
        eps = _projector_eps(sizes)
        self._norm = None if alone else w.rms_norm(norm, eps, size=sizes.hidden)
        self._merging = None if alone else w.linear(merging, shape=shape)
        first, second = known_as(w, "1", "linear_1"), known_as(w, "2", "linear_2")
        self.width = (w.shape(first) or (1,))[0]
        self._first = w.linear(first, shape=(self.width, sizes.hidden))
        self._second = w.linear(second, shape=(self.width, self.width))
        self.row_elements = 3 * sizes.hidden * size**2 + 2 * sizes.hidden + 4 * self.width

    def __call__(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """x [images, rows * columns, hidden] -> [images, merged rows, width]."""
        if self._norm is not None:
            x = self._norm(x)
        if self._merging is not None:
            x = merged_planes(x, rows, columns, self._size)
        flat = x.flatten(0, 1)
        if self._merging is not None:
            flat = self._merging(flat)
        return self._second(gelu_erf(self._first(flat))).view(len(x), -1, self.width)


def _layer(w: TensorScope, sizes: VisionSizes) -> VisionLayer:
    gated = read_gated(w, sizes, _gate(sizes.metadata))
    return read_layer(w, sizes, LAYER, rms_norms(w, sizes), gated)


def _rotary(w: TensorScope, sizes: VisionSizes) -> PlaneRotary:
    """The frequencies of a whole head, which alternate between rows and columns.

    In llama.cpp's files the rows of queries and keys are in interleaved pairs.
    """
    sizes.quarters()
    base = sizes.metadata.get_positive("vision.rope.freq_base", DEFAULT_BASE)
    frequencies = plain_frequencies(sizes.head_dim, base).to(w.device)
    pairs = Pairs.INTERLEAVED if sizes.metadata.architecture == "clip" else Pairs.NEOX
    return PlaneRotary(frequencies[0::2], frequencies[1::2], pairs)


def _gate(metadata: Metadata) -> Gate:
    if metadata.architecture != "clip" or metadata.get("use_silu", bool, False):
        return silu_mul
    return gelu_erf_mul if metadata.get("use_gelu", bool, False) else gelu_quick_mul


def read_merge(metadata: Metadata) -> int:
    """The side, in patches, of the squares that are merged; 1 in Pixtral's first files."""
    if metadata.architecture == "clip":
        return metadata.get_size("vision.spatial_merge_size", 1, at_most=16)
    return metadata.get_size("spatial_merge_size", MERGED, at_most=16)


def _projector_eps(sizes: VisionSizes) -> float:
    """The stated eps; else that of the text model, which only combined files state; else that of
    the vision model, but in LightOnOCR that of its text model."""
    default = LIGHTON_EPS if projector_type(sizes.metadata) == LIGHTON else sizes.eps
    of_text = sizes.metadata.get_positive("attention.layer_norm_rms_epsilon", default)
    return sizes.metadata.get_positive(PROJECTOR_EPS, of_text)
