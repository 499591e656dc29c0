"""Attention of square views whose scores depend on the distances of rows and columns, in windows or
across the view."""

from collections.abc import Iterator, Sequence
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.vision.image_attention import SCORES_AT_ONCE, ImageBatch, slabs
from model_zoo.layers.vision.names import Names, first_table, known_as
from runtime.vision.encoder import Pause


class RelativeAttention:
    """Softmax attention over the rows of a square view or of a window of it, and its projection.

    To a score, the product of query and key, are added the products of the query with a learned
    vector for the distance in rows and with one for that in columns (Li et al., "MViTv2", section
    4.1). Windows are squares from the top left; those that reach beyond the view are filled with
    the keys and values of rows of zeros, as in Li et al., "Exploring Plain Vision Transformer
    Backbones for Object Detection".

    sides: of the views in rows, the longest first, for which the tables of layers without windows
    are made; a shorter view gets the tables interpolated. qkv, output: names of the matrices.
    down, across: names, with suffix, of the tables for distances in rows and in columns.
    row_elements, kept_elements, matrix_elements: as of `ImageAttention`. view_elements: temporary
    elements of one view, however many a batch has.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        heads: int,
        sides: Sequence[int],
        qkv: str,
        output: Names,
        down: Names,
        across: Names,
    ) -> None:
        self._heads, self._whole = heads, sides[0]
        self._qkv = w.fused_linear(dict.fromkeys("qkv", (hidden, hidden)), whole=qkv)
        self.project = w.linear(known_as(w, *output), shape=(hidden, hidden))
        stored = next((s for name in down if (s := w.shape(name, whole=True))), (2 * sides[0] - 1,))
        self._reach = (stored[0] + 1) // 2
        shape = (2 * self._reach - 1, hidden // heads)
        self._down, self._across = (first_table(w, *names, shape=shape) for names in (down, across))
        self.row_elements = 9 * hidden
        self.kept_elements = 5 * hidden
        self.matrix_elements = 3 * hidden * hidden
        self.view_elements = max(self._view_elements(side, hidden) for side in sides)

    def __call__(self, x: Tensor, norm: RMSNorm | LayerNorm, batch: ImageBatch) -> Tensor:
        """x [rows of the batch, hidden], normed here -> the same, before the projection."""
        kept = [x.new_empty(len(x) + 1, x.shape[1]) for _ in range(3)]
        for rows in slabs(x, batch.pause):
            for buffer, part in zip(kept, self._qkv(norm(x[rows])), strict=True):
                buffer[rows] = part
        for buffer, part in zip(kept, self._qkv(torch.zeros_like(x[:1])), strict=True):
            buffer[-1] = part[0]
        count = len(x) // batch.images
        side, result = isqrt(count), torch.empty_like(x)
        cells = self._cells(side, x.device)
        for begin in range(0, len(x), count):
            # Of one view at a time, so that its features do not depend on the others.
            own = torch.where(cells < count, cells + begin, len(x))
            for windows in own.split(self._windows_at_once(side)):
                batch.pause()
                queries, keys, values = (
                    buffer[windows].unflatten(2, (self._heads, -1)).transpose(1, 2)
                    for buffer in kept
                )
                seen = self._attended(queries, keys, values, batch.pause)
                real = windows < len(x)
                result[windows[real]] = seen[real]
        return result

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, pause: Pause) -> Tensor:
        """queries, keys, values [windows, heads, cells, dim] -> [windows, cells, heads * dim]."""
        size = isqrt(queries.shape[2])
        down, across = (self._distances(t, size, queries) for t in (self._down, self._across))
        lines, made = queries.unflatten(2, (size, size)), []
        for part, distances in self._pieces(lines, down):
            pause()
            by_row = torch.einsum("whrcd,rkd->whrck", part, distances)
            by_column = torch.einsum("whrcd,ckd->whrck", part, across)
            added = (by_row[..., None] + by_column[..., None, :]).flatten(4).flatten(2, 3)
            made.append(
                F.scaled_dot_product_attention(part.flatten(2, 3), keys, values, attn_mask=added)
            )
        return torch.cat(made, dim=2).transpose(1, 2).flatten(2)

    def _pieces(self, lines: Tensor, down: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Lines of queries [windows, heads, lines, size, dim], and their distances."""
        windows, heads, size, _, _ = lines.shape
        each = max(1, SCORES_AT_ONCE // (windows * heads * size**3))
        return zip(lines.split(each, dim=2), down.split(each), strict=True)

    def _distances(self, table: Tensor, size: int, like: Tensor) -> Tensor:
        """[size, size, dim]: the vector for each two places along a side."""
        if self._reach != size:
            stretched = F.interpolate(table.t()[None], size=2 * size - 1, mode="linear")
            table = stretched[0].t()
        places = torch.arange(size, device=table.device)
        return table.to(like.dtype)[places[:, None] - places + size - 1]

    def _cells(self, side: int, device: torch.device) -> Tensor:
        """int64 [windows, cells]: the row of a view in each cell, or one behind all rows."""
        size, windows = self._size(side), self._windows_across(side)
        rows = torch.arange(side * side, device=device).view(side, side)
        missing = windows * size - side
        plane = F.pad(rows, (0, missing, 0, missing), value=side * side)
        return plane.view(windows, size, windows, size).transpose(1, 2).reshape(-1, size * size)

    def _size(self, side: int) -> int:
        """The side of a window in a view with this side."""
        return side if self._reach == self._whole else self._reach

    def _windows_across(self, side: int) -> int:
        return -(-side // self._size(side))

    def _windows_at_once(self, side: int) -> int:
        return max(1, SCORES_AT_ONCE // (self._heads * self._size(side) ** 4))

    def _view_elements(self, side: int, hidden: int) -> int:
        """What is added to scores, two times; queries, keys, values and results by window, and the
        numbers of their rows."""
        size = self._size(side)
        cells = self._windows_across(side) ** 2 * size**2
        scores = min(self._heads * cells * size**2, max(SCORES_AT_ONCE, self._heads * size**3))
        distances = 2 * size**2 * (hidden // self._heads)
        return 2 * scores + cells * (7 * hidden + 6) + distances
