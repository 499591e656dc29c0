"""Attention within images: rows attend to all rows of their image or to a part of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import AcrossHeads, LayerNorm, RMSNorm
from model_zoo.layers.rope import Rotation
from runtime.vision.encoder import Pause, no_pause

# Row-wise work is done in slabs of this many rows, which limits the memory that large images take
# and, on a CPU, the time between pauses.
SLAB_ROWS, CPU_SLAB_ROWS = 1024, 256
# Floats that torch's fused kernel allocates per thread on a CPU: a block of scores for 256 queries
# and 512 keys, and sums for 256 heads.
FUSED_SCORES, FUSED_QUERIES = 256 * 512, 256
QK_EPS = 1e-6
# Number of scores computed at a time on a CPU, and where there is no fused kernel.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Rows [begin, end) of an image attend to [seen_begin, seen_end).

    With `parts`, both ranges are divided into equal parts, and each part attends to its
    counterpart.
    """

    begin: int
    end: int
    seen_begin: int
    seen_end: int
    parts: int = 1


def whole(rows: int) -> tuple[AttentionSpan, ...]:
    """Every row attends to every row."""
    return (AttentionSpan(0, rows, 0, rows),)


@dataclass(frozen=True, slots=True, eq=False)
class ImageBatch:
    """A batch of `images` images with equal numbers of rows, which attend as `spans` state.

    The spans cover all rows of an image, in order. rotation: angles of each row of the batch.
    pause: see `VisionTower.encode`. order: see `PlaneRotary`.
    """

    images: int
    spans: Sequence[AttentionSpan]
    rotation: Rotation | None = None
    pause: Pause = no_pause
    order: Tensor | None = None

    def rotated(self, x: Tensor, rows: slice) -> Tensor:
        """x [n, heads, dim] of these rows of the batch -> like x, with elements in `order`, which
        does not change products of queries and keys."""
        if self.rotation is None:
            return x
        if self.order is not None:
            x = x.index_select(2, self.order)
        cos, sin = self.rotation.cos[rows], self.rotation.sin[rows]
        return Rotation(cos, sin, self.rotation.pairs)(x)


def repeated(rotation: Rotation, images: int) -> Rotation:
    """The rotation of one image, repeated for several images."""
    if images == 1:
        return rotation
    cos, sin = rotation.cos.repeat(images, 1), rotation.sin.repeat(images, 1)
    return Rotation(cos, sin, rotation.pairs)


class ImageAttention:
    """Softmax attention over the rows of an image, and its projection.

    Queries and keys are normed across all heads if the file has such norms. output: name of the
    projection. whole: name of a tensor that may have the rows of all three matrices. head_eps:
    epsilon of norms of each head instead, which the file must have. kv_heads: number of heads of
    keys and values, which consecutive heads of queries share; None if each has its own.
    row_elements: temporary elements per row of a slab. kept_elements: elements per row of the
    batch, besides the input.
    """

    def __init__(
        self,
        w: TensorScope,
        *,
        hidden: int,
        heads: int,
        output: str,
        whole: str = "attn_qkv",
        head_eps: float | None = None,
        kv_heads: int | None = None,
    ) -> None:
        self._heads, self._head_dim = heads, hidden // heads
        kept = (kv_heads or heads) * self._head_dim
        shapes = {"attn_q": (hidden, hidden), "attn_k": (kept, hidden), "attn_v": (kept, hidden)}
        self._qkv = w.fused_linear(shapes, whole=whole)
        self._norms: list[RMSNorm | AcrossHeads | None] = []
        for name, size in (("attn_q_norm", hidden), ("attn_k_norm", kept)):
            if head_eps is not None:
                self._norms.append(w.rms_norm(name, head_eps, size=self._head_dim))
            else:
                whole_norm = w.rms_norm(name, QK_EPS, size=size, optional=True)
                self._norms.append(None if whole_norm is None else AcrossHeads(whole_norm))
        self.project = w.linear(output, shape=(hidden, hidden))
        self.row_elements = 9 * hidden
        self.kept_elements = 4 * hidden + heads
        self.matrix_elements = 3 * hidden * hidden

    def __call__(self, x: Tensor, norm: RMSNorm | LayerNorm, batch: ImageBatch) -> Tensor:
        """x [rows of the batch, hidden], normed here -> the same, before the projection."""
        kept = [torch.empty_like(x) for _ in range(3)]
        for rows in slabs(x, batch.pause):
            queries, keys, values = self._qkv(norm(x[rows]))
            for buffer, part, own in zip(kept[:2], (queries, keys), self._norms, strict=True):
                split = part.unflatten(1, (-1, self._head_dim))
                normed = split if own is None else own(split)
                buffer[rows] = self._repeated(batch.rotated(normed, rows))
            kept[2][rows] = self._repeated(values.unflatten(1, (-1, self._head_dim)))
        shape = (batch.images, len(x) // batch.images, self._heads, -1)
        queries, keys, values = (part.view(shape) for part in kept)
        return attend(queries, keys, values, batch.spans, batch.pause).reshape(x.shape)

    def _repeated(self, x: Tensor) -> Tensor:
        """x [n, heads or kv_heads, dim] -> [n, hidden], for each head of queries."""
        shared = self._heads // x.shape[1]
        return (x if shared == 1 else x.repeat_interleave(shared, dim=1)).flatten(1)


def slabs(x: Tensor, pause: Pause = no_pause) -> Iterator[slice]:
    """The rows of x in slices of at most `slab_rows`, with a pause before each."""
    size = slab_rows(x.device)
    for begin in range(0, len(x), size):
        pause()
        yield slice(begin, min(begin + size, len(x)))


def slab_rows(device: torch.device) -> int:
    return CPU_SLAB_ROWS if device.type == "cpu" else SLAB_ROWS


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Sequence[AttentionSpan],
    pause: Pause = no_pause,
) -> Tensor:
    """queries, keys, values [images, rows, heads, dim] -> attention outputs, likewise."""
    if len(spans) == 1:
        return _seen(queries, keys, values, spans[0].parts, pause)
    result = torch.empty_like(queries)
    for span in spans:
        asking, seen = slice(span.begin, span.end), slice(span.seen_begin, span.seen_end)
        shown = keys[:, seen], values[:, seen]
        result[:, asking] = _seen(queries[:, asking], *shown, span.parts, pause)
    return result


def _seen(queries: Tensor, keys: Tensor, values: Tensor, parts: int, pause: Pause) -> Tensor:
    """Attention within each of `parts` equal parts of the rows."""
    q, k, v = (
        x.unflatten(1, (parts, -1)).flatten(0, 1).transpose(1, 2) for x in (queries, keys, values)
    )
    groups = []
    for group in q.split(_queries_at_once(q, k), dim=2):
        pause()
        groups.append(F.scaled_dot_product_attention(group, k, v))
    seen = groups[0] if len(groups) == 1 else torch.cat(groups, dim=2)
    return seen.transpose(1, 2).reshape(queries.shape)


def _queries_at_once(queries: Tensor, keys: Tensor) -> int:
    """Number of queries to compute at once; all of them for CUDA's fused kernels, which do not
    support all heads."""
    if queries.device.type != "cpu" and queries.shape[-1] % 8 == 0:
        return queries.shape[2]
    return max(1, SCORES_AT_ONCE // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
