"""Layers one after the other, each with its step: what decoders and encoders are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.layers.dividing import local_cache
from model_zoo.layers.rope import Rotary, Rotation
from model_zoo.layers.step import Step
from runtime.distributed.layer_placement import LayerPlacement
from runtime.distributed.ranks import ALONE, Ranks
from runtime.kv.spec import LayerCache
from runtime.worker.model import Batch, KVCache

# Kernels pad rows to multiples of this.
PADDING = 512


class LayerBlock(Protocol):
    """What a layer computes: x [tokens, hidden] -> like x, of `step.rows` alone where given.

    It may overwrite x. `row_elements`: how many elements a row needs at once at most, beside x;
    `matrix_elements`: the largest matrix that it multiplies by.
    """

    @property
    def row_elements(self) -> int: ...

    @property
    def matrix_elements(self) -> int: ...

    def __call__(self, x: Tensor, step: Step) -> Tensor: ...


class LayerInputs(Protocol):
    """What layers get beside the residual: [tokens, layers, width] of embeddings and batch.

    `row_elements`: how many elements a row needs at once while they are computed;
    `matrix_elements`: the largest matrix; `kept_elements`: layers * width.
    """

    row_elements: int
    matrix_elements: int
    kept_elements: int

    def __call__(self, x: Tensor, batch: Batch) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: what it computes, what it stores, and the rotary embedding that turns its heads.

    `reads`: the number of the layer whose pages it uses instead of storing anything itself; `cache`
    is then that layer's.
    """

    block: LayerBlock
    cache: LayerCache
    rotary: Rotary | None = None
    reads: int | None = None


class LayerStack:
    """Runs layers over x [tokens, hidden].

    `inputs`: from the embeddings and the batch to [tokens, layers, width], of which each layer sees
    its part. `ranks`: those that divide the layers among them. `layer_placement`: where each layer
    is, if not all where x is. `row_elements`: how many elements a row needs at once at most, beside
    x; `matrix_elements`: the largest matrix.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        inputs: LayerInputs | None = None,
        ranks: Ranks = ALONE,
        layer_placement: LayerPlacement | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._layer_placement = layer_placement
        self._ranks = ranks
        self._inputs = inputs
        self._rotaries = tuple(dict.fromkeys(layer.rotary for layer in layers if layer.rotary))
        self._pages_of = _pages_of(self._layers)

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """One declaration for each layer that stores keys and values, of this rank's heads."""
        stored = (layer.cache for layer in self._layers if layer.reads is None)
        return tuple(local_cache(cache, self._ranks) for cache in stored)

    @property
    def cache_devices(self) -> tuple[torch.device, ...] | None:
        """Where each of `caches` is."""
        if self._layer_placement is None:
            return None
        devices = self._layer_placement.layers  # a file may have more
        stored = zip(self._layers, devices, strict=False)
        return tuple(device for layer, device in stored if layer.reads is None)

    @property
    def position_axes(self) -> int:
        """1, or 3 where rotary embeddings go by time, row and column."""
        return 3 if any(rotary.axes is not None for rotary in self._rotaries) else 1

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

    def __call__(self, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """x [tokens, hidden], overwritten -> [outputs, hidden] of `batch.output_rows`."""
        inputs = None if self._inputs is None else self._inputs(x, batch)
        positions = batch.positions if batch.axes is None else batch.axes
        rotations = {rotary: rotary(positions) for rotary in self._rotaries}
        main = x.device if self._layer_placement is None else self._layer_placement.main
        carried = {main: _Carried(batch, rotations, inputs)}
        added = _added_rows(batch, x.shape[1])
        assert len(added) < len(self._layers), "the last layer may have dropped the rows"
        for index, layer in enumerate(self._layers):
            here = main if self._layer_placement is None else self._layer_placement.layers[index]
            if here not in carried:
                carried[here] = carried[main].to(here)
            x = layer.block(x.to(here), self._step(index, carried[here], cache))
            if index < len(added):
                rows = carried[here].batch.image_rows
                assert rows is not None
                x.index_add_(0, rows, added[index].to(x))
        return x.to(main)

    def _step(self, index: int, carried: "_Carried", cache: KVCache) -> Step:
        rotary, batch, inputs = self._layers[index].rotary, carried.batch, carried.inputs
        pages = cache.layer(self._pages_of[index])
        return Step(
            batch,
            pages,
            batch.plans[pages.group],
            None if rotary is None else carried.rotations[rotary],
            batch.output_rows if index == len(self._layers) - 1 else None,
            None if inputs is None else inputs[:, index],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """What the layers of one device need of a step."""

    batch: Batch
    rotations: Mapping[Rotary, Rotation]
    inputs: Tensor | None

    def to(self, device: torch.device) -> "_Carried":
        rotations = {rotary: r.to(device) for rotary, r in self.rotations.items()}
        inputs = None if self.inputs is None else self.inputs.to(device)
        return _Carried(self.batch.to(device), rotations, inputs)


def _added_rows(batch: Batch, hidden: int) -> tuple[Tensor, ...]:
    """What is added to the rows of images behind each of the first layers, [image rows, hidden]
    (Meng et al., "DeepStack", section 3.2)."""
    if batch.image_features is None:
        return ()
    return batch.image_features.split(hidden, dim=1)[1:]


def _pages_of(layers: Sequence[Layer]) -> tuple[int, ...]:
    """For each layer, which of the declared caches is its own or the one it reads."""
    numbers: list[int] = []
    stored = 0
    for layer in layers:
        if layer.reads is not None:
            assert layer.reads < len(numbers), "a layer reads what a later one writes"
            numbers.append(numbers[layer.reads])
        else:
            numbers.append(stored)
            stored += 1
    return tuple(numbers)
