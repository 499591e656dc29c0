"""The contract with models: the input of a step, and what models declare."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.kv.cache_layout import LayerCache
from runtime.kv.cache_types import FLOAT_TYPES, CacheType


class RowForm(Enum):
    """A division of a step's rows into spans that follows from the number of rows alone.

    ONE_EACH: each span is one row, the r-th span row r. ONE_SPAN: there is one span, of two rows or
    more, from row 0 on. Rows of padding may follow, but not a single one in ONE_SPAN: kernels
    skip a row that is alone in its slot among longer spans.
    """

    ONE_EACH = "one row of each sequence"
    ONE_SPAN = "rows of one sequence"


class RowSpan(NamedTuple):  # faster to create than a dataclass; each step creates many
    """Rows [begin, end) of the batch belong to the sequence in `slot`, positions from `start`.

    They attend to positions in [seen_begin, seen_end) of a cache group; None: up to themselves.
    """

    begin: int
    end: int
    slot: int
    start: int
    seen_begin: int = 0
    seen_end: int | None = None


@dataclass(frozen=True, slots=True)
class ImageWrite:
    """The features of image `digest` are written to the cells `write_cell[begin:end]`."""

    digest: bytes
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the rows of a batch write and what they attend to, for one cache group.

    page_table [slots, pages per sequence] int32: the page that holds index i of a slot's sequence.
    row_slot [tokens] int32. visible_begin, visible_end [tokens] int32: row r sees the cached
    positions visible_begin[r] <= p < visible_end[r] of its slot. write_cell [tokens] int64:
    page * page_tokens + offset, where row r's key and value go. All on the model's device;
    `spans` is the same partition of rows on the host (rows of one slot are contiguous).

    In a group of image rows, indices of image rows replace positions, and write_cell [image rows]
    says where the rows of `Batch.cross_features` go, in the order of `image_writes`. after_image
    [tokens] bool: the row is at or after the first image of its sequence.

    In a group with one state per sequence, write_cell [tokens] is the page of the state, and rows
    see position 0 if there is a state of earlier steps.

    form: if it is given, the spans follow from it, and `spans` must not be read.
    """

    page_table: Tensor
    row_slot: Tensor
    visible_begin: Tensor
    visible_end: Tensor
    write_cell: Tensor
    spans: tuple[RowSpan, ...]
    image_writes: tuple[ImageWrite, ...] = ()
    after_image: Tensor | None = None
    form: RowForm | None = None

    def to(self, device: torch.device) -> "AttentionPlan":
        return replace(
            self,
            page_table=self.page_table.to(device),
            row_slot=self.row_slot.to(device),
            visible_begin=self.visible_begin.to(device),
            visible_end=self.visible_end.to(device),
            write_cell=self.write_cell.to(device),
            after_image=_moved(self.after_image, device),
        )

    @property
    def sees_nothing(self) -> bool:
        """Whether no row attends to anything, as far as the host knows."""
        return all(span.seen_end == span.seen_begin for span in self.spans)


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step, flat over all sequences.

    tokens [tokens] int64; positions [tokens] int64; output_rows [outputs] int64: the rows whose
    states are returned; plans: one per cache group, in the layout's order. cross_features: features
    [image rows, width] of each image that this step writes to groups of image rows, in the order of
    `image_writes`.

    image_rows [n] int64: batch rows whose embeddings are replaced by image_features [n, width],
    unscaled; None if there are none. If width is a multiple of the hidden size, the further parts
    of a row are added to the outputs of the first layers, one per layer. axes [axes, tokens] int64:
    the place of each token on each of several `position_axes`.
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    plans: tuple[AttentionPlan, ...]
    cross_features: tuple[Tensor, ...] = ()
    image_rows: Tensor | None = None
    image_features: Tensor | None = None
    axes: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            self.tokens.to(device),
            self.positions.to(device),
            self.output_rows.to(device),
            tuple(plan.to(device) for plan in self.plans),
            tuple(features.to(device) for features in self.cross_features),
            _moved(self.image_rows, device),
            _moved(self.image_features, device),
            _moved(self.axes, device),
        )


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Cached rows in quantised blocks: keys of `key_dim` and values of `value_dim` elements."""

    type: CacheType
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer: keys [pages, page_tokens, kv_heads, key_dim], values likewise.

    With `quantized`, the last axis has the bytes of a row instead. In a layer with one state per
    sequence: keys float32 [pages, taps, channels], the oldest input first, and values float32
    [pages, kv_heads, key_dim, value_dim], which are empty if the state is only the inputs.
    `group` is the index of its plan in `Batch.plans`. `values_in_keys`: `values` is a view of the
    first elements, or blocks, of each key.
    """

    keys: Tensor
    values: Tensor
    group: int
    quantized: QuantizedRows | None = None
    values_in_keys: bool = False

    @property
    def cells(self) -> "LayerPages":
        """The same rows as pages of one token and one head each, for plans whose rows see single
        tokens: page * page_tokens + offset, times kv_heads, plus the head."""
        keys = self.keys.flatten(0, 2)[:, None, None]
        if self.values_in_keys:
            values = keys[..., : self.values.shape[-1]]
        else:
            values = self.values.flatten(0, 2)[:, None, None]
        return replace(self, keys=keys, values=values)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors with memory of their own."""
        return (self.keys,) if self.values_in_keys else (self.keys, self.values)

    @property
    def type(self) -> CacheType:
        return FLOAT_TYPES[self.keys.dtype] if self.quantized is None else self.quantized.type

    @property
    def dims(self) -> tuple[int, int]:
        """The elements of a key and of a value."""
        if self.quantized is None:
            return self.keys.shape[-1], self.values.shape[-1]
        return self.quantized.key_dim, self.quantized.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class KeyRotation:
    """How cached keys depend on their position: 2n dimensions from `first` on are rotated by
    position * frequencies, float32 [n]. Pairs are (i, i + n) with `halves`, else (2i, 2i + 1)."""

    frequencies: Tensor
    halves: bool
    first: int = 0


class KVCache(Protocol):
    """The tensors behind the pages."""

    def layer(self, index: int) -> LayerPages: ...


class ModelSizes(Protocol):
    """The sizes of a model for which memory is planned; see `DecoderModel`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    def activation_bytes(self, tokens: int, outputs: int) -> int: ...


class DecoderModel(ModelSizes, Protocol):
    """A text model.

    `cache_layers`: one declaration for each cache, in the order of layers. `states` writes the keys
    and values of the batch to `cache` and returns the hidden states [outputs, hidden_size] of
    `batch.output_rows`. `logits` of such states: float32 [rows, vocab_size], computed in float32;
    only in models that `generate`. Without `causal` attention, a prompt is one whole span.
    `position_axes`: 1, or the number of axes if the model needs `Batch.axes`: 3 (time, row and
    column) or 4 (token, column, row and image). `cache_devices`: the device of each
    entry of `cache_layers`; `layer_devices`: that of each layer; None if all are on the model's
    device. `weight_bytes_on`: the part of `weight_bytes` on a device. `key_rotations`: one for each
    entry of `cache_layers`, None for keys without position; None as a whole if cached entries
    cannot move to other positions. `source_layers`: for each layer, the number of the layer whose
    cache it uses, which must be on the same device; its own for others.
    `activation_bytes(tokens, outputs)`: an upper bound of what `states` of `tokens` tokens and
    `logits` of `outputs` rows allocate.
    """

    context_length: int
    causal: bool
    generates: bool

    @property
    def position_axes(self) -> int: ...

    @property
    def cache_layers(self) -> Sequence[LayerCache]: ...

    @property
    def cache_devices(self) -> Sequence[torch.device] | None: ...

    @property
    def layer_devices(self) -> Sequence[torch.device] | None: ...

    @property
    def source_layers(self) -> Sequence[int]: ...

    @property
    def key_rotations(self) -> Sequence[KeyRotation | None] | None: ...

    def weight_bytes_on(self, device: torch.device) -> int: ...

    def states(self, batch: Batch, cache: KVCache) -> Tensor: ...

    def logits(self, states: Tensor) -> Tensor: ...


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
