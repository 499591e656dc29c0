"""LLaVA's vision model: CLIP without its last layer, or SigLIP as in Granite Vision and
Moondream, and a projector of two layers."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.vision.names import LayerNames
from model_zoo.layers.vision.vision_layer import VisionLayer, plain_layer
from model_zoo.layers.vision.vision_sizes import CHANNELS, VisionSizes
from model_zoo.layers.vision.vit import Vit, VitNames
from runtime.errors import UnsupportedModelError
from runtime.kernels.pointwise import gelu, gelu_erf, gelu_quick
from runtime.vision.encoder import ImageLimits, ImageOutline, Pause, no_pause

# How an image becomes a square: padded with the mean colour, or cropped.
ASPECT_KEY = "vision.image_aspect_ratio"
PADDED, MIDDLE = "pad", "square"

EPS = 1e-5
# The layers whose outputs are projected, counted from 1.
FEATURE_KEY = "vision.feature_layer"
# A value of the large CLIP model, which every LLaVA uses.
CLIP_LAYERS = 24
# The layers of the SigLIP model of Moondream.
SIGLIP_LAYERS = 27


class ProjectedVit:
    """Maps squares of pixels to rows of features, `across` along each side of a square.

    It is CLIP, or SigLIP if the file has neither a class nor a norm before the layers.
    """

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        if w.has("mm.3"):
            raise UnsupportedModelError(
                f"{metadata.path}: the projector has norms, which are not supported."
            )
        stored = VisionSizes.read(metadata, eps=EPS)
        v = w.scope("v")
        is_clip = v.has("pre_ln") or v.shape("class_embd", whole=True) is not None
        features = _features(metadata, stored.layers, is_clip=is_clip)
        self._sizes = sizes = replace(stored, layers=features[-1])
        self.side = sizes.side()
        for layer in range(sizes.layers, stored.layers):
            v.scope("blk", layer).ignore_all()
        if not is_clip:
            v.scope("head").ignore_all()  # which pools the rows of an image
        self._vit = Vit(
            v,
            sizes,
            self.side,
            partial(_clip_layer if is_clip else _siglip_layer, sizes=sizes),
            names=VitNames(pre_norm=("pre_ln",) if is_clip else ()),
            classed=is_clip,
            post_optional=True,
            kept=features if len(features) > 1 else (),
        )
        self.across = self._vit.across
        self._inner, self.width = _projector_sizes(w)
        self._wide = sizes.hidden * len(features)
        self._first = w.linear("mm.0", shape=(self._inner, self._wide))
        self._second = w.linear("mm.2", shape=(self.width, self._inner))
        self._curve = gelu if is_moondream(w) else gelu_erf

    def nbytes(self, squares: int) -> int:
        """An upper bound of the bytes that encoding `squares` squares takes, result included."""
        elements = 2 * self._wide + 3 * self._inner + 2 * self.width
        return 4 * squares * self.across**2 * elements + self._vit.nbytes(squares)

    def __call__(self, pixels: Tensor, pause: Pause) -> Tensor:
        """pixels [squares, 3, side, side] -> [squares, across * across, width]"""
        rows = self._vit(pixels, pause).flatten(0, 1)
        return self._second(self._curve(self._first(rows))).view(len(pixels), -1, self.width)


class LlavaTower:
    """See `VisionTower`. pixels [images, 3, side, side]; the grid is unused."""

    def __init__(self, w: TensorScope, metadata: Metadata) -> None:
        self._projected = projected = ProjectedVit(w, metadata)
        rows, side = projected.across**2, projected.side
        largest = ImageOutline((CHANNELS, side, side), (1, 1), rows)
        self.limits = ImageLimits(rows, largest, projected.width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        return self._projected.nbytes(images)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        return self._projected(pixels, pause)


def _clip_layer(w: TensorScope, *, sizes: VisionSizes) -> VisionLayer:
    """A layer with quick GELU, as in CLIP, unless the file states another activation."""
    curve = gelu if sizes.metadata.get("use_gelu", bool, False) else gelu_quick
    return plain_layer(w, sizes, LayerNames(), curve)


def _siglip_layer(w: TensorScope, *, sizes: VisionSizes) -> VisionLayer:
    """A layer with GELU, whatever the file states: llama.cpp's converter states quick GELU for the
    approximation that the authors' code names `gelu_pytorch_tanh`."""
    return plain_layer(w, sizes, LayerNames(), gelu)


def is_moondream(w: TensorScope) -> bool:
    """Whether the projector is Moondream's, which is wider between its matrices than its result."""
    inner, width = _projector_sizes(w)
    return inner > width


def _projector_sizes(w: TensorScope) -> tuple[int, int]:
    """Elements of a row between the two matrices, and of a row of features."""
    inner, width = ((w.shape(name) or (1,))[0] for name in ("mm.0", "mm.2"))
    return inner, width


def _features(metadata: Metadata, stored: int, *, is_clip: bool) -> tuple[int, ...]:
    """The layers whose outputs are projected, which are stated, else inferred. No layer after the
    last of them is computed.

    Without the key, a file has the layers up to the projected one (older converters) or all layers
    (newer ones), in which case the last but one is projected. Moondream's files and those that were
    made like them have one layer more than SigLIP, a copy of its last one, which llama.cpp does not
    compute.
    """
    listed = metadata.get_array(FEATURE_KEY, int)
    if listed is None:
        is_last_unused = stored == CLIP_LAYERS or (not is_clip and stored == SIGLIP_LAYERS + 1)
        return (stored - is_last_unused,)
    if not listed or list(listed) != sorted(set(listed)):
        raise metadata.error(FEATURE_KEY, f"is {list(listed)[:8]}, not layers in ascending order")
    for layer in listed:
        if not 1 <= layer <= stored:
            raise metadata.error(FEATURE_KEY, f"is {layer}, of {stored} layers")
    return listed
