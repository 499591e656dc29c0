"""The plain vision transformer: patches of a square, learned positions, layers, norms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.vision.image_attention import ImageBatch, whole
from model_zoo.layers.vision.names import Names, first_table, known_as
from model_zoo.layers.vision.patches import patch_embedding, squares
from model_zoo.layers.vision.vision_layer import VisionLayer, layers_bytes
from model_zoo.layers.vision.vision_sizes import VisionSizes
from runtime.vision.encoder import Pause


@dataclass(frozen=True, slots=True)
class VitNames:
    """Names of the tensors outside the layers; `first` is a full name and may lack the suffix.

    A norm without names does not exist in the model.
    """

    patches: Names = ("patch_embd",)
    places: Names = ("position_embd",)
    first: Names = ("class_embd", "class_embd.weight")
    pre_norm: Names = ()
    post_norm: Names = ("post_ln",)


class Vit:
    """Dosovitskiy et al., "An Image Is Worth 16x16 Words".

    classed: a class row precedes the patches. post_optional: the norm after the layers may be
    absent. kept: numbers of layers, counted from 1 and ascending, whose outputs are concatenated as
    the result, without a norm; else the result is the output of the last layer.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: VisionSizes,
        side: int,
        read_layer: Callable[[TensorScope], VisionLayer],
        *,
        names: VitNames | None = None,
        classed: bool = False,
        post_optional: bool = False,
        kept: Sequence[int] = (),
    ) -> None:
        names = names or VitNames()
        self._sizes, self._device, self._dtype = sizes, w.device, w.dtype
        self.across = side // sizes.patch
        self._embed = patch_embedding(w, sizes, *names.patches)
        self._class = None
        if classed:
            self._class = first_table(w, *names.first, shape=(sizes.hidden,)).to(w.dtype)
        self.rows = self.across**2 + classed
        places = tuple(f"{name}.weight" for name in names.places)
        self._position_embd = first_table(w, *places, shape=(self.rows, sizes.hidden)).to(w.dtype)
        self._pre_norm = _norm(w, sizes, names.pre_norm)
        self._kept = kept
        self._post_norm = None
        if not kept:
            self._post_norm = _norm(w, sizes, names.post_norm, optional=post_optional)
        self._layers: Sequence[VisionLayer] = [
            read_layer(w.scope("blk", index)) for index in range(sizes.layers)
        ]

    def nbytes(self, images: int) -> int:
        """Upper bound of the bytes that encoding `images` images takes, result included."""
        sizes, rows = self._sizes, images * self.rows
        edges = rows * (2 * sizes.patch_elements + (4 + 2 * len(self._kept)) * sizes.hidden)
        return 4 * edges + layers_bytes(self._device, sizes, self._layers, rows)

    def __call__(self, pixels: Tensor, pause: Pause) -> Tensor:
        """pixels [images, 3, side, side] -> [images, patches, hidden], without the class row.

        The hidden size counts for each of the layers that are kept.
        """
        images, hidden = len(pixels), self._sizes.hidden
        patches = squares(pixels.to(self._dtype), self._sizes.patch)
        x = self._embed(patches.flatten(0, 1)).view(images, -1, hidden)
        if self._class is not None:
            x = torch.cat([self._class.expand(images, 1, hidden), x], dim=1)
        x = x.add_(self._position_embd).view(-1, hidden)
        if self._pre_norm is not None:
            x = self._pre_norm(x)
        batch = ImageBatch(images, whole(self.rows), pause=pause)
        kept: list[Tensor] = []
        for number, layer in enumerate(self._layers, 1):
            x = layer(x, batch)
            if number in self._kept:
                kept.append(x.clone())
        if kept:
            x = torch.cat(kept, dim=1)
        if self._post_norm is not None:
            x = self._post_norm(x)
        return x.view(images, self.rows, -1)[:, self.rows - self.across**2 :]


def _norm(
    w: TensorScope, sizes: VisionSizes, names: Names, *, optional: bool = False
) -> LayerNorm | None:
    if not names or (optional and not w.has(known_as(w, *names))):
        return None
    return w.layer_norm(known_as(w, *names), sizes.eps, size=sizes.hidden)
