"""Attention inside images: every row sees all rows of its image, or of a part of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.rope import Rotation

# Row by row work is done for so many rows at a time, so that large images need little beside.
SLAB_ROWS = 1024
# What the fused kernel of torch holds for each thread on a CPU, in floats: a block of scores for
# 256 queries and 512 keys, and sums for 256 heads.
FUSED_SCORES, FUSED_QUERIES = 256 * 512, 256
QK_EPS = 1e-6
# Where there is no fused kernel, scores of so many elements at a time.
UNFUSED_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class Sight:
    """Rows [begin, end) of an image, in `parts` equal parts; each sees as large a part of
    [seen_begin, seen_end), the first the first and so on."""

    begin: int
    end: int
    seen_begin: int
    seen_end: int
    parts: int = 1


def whole(rows: int) -> tuple[Sight, ...]:
    """Every row sees every row."""
    return (Sight(0, rows, 0, rows),)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What the rows of a batch are: `images` with as many rows each, which see what `sights` say.

    The sights' rows are all rows of an image, in order. `rotation`: of each row of the batch.
    """

    images: int
    sights: Sequence[Sight]
    rotation: Rotation | None = None

    def turned(self, x: Tensor, rows: slice) -> Tensor:
        """x [n, heads, dim] of these rows of the batch -> like x."""
        if self.rotation is None:
            return x
        cos, sin = self.rotation.cos[rows], self.rotation.sin[rows]
        return Rotation(cos, sin, self.rotation.pairs)(x)


def repeated(rotation: Rotation, images: int) -> Rotation:
    """One image's rotation for each of several."""
    if images == 1:
        return rotation
    cos, sin = rotation.cos.repeat(images, 1), rotation.sin.repeat(images, 1)
    return Rotation(cos, sin, rotation.pairs)


class ImageAttention:
    """Softmax attention of `heads` heads over the rows of an image, and its projection.

    Queries and keys are normed, all heads together, where the file has such norms.
    `output`: the projection's name. `row_elements`: how many elements a row of a slab needs at
    once; `kept_elements`: a row of the batch, beside the input.
    """

    def __init__(self, w: TensorScope, *, hidden: int, heads: int, output: str) -> None:
        self._heads = heads
        shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v"), (hidden, hidden))
        self._qkv = w.fused_linear(shapes, whole="attn_qkv")
        self._norms = [
            w.rms_norm(name, QK_EPS, size=hidden, optional=True)
            for name in ("attn_q_norm", "attn_k_norm")
        ]
        self.project = w.linear(output, shape=(hidden, hidden))
        self.row_elements = 9 * hidden
        self.kept_elements = 4 * hidden + heads
        self.matrix_elements = 3 * hidden * hidden

    def __call__(self, x: Tensor, norm: RMSNorm | LayerNorm, view: View) -> Tensor:
        """x [rows of the batch, hidden], which is normed first -> the same, not yet projected."""
        kept = [torch.empty_like(x) for _ in range(3)]
        for rows in slabs(len(x)):
            queries, keys, values = self._qkv(norm(x[rows]))
            for buffer, part, own in zip(kept[:2], (queries, keys), self._norms, strict=True):
                part = part if own is None else own(part)
                buffer[rows] = view.turned(part.unflatten(1, (self._heads, -1)), rows).flatten(1)
            kept[2][rows] = values
        shape = (view.images, len(x) // view.images, self._heads, -1)
        queries, keys, values = (part.view(shape) for part in kept)
        return attend(queries, keys, values, view.sights).reshape(x.shape)


def slabs(rows: int) -> Iterator[slice]:
    """[0, rows) in slices of no more than SLAB_ROWS."""
    for begin in range(0, rows, SLAB_ROWS):
        yield slice(begin, min(begin + SLAB_ROWS, rows))


def attend(queries: Tensor, keys: Tensor, values: Tensor, sights: Sequence[Sight]) -> Tensor:
    """queries, keys, values [images, rows, heads, dim] -> the same of what each row has seen."""
    if len(sights) == 1:
        return _seen(queries, keys, values, sights[0].parts)
    result = torch.empty_like(queries)
    for sight in sights:
        asking, seen = slice(sight.begin, sight.end), slice(sight.seen_begin, sight.seen_end)
        result[:, asking] = _seen(queries[:, asking], keys[:, seen], values[:, seen], sight.parts)
    return result


def _seen(queries: Tensor, keys: Tensor, values: Tensor, parts: int) -> Tensor:
    """Each of the equal parts of the rows by itself."""
    q, k, v = (
        x.unflatten(1, (parts, -1)).flatten(0, 1).transpose(1, 2) for x in (queries, keys, values)
    )
    if q.device.type == "cpu" or q.shape[-1] % 8 == 0:
        seen = F.scaled_dot_product_attention(q, k, v)
    else:
        seen = _unfused(q, k, v)
    return seen.transpose(1, 2).reshape(queries.shape)


def _unfused(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As many queries at a time as UNFUSED_SCORES allow; heads that torch's kernels refuse."""
    each = queries.shape[0] * queries.shape[1] * keys.shape[2]
    groups = queries.split(max(1, UNFUSED_SCORES // each), dim=2)
    return torch.cat([F.scaled_dot_product_attention(q, keys, values) for q in groups], dim=2)
