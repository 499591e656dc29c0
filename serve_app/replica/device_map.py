"""The device of each layer, for replicas with several GPUs or too little GPU memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from model_zoo.gguf.reader import GGUFFile
from runtime.distributed.layer_placement import LayerPlacement, by_room, by_shares, inseparable
from runtime.engine.memory_plan import LEFT_FREE, available_bytes
from runtime.errors import ConfigurationError
from runtime.kv.cache_layout import LayerCache
from runtime.kv.cache_types import CacheType
from runtime.worker.model import DecoderModel
from serve_app.config.settings import ModelSettings
from serve_app.logs import get_logger
from serve_app.replica.device_setup import cache_type, prepare_kernels, require_cache_type

log = get_logger()

_LAYER = re.compile(r"^blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DeviceMapOptions:
    """Settings of the device map, with the names of Ollama and llama.cpp.

    `tensor_split`: proportions of layers on the GPUs in their order; None: by free memory.
    `num_gpu`: number of layers on GPUs, which are the last ones; the host computes the others;
    None: as many as fit. `main_gpu` has the embedding, the output head and everything else.
    Layers that use the same keys and values stay together: on the GPU of the one in the middle, or
    all on the host, if one of them would be there.
    `cache_tokens`, `step_tokens`, `sequences`: the size of the cache and of the largest step.
    """

    tensor_split: tuple[float, ...] | None
    num_gpu: int | None
    main_gpu: int
    cache_tokens: int
    step_tokens: int
    sequences: int
    kv_dtype: CacheType

    def __call__(self, files: Sequence[GGUFFile], outline: DecoderModel) -> LayerPlacement | None:
        """The placement of the layers; None if one device has all of them. `files`: those of the
        model and its adapters; `outline`: the model without weights."""
        devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        layer_placement = self.place(devices, [available_bytes(d) for d in devices], files, outline)
        if layer_placement is not None:
            for device in layer_placement.all:
                require_cache_type(self.kv_dtype.value, device)
            log.info(
                "layers", **{str(d): layer_placement.layers.count(d) for d in layer_placement.all}
            )
            if any(device.type == "cpu" for device in layer_placement.all):
                prepare_kernels()
        return layer_placement

    def place(
        self,
        devices: Sequence[torch.device],
        free_bytes: Sequence[int],
        files: Sequence[GGUFFile],
        outline: DecoderModel,
    ) -> LayerPlacement | None:
        """The placement on `devices` with `free_bytes` each; None if one device has all layers."""
        layers, rest = _weights(files)
        own = outline.source_layers
        parts = inseparable([*own, *range(len(own), len(layers))])  # a file may have more layers
        if self.tensor_split is not None:
            found = self._by_shares(parts, self.tensor_split, gpus=len(devices))
        else:
            found = self._by_room(parts, layers, self._room(free_bytes, rest, outline), outline)
        host = torch.device("cpu")
        places = [host if number is None else devices[number] for number in found]
        each = tuple(place for place, part in zip(places, parts, strict=True) for _ in part)
        layer_placement = LayerPlacement(each, devices[self.main_gpu])
        return None if layer_placement.all == (layer_placement.main,) else layer_placement

    def _by_shares(
        self, parts: Sequence[range], shares: Sequence[float], *, gpus: int
    ) -> list[int | None]:
        """The index of the GPU of each part, None for the host: that of the layer in its middle, if
        none of its layers is for the host."""
        if len(shares) > gpus:
            raise ConfigurationError(
                f"`tensor_split` has {len(shares)} entries; this replica has "
                f"{gpus} GPUs. Raise `num_gpus` or remove entries."
            )
        each = by_shares(parts[-1].stop, shares, most=self.num_gpu)
        return [None if each[p.start] is None else each[p[len(p) // 2]] for p in parts]

    def _by_room(
        self,
        parts: Sequence[range],
        layers: Sequence[int],
        room: Sequence[int],
        outline: DecoderModel,
    ) -> list[int | None]:
        """The index of the GPU of each part, None for the host. `layers`: bytes of their weights;
        `room`: bytes of each GPU for layers."""
        cache = sum(map(self._cache_bytes, outline.cache_layers)) // len(layers)
        sizes = [sum(layers[number] + cache for number in part) for part in parts]
        most = self.num_gpu
        if most is not None:
            most = sum(part.start >= len(layers) - most for part in parts)
        return by_room(sizes, room, main=self.main_gpu, most=most)

    def _room(self, free_bytes: Sequence[int], rest: int, outline: DecoderModel) -> list[int]:
        working = outline.activation_bytes(self.step_tokens, self.sequences)
        room = [max(0, int(free * (1 - LEFT_FREE)) - working) for free in free_bytes]
        room[self.main_gpu] = max(0, room[self.main_gpu] - rest)
        return room

    def _cache_bytes(self, cache: LayerCache) -> int:
        """Of all sequences; states of recurrent layers are float32 and one for each."""
        if cache.kind.by_sequence:
            return self.sequences * cache.page_elements(1) * torch.float32.itemsize
        row = sum(map(self.kv_dtype.row_bytes, cache.stored_dims))
        return self.cache_tokens * cache.kv_heads * row


def device_map_options(
    settings: ModelSettings, context_tokens: int, device: torch.device
) -> DeviceMapOptions | None:
    """The options; None if ranks divide the layers or the host computes all of them."""
    if device.type == "cpu" and settings.tensor_split is not None:
        log.info("not used", model=settings.name, what="tensor_split: this process has no GPU")
    if device.type != "cuda" or settings.parallel.tensor > 1:
        return None
    return DeviceMapOptions(
        settings.tensor_split,
        settings.num_gpu,
        settings.main_gpu,
        cache_tokens=settings.cache_tokens or context_tokens,
        step_tokens=settings.step_tokens,
        sequences=settings.max_sequences,
        kv_dtype=cache_type(settings.kv_dtype, device, generates=True),
    )


def _weights(files: Sequence[GGUFFile]) -> tuple[list[int], int]:
    """Bytes of each layer, and bytes of everything else."""
    layers: dict[int, int] = {}
    rest = 0
    for info in chain.from_iterable(file.tensors.values() for file in files):
        layer = _LAYER.match(info.name)
        if layer is None:
            rest += info.nbytes
        else:
            number = int(layer[1])
            layers[number] = layers.get(number, 0) + info.nbytes
    return [layers.get(number, 0) for number in range(max(layers, default=-1) + 1)], rest
