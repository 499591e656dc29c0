"""DeepSeek-OCR's first encoder: SAM's, with two convolutions behind it that make one row of sixteen
patches."""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.vision.image_attention import ImageBatch, slabs, whole
from model_zoo.layers.vision.names import LayerNames, first_table, known_as
from model_zoo.layers.vision.patches import patch_embedding
from model_zoo.layers.vision.plane_convolution import PlaneConvolution
from model_zoo.layers.vision.relative_attention import RelativeAttention
from model_zoo.layers.vision.vision_layer import (
    LayerNeeds,
    VisionLayer,
    layer_norms,
    layers_bytes,
    read_feed_forward,
)
from model_zoo.layers.vision.vision_sizes import MAX_PATCH, MAX_SIDE, VisionSizes
from runtime.kernels.pointwise import gelu_erf
from runtime.vision.encoder import Pause

EPS = 1e-6  # of all norms, which no file states
# Names in files of llama.cpp and of Ollama.
NAMES = LayerNames(
    attn_norm=("pre_ln", "norm1"),
    whole=("attn.qkv",),
    output=("attn.out", "attn.proj"),
    ffn_norm=("post_ln", "norm2"),
    up=("mlp.lin1",),
    down=("mlp.lin2",),
)
DOWN = "attn.pos_h.weight", "attn.rel_pos_h"
ACROSS = "attn.pos_w.weight", "attn.rel_pos_w"
PLACES = "pos_embd.weight", "position_embd"


def sam_scope(w: TensorScope) -> TensorScope:
    """The encoder's tensors, which files of Ollama have under a prefix of their own."""
    own = w.scope("s")
    return own if own.has("patch_embd") else w.scope("v", "sam")


def sam_sizes(w: TensorScope, metadata: Metadata) -> VisionSizes:
    """w: the scope of the encoder. The patch is that of its tensor."""
    prefix = "vision.sam" if metadata.architecture == "clip" else "sam"
    keys = {"layers": "block_count", "hidden": "embedding_length", "heads": "head_count"}
    others = {field: f"{prefix}.{key}" for field, key in keys.items()}
    patch = (w.shape("patch_embd") or (1,))[-1]
    if patch > MAX_PATCH:
        raise metadata.error(
            "projector_type", f"means patches of its file, {patch:,}; {MAX_PATCH} is the limit"
        )
    stated = VisionSizes.read(metadata, eps=EPS, others=others, patch=1)
    return replace(stated, patch=patch, eps=EPS)


def patches_across(w: TensorScope, sizes: VisionSizes) -> int:
    """Patches along a side of the whole image, of which each has a position."""
    stored = (w.shape(name, whole=True, dimensions=3) for name in PLACES)
    across = next((shape[-2] for shape in stored if shape), 1)
    if across * sizes.patch > MAX_SIDE:
        raise sizes.metadata.error(
            "projector_type",
            f"means images of {across * sizes.patch:,} pixels on a side; {MAX_SIDE:,} is the limit",
        )
    return across


class SamEncoder:
    """Kirillov et al., "Segment Anything", section 3: windows in most layers, positions of the
    distances, and a neck of two convolutions.

    w: the scope of its tensors. across: patches along a side of views, those of the whole image
    first. width: of a row of the result.
    """

    def __init__(self, w: TensorScope, sizes: VisionSizes, across: Sequence[int]) -> None:
        self._sizes, self._device, self._dtype = sizes, w.device, w.dtype
        self._embed = patch_embedding(w, sizes, "patch_embd")
        shape = (across[0], across[0], sizes.hidden)
        self._places = first_table(w, *PLACES, shape=shape).permute(2, 0, 1)[None]
        blocks = [w.scope("blk", index) for index in range(sizes.layers)]
        attentions = [_attention(block, sizes, across) for block in blocks]
        self._view_elements = max(attention.view_elements for attention in attentions)
        self._layers = [
            _layer(block, sizes, attention)
            for block, attention in zip(blocks, attentions, strict=True)
        ]
        self._neck = PlaneConvolution(w, "neck.0", hidden=sizes.hidden, side=1)
        self._norm = w.layer_norm("neck.1", EPS, size=self._neck.out)
        self._smooth = PlaneConvolution(w, "neck.2", hidden=self._neck.out, side=3)
        self._post_norm = w.layer_norm("neck.3", EPS, size=self._smooth.out)
        self._halve = PlaneConvolution(w, "net_2", hidden=self._smooth.out, side=3, stride=2)
        self._quarter = PlaneConvolution(w, "net_3", hidden=self._halve.out, side=3, stride=2)
        self.width = self._quarter.out

    def nbytes(self, rows: int) -> int:
        """Upper bound of the bytes that encoding so many patches takes, result included."""
        sizes = self._sizes
        convolutions = self._neck, self._smooth, self._halve, self._quarter
        needs: list[LayerNeeds] = [*self._layers, *convolutions]
        edges = rows * (2 * sizes.patch_elements + 5 * sizes.hidden)
        attended = 4 * (edges + self._view_elements)
        return attended + layers_bytes(self._device, sizes, needs, rows)

    def __call__(self, patches: Tensor, across: int, pause: Pause) -> Tensor:
        """patches [views, across * across, pixels] -> [views, rows, width]."""
        views, count, _ = patches.shape
        x = self._embed(patches.to(self._dtype).flatten(0, 1))
        x.view(views, count, -1).add_(self._positions(across))
        batch = ImageBatch(views, whole(count), pause=pause)
        for layer in self._layers:
            x = layer(x, batch)
        x = _normed(self._neck(x, views, pause), self._norm, pause)
        x = _normed(self._smooth(x, views, pause), self._post_norm, pause)
        x = self._quarter(self._halve(x, views, pause), views, pause)
        return x.view(views, len(x) // views, -1)

    def _positions(self, across: int) -> Tensor:
        """[across * across, hidden], interpolated for views that are not the whole image."""
        return stretched(self._places, across).to(self._dtype)


def stretched(places: Tensor, across: int) -> Tensor:
    """places float32 [1, hidden, side, side] -> [across * across, hidden], smoothed where they are
    fewer."""
    if places.shape[2] != across:
        places = F.interpolate(
            places, (across, across), mode="bicubic", align_corners=False, antialias=True
        )
    return places[0].flatten(1).t()


def _attention(w: TensorScope, sizes: VisionSizes, across: Sequence[int]) -> RelativeAttention:
    return RelativeAttention(
        w,
        hidden=sizes.hidden,
        heads=sizes.heads,
        sides=across,
        qkv=NAMES.whole[0],
        output=NAMES.output,
        down=DOWN,
        across=ACROSS,
    )


def _layer(w: TensorScope, sizes: VisionSizes, attention: RelativeAttention) -> VisionLayer:
    norm = layer_norms(w, sizes)
    return VisionLayer(
        norm(known_as(w, *NAMES.attn_norm)),
        attention,
        norm(known_as(w, *NAMES.ffn_norm)),
        read_feed_forward(w, sizes, NAMES, gelu_erf),
    )


def _normed(x: Tensor, norm: LayerNorm, pause: Pause) -> Tensor:
    """x, overwritten."""
    for rows in slabs(x, pause):
        x[rows] = norm(x[rows])
    return x
