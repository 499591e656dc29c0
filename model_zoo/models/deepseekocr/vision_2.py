"""DeepSeek-OCR 2's vision model: SAM's encoder on views of an image, and Qwen 2's layers, in which
learned queries read its rows one after the other."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.equal_views import EqualViews
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.rope import Pairs, Rotation
from model_zoo.layers.rope_scaling import plain_frequencies
from model_zoo.layers.vision.image_attention import AttentionSpan, ImageBatch, repeated, slabs
from model_zoo.layers.vision.names import first_table
from model_zoo.layers.vision.of_views import of_all_views
from model_zoo.layers.vision.vision_layer import VisionLayer, layers_bytes, read_gated, rms_norms
from model_zoo.layers.vision.vision_sizes import VisionSizes
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.deepseekocr.sam import SamEncoder, sam_scope, sam_sizes
from runtime.kernels.pointwise import silu_mul
from runtime.vision.encoder import ImageLimits, Pause, no_pause

EPS, ROPE_BASE = 1e-6, 1e6  # no file states the latter
# Of tiles and of the whole image, named by the sides in pixels of the published model.
QUERIES = "resample_query_768", "resample_query_1024"
IMAGE_END = "v.view_seperator"  # as spelled in files
SECOND_TILES = 2, 6  # as `TILES` of the first model


def queries_of(w: TensorScope) -> tuple[int, int]:
    """The numbers of queries of a tile and of the whole image; w: the scope of the queries."""
    tile, whole = ((w.shape(name, dimensions=2) or (1,))[0] for name in QUERIES)
    return tile, whole


class DeepseekOCR2Tower:
    """See `VisionTower`. pixels and grid: those of `DeepseekOCRProcessor`. The rows of features are
    those of the queries of each view, and one more. images: the processor of its images."""

    def __init__(self, w: TensorScope, metadata: Metadata, images: DeepseekOCRProcessor) -> None:
        self.images, self._device = images, w.device
        sides = images.side // images.patch, images.tile // images.patch
        sam, v = sam_scope(w), w.scope("v")
        self._sam = SamEncoder(sam, sam_sizes(sam, metadata), sides)
        self._reader = QueryReader(v, metadata, self._sam.width)
        tile, whole = zip(QUERIES, queries_of(v), strict=True)
        self._of_tile, self._of_whole = (
            v.table(f"{name}.weight", shape=(count, self._sam.width)).to(w.dtype)
            for name, count in (tile, whole)
        )
        width = (w.shape("mm.model.fc") or (1,))[0]
        self._project = w.linear("mm.model.fc", shape=(width, self._sam.width))
        self._image_end = first_table(w, IMAGE_END, shape=(width,)).to(w.dtype)
        self.limits = ImageLimits(images.most_rows, images.largest, width, w.dtype)

    def activation_bytes(self, images: int) -> int:
        """The tiles of all images are encoded together, before the whole images."""
        views = self.images.views(self.images.largest.grid)
        most = images * max(each.patches for each in views)
        of_view = max(map(self._read_rows, views))
        longest = images * max(each.count * self._read_rows(each) for each in views)
        results = 4 * images * self.limits.rows * (3 * self.limits.width + 2 * self._sam.width)
        return results + self._sam.nbytes(most) + self._reader.nbytes(longest, of_view)

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        features = partial(self._features, pause=pause)
        rows = of_all_views(self.images.views(grid), pixels, features)
        return torch.cat([rows, self._image_end.expand(len(pixels), 1, -1)], dim=1)

    def _features(self, pixels: Tensor, views: EqualViews, pause: Pause) -> Tensor:
        """pixels [images, views, patches, ...] -> [images, rows, width]."""
        rows = self._sam(pixels.flatten(0, 1), views.rows, pause)
        read = self._reader(rows, self._queries(views), pause).flatten(0, 1)
        made = read.new_empty(len(read), self.limits.width)
        for part in slabs(read, pause):
            made[part] = self._project(read[part])
        return made.view(len(pixels), -1, self.limits.width)

    def _queries(self, views: EqualViews) -> Tensor:
        is_whole = views.rows * self.images.patch == self.images.side
        return self._of_whole if is_whole else self._of_tile

    def _read_rows(self, views: EqualViews) -> int:
        return self.images.edge(views.rows * self.images.patch) ** 2 + len(self._queries(views))


class QueryReader:
    """Layers over the rows of a view and queries behind them. width: of a row."""

    def __init__(self, w: TensorScope, metadata: Metadata, width: int) -> None:
        self._sizes = sizes = VisionSizes.read(metadata, eps=EPS, patch=1)
        self._device = w.device
        kv_heads = sizes.kv_heads()
        if sizes.hidden != width:
            raise metadata.error(
                "vision.embedding_length", f"is {sizes.hidden:,}, where rows have {width:,}"
            )
        self._frequencies = plain_frequencies(sizes.head_dim, ROPE_BASE).to(w.device)
        blocks = (w.scope("blk", index) for index in range(sizes.layers))
        self._layers = [_layer(block, sizes, kv_heads) for block in blocks]
        self._norm = w.rms_norm("post_ln", sizes.eps, size=width)

    def nbytes(self, rows: int, of_view: int) -> int:
        """Upper bound of the bytes for so many rows and queries of all views, and of one view,
        whose mask attention needs in float32, too."""
        edges, masks = 4 * rows * 5 * self._sizes.hidden, 5 * of_view**2
        return edges + masks + layers_bytes(self._device, self._sizes, self._layers, rows)

    def __call__(self, rows: Tensor, queries: Tensor, pause: Pause) -> Tensor:
        """rows [views, count, width], queries [n, width] -> [views, n, width]."""
        views, count, _ = rows.shape
        x = torch.cat([rows, queries.expand(views, -1, -1)], dim=1)
        total = x.shape[1]
        spans = AttentionSpan(0, count, 0, count), AttentionSpan(count, total, 0, total)
        angles = torch.arange(total, device=x.device)[:, None] * self._frequencies
        rotation = repeated(Rotation(angles.cos(), angles.sin(), Pairs.NEOX), views)
        batch, x = ImageBatch(views, spans, rotation, pause), x.flatten(0, 1)
        for layer in self._layers:
            x = layer(x, batch)
        return self._norm(x.view(views, total, -1)[:, count:])


class PrefixAttention:
    """Softmax attention and its projection: the rows of the first span attend to each other, and
    each row behind them to these, to itself and to those between. Groups of heads share keys.

    row_elements, kept_elements, matrix_elements: as of `ImageAttention`.
    """

    def __init__(self, w: TensorScope, sizes: VisionSizes, kv_heads: int) -> None:
        hidden, keys = sizes.hidden, kv_heads * sizes.head_dim
        self._heads, self._kv_heads = sizes.heads, kv_heads
        shapes = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        self._qkv = w.fused_linear(shapes)
        self.project = w.linear("attn_out", shape=(hidden, hidden))
        self.row_elements = 9 * hidden
        # Also keys and values repeated for all heads, of one view at a time.
        self.kept_elements = 2 * hidden + 2 * keys + 4 * hidden
        self.matrix_elements = 3 * hidden * hidden

    def __call__(self, x: Tensor, norm: RMSNorm | LayerNorm, batch: ImageBatch) -> Tensor:
        """x [rows of the batch, hidden], normed here -> the same, before the projection."""
        counts = self._heads, self._kv_heads, self._kv_heads
        kept = [x.new_empty(len(x), n, x.shape[1] // self._heads) for n in counts]
        for rows in slabs(x, batch.pause):
            parts = (
                part.unflatten(1, (n, -1))
                for part, n in zip(self._qkv(norm(x[rows])), counts, strict=True)
            )
            queries, keys, values = parts
            kept[0][rows], kept[1][rows] = batch.rotated(queries, rows), batch.rotated(keys, rows)
            kept[2][rows] = values
        group = self._heads // self._kv_heads
        total, result = len(x) // batch.images, torch.empty_like(x)
        mask = torch.ones(total, total, dtype=torch.bool, device=x.device).tril_()
        mask[:, : batch.spans[0].end] = True
        for begin in range(0, len(x), total):
            batch.pause()
            view = slice(begin, begin + total)
            queries, keys, values = (part[view].transpose(0, 1)[None] for part in kept)
            keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
            seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            result[view] = seen[0].transpose(0, 1).flatten(1)
        return result


def _layer(w: TensorScope, sizes: VisionSizes, kv_heads: int) -> VisionLayer:
    norm = rms_norms(w, sizes)
    attention = PrefixAttention(w, sizes, kv_heads)
    return VisionLayer(norm("ln1"), attention, norm("ln2"), read_gated(w, sizes, silu_mul))
