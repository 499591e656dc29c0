"""Runs the layers of a text model one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.layers.block import Block, MixerBlock, RowWiseBlock
from model_zoo.layers.residual import Residual
from model_zoo.layers.rope import Pairs, Rotary, Rotation
from model_zoo.layers.step import Step, TokenChoice
from model_zoo.layers.tensor_parallel import local_cache
from runtime.distributed.layer_placement import LayerPlacement
from runtime.distributed.ranks import ALONE, Ranks
from runtime.kv.cache_layout import LayerCache
from runtime.worker.model import Batch, KeyRotation, KVCache

# Kernels pad rows to multiples of this.
PADDING = 512


class LayerBlock(Protocol):
    """The computation of a layer: x [tokens, hidden] -> like x, or only the rows `step.rows`.

    It may overwrite x. row_elements: maximum number of temporary elements per row, besides x.
    matrix_elements: number of elements of its largest matrix.
    """

    @property
    def row_elements(self) -> int: ...

    @property
    def matrix_elements(self) -> int: ...

    def __call__(self, x: Tensor, step: Step) -> Tensor: ...


class LayerInputs(Protocol):
    """Inputs of layers besides the residual: embeddings and batch -> [tokens, layers, width], of
    which each layer receives its part.

    row_elements, matrix_elements: as in `LayerBlock`. kept_elements: layers * width.
    """

    row_elements: int
    matrix_elements: int
    kept_elements: int

    def __call__(self, x: Tensor, batch: Batch) -> Tensor: ...


class Streams(Protocol):
    """Conversion of the residual to several streams before the layers, and back after them.

    spread: [tokens, hidden] -> [tokens, streams, hidden]. gather: the reverse.
    """

    def spread(self, x: Tensor) -> Tensor: ...

    def gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class TextLayer:
    """A layer's computation, its cache, and its rotary embedding.

    cache: None if it has no mixer.
    reads: number of the layer whose pages it uses instead of its own; `cache` is then that layer's.
    rotated_from: the first dimension of its keys that `rotary` rotates.
    beside, beside_rotary: the cache of a second mixer, whose step is `Step.beside`, and the rotary
    embedding of its keys, which rotates them from their first dimension on.
    """

    block: LayerBlock | RowWiseBlock
    cache: LayerCache | None
    rotary: Rotary | None = None
    reads: int | None = None
    rotated_from: int = 0
    beside: LayerCache | None = None
    beside_rotary: Rotary | None = None

    @property
    def stored(self) -> tuple[LayerCache, ...]:
        """The caches that belong to this layer alone."""
        own = self.cache if self.reads is None else None
        return tuple(cache for cache in (own, self.beside) if cache is not None)

    @property
    def key_rotations(self) -> tuple[KeyRotation | None, ...]:
        """The rotation of the keys in each of `stored`."""
        own = _key_rotation(self.rotary, self.rotated_from)
        beside = () if self.beside is None else (_key_rotation(self.beside_rotary, 0),)
        return ((own,) if len(self.stored) > len(beside) else ()) + beside

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        return tuple(each for each in (self.rotary, self.beside_rotary) if each is not None)


class LayerStack:
    """Runs layers over x [tokens, hidden].

    inputs, streams: see `LayerInputs` and `Streams`. ranks: the ranks that divide the layers.
    layer_placement: the device of each layer; None if all are on that of x.
    row_elements, matrix_elements: the maxima over the layers.
    """

    def __init__(
        self,
        layers: Sequence[TextLayer],
        *,
        inputs: LayerInputs | None = None,
        streams: Streams | None = None,
        ranks: Ranks = ALONE,
        layer_placement: LayerPlacement | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._layer_placement = layer_placement
        self._ranks = ranks
        self._inputs, self._streams = inputs, streams
        self._rotaries = tuple(dict.fromkeys(r for layer in layers for r in layer.rotaries))
        self._pages_of = _pages_of(self._layers)
        devices = self.layer_devices
        if devices is not None:
            own = [devices[source] for source in self.source_layers]
            assert own == list(devices), "a layer uses pages on another device"

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """The caches of all layers, in order, with the heads of this rank."""
        stored = (cache for layer in self._layers for cache in layer.stored)
        return tuple(local_cache(cache, self._ranks) for cache in stored)

    @property
    def key_rotations(self) -> tuple[KeyRotation | None, ...] | None:
        """The rotation of each of `caches`; None if a layer stores anything other than keys by
        position."""
        kinds = [cache.kind for layer in self._layers for cache in layer.stored]
        if any(kind.by_sequence or kind.by_image for kind in kinds):
            return None
        return tuple(each for layer in self._layers for each in layer.key_rotations)

    @property
    def source_layers(self) -> tuple[int, ...]:
        """For each layer, the number of the layer whose cache it uses; its own for others."""
        reads = (layer.reads for layer in self._layers)
        return tuple(own if other is None else other for own, other in enumerate(reads))

    @property
    def layer_devices(self) -> tuple[torch.device, ...] | None:
        """The device of each layer; None if all are on one device."""
        if self._layer_placement is None:
            return None
        return self._layer_placement.layers[: len(self._layers)]  # a file may have more layers

    @property
    def cache_devices(self) -> tuple[torch.device, ...] | None:
        """The device of each of `caches`; None if all are on one device."""
        if self.layer_devices is None:
            return None
        stored = zip(self._layers, self.layer_devices, strict=True)
        return tuple(device for layer, device in stored for _ in layer.stored)

    @property
    def position_axes(self) -> int:
        """1, or the number of axes if rotary embeddings use several."""
        return max((rotary.position_axes for rotary in self._rotaries), default=1)

    @property
    def row_elements(self) -> int:
        widest = max(layer.block.row_elements for layer in self._layers) + PADDING
        if self._inputs is None:
            return widest
        return max(widest + self._inputs.kept_elements, self._inputs.row_elements + PADDING)

    @property
    def matrix_elements(self) -> int:
        largest = max(layer.block.matrix_elements for layer in self._layers)
        return largest if self._inputs is None else max(largest, self._inputs.matrix_elements)

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache) -> Residual:
        """x [tokens, hidden], overwritten -> [outputs, hidden] of `batch.output_rows`."""
        inputs = None if self._inputs is None else self._inputs(x, batch)
        positions = batch.positions if batch.axes is None else batch.axes
        rotations = {rotary: rotary(positions) for rotary in self._rotaries}
        main = x.device if self._layer_placement is None else self._layer_placement.main
        carried = {main: _Carried(batch, rotations, inputs, TokenChoice())}
        added = _added_rows(batch, x.shape[1])
        assert len(added) < len(self._layers), "the last layer may have dropped the rows"
        residual = Residual(x if self._streams is None else self._streams.spread(x))
        del x  # replaced by the results of layers
        for index in range(len(self._layers)):
            here = main if self._layer_placement is None else self._layer_placement.layers[index]
            if here not in carried:
                carried[here] = carried[main].to(here)
            residual = self._computed(index, residual.to(here), carried[here], cache)
            if index < len(added):
                rows, x = carried[here].batch.image_rows, residual.computed()
                assert rows is not None
                x.index_add_(0, rows, added[index].to(x))
        residual = residual.to(main)
        if self._streams is None:
            return residual
        return Residual(self._streams.gather(residual.computed()))

    def _computed(
        self, index: int, residual: Residual, carried: "_Carried", cache: KVCache
    ) -> Residual:
        """The residual after layer `index`."""
        block = self._layers[index].block
        if isinstance(block, RowWiseBlock):
            return block.unadded(residual, self._rows(index, carried))
        step = self._step(index, carried, cache)
        if isinstance(block, Block | MixerBlock):
            return block.unadded(residual, step)
        return Residual(block(residual.computed(), step))

    def _step(self, index: int, carried: "_Carried", cache: KVCache) -> Step:
        layer, batch, inputs = self._layers[index], carried.batch, carried.inputs
        first, rows, beside = self._pages_of[index], self._rows(index, carried), None
        assert first is not None, "a layer with a mixer has no cache"
        if layer.beside is not None:
            pages, rotation = cache.layer(first + 1), carried.rotation(layer.beside_rotary)
            beside = Step(batch, pages, batch.plans[pages.group], rotation, rows)
        pages = cache.layer(first)
        return Step(
            batch,
            pages,
            batch.plans[pages.group],
            carried.rotation(layer.rotary),
            rows,
            None if inputs is None else inputs[:, index],
            beside,
            carried.choice,
        )

    def _rows(self, index: int, carried: "_Carried") -> Tensor | None:
        """The rows that the layer returns; None for all."""
        return carried.batch.output_rows if index == len(self._layers) - 1 else None


class LayeredModel:
    """The declarations of a `DecoderModel` that follow from its layers (`_layers`) and from the
    bytes of weights on each device (`_held`)."""

    _layers: LayerStack
    _held: Mapping[torch.device, int]

    @property
    def cache_layers(self) -> Sequence[LayerCache]:
        return self._layers.caches

    @property
    def cache_devices(self) -> Sequence[torch.device] | None:
        return self._layers.cache_devices

    @property
    def layer_devices(self) -> Sequence[torch.device] | None:
        return self._layers.layer_devices

    @property
    def source_layers(self) -> Sequence[int]:
        return self._layers.source_layers

    @property
    def weight_bytes(self) -> int:
        return sum(self._held.values())

    def weight_bytes_on(self, device: torch.device) -> int:
        return self._held.get(device, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """The values of a step that pass from layer to layer, on one device."""

    batch: Batch
    rotations: Mapping[Rotary, Rotation]
    inputs: Tensor | None
    choice: TokenChoice

    def rotation(self, rotary: Rotary | None) -> Rotation | None:
        return None if rotary is None else self.rotations[rotary]

    def to(self, device: torch.device) -> "_Carried":
        rotations = {rotary: r.to(device) for rotary, r in self.rotations.items()}
        inputs = None if self.inputs is None else self.inputs.to(device)
        return _Carried(self.batch.to(device), rotations, inputs, self.choice)


def _key_rotation(rotary: Rotary | None, first: int) -> KeyRotation | None:
    if rotary is None:
        return None
    return KeyRotation(rotary.frequencies, rotary.pairs is Pairs.NEOX, first)


def _added_rows(batch: Batch, hidden: int) -> tuple[Tensor, ...]:
    """Features that are added to image rows after each of the first layers, [image rows, hidden]
    (Meng et al., "DeepStack", section 3.2)."""
    if batch.image_features is None:
        return ()
    return batch.image_features.split(hidden, dim=1)[1:]


def _pages_of(layers: Sequence[TextLayer]) -> tuple[int | None, ...]:
    """For each layer, the index of the first declared cache that it uses; None if it uses none."""
    numbers: list[int | None] = []
    stored = 0
    for layer in layers:
        if layer.reads is not None:
            assert layer.reads < len(numbers), "a layer reads what a later one writes"
            assert layer.beside is None, "a layer with two mixers reads the cache of another layer"
            numbers.append(numbers[layer.reads])
        else:
            numbers.append(None if layer.cache is None else stored)
            stored += len(layer.stored)
    return tuple(numbers)
