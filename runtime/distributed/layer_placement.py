"""Placement of whole layers on several devices of one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from runtime.errors import ConfigurationError

_STEPS = 40  # iterations of the binary search for an even fill


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The device of each layer; `main` has the embedding, the head and everything else."""

    layers: tuple[torch.device, ...]
    main: torch.device

    @property
    def all(self) -> tuple[torch.device, ...]:
        """Each device once, `main` first."""
        return tuple(dict.fromkeys((self.main, *self.layers)))


def inseparable(source_layers: Sequence[int]) -> list[range]:
    """Divides layers into parts, in order, that must each be on one device, because a layer uses
    the pages of an earlier one.

    `source_layers`: for each layer, the one whose pages it uses, itself for its own.
    """
    parts: list[range] = []
    for layer, source in enumerate(source_layers):
        begin = layer
        while parts and parts[-1].stop > source:
            begin = parts.pop().start
        parts.append(range(begin, layer + 1))
    return parts


def by_shares(layers: int, shares: Sequence[float], *, most: int | None = None) -> list[int | None]:
    """The index of each layer's device, None for the host.

    The last `most` layers are placed on devices, in order and in proportion to `shares`, as in
    llama.cpp: layer i of n on the first device whose cumulative share exceeds i/n of the total.
    """
    if not shares or min(shares) < 0 or not sum(shares):
        raise ConfigurationError(
            f"`tensor_split` is {list(shares)}; it needs one number per device, none negative and "
            "at least one above 0."
        )
    placed = layers if most is None else min(most, layers)
    ends = list(accumulate(shares))
    host: list[int | None] = [None] * (layers - placed)
    return host + [
        next(n for n, end in enumerate(ends) if end * placed > layer * ends[-1])
        for layer in range(placed)
    ]


def by_room(
    layer_bytes: Sequence[int],
    room_bytes: Sequence[int],
    *,
    main: int = 0,
    most: int | None = None,
) -> list[int | None]:
    """The index of each layer's device, None for the host.

    All layers are placed on `main` if they fit there; else as many of the last ones as fit, over
    all devices in order and evenly filled. `most`: the largest number of layers to place.
    """
    count = len(layer_bytes)
    placed = count if most is None else min(most, count)
    if sum(layer_bytes[count - placed :]) <= room_bytes[main]:
        return [None] * (count - placed) + [main] * placed
    for first in range(count - placed, count):
        found = _evenly_filled(layer_bytes[first:], room_bytes)
        if found is not None:
            return [None] * first + found
    return [None] * count


def _evenly_filled(
    layer_bytes: Sequence[int], room_bytes: Sequence[int]
) -> list[int | None] | None:
    """The placement that minimises the largest fill of a device; None if the layers do not fit."""
    best = _filled(layer_bytes, room_bytes, 1.0)
    low, high = 0.0, 1.0
    for _ in range(_STEPS if best is not None else 0):
        middle = (low + high) / 2
        found = _filled(layer_bytes, room_bytes, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _filled(
    layer_bytes: Sequence[int], room_bytes: Sequence[int], part: float
) -> list[int | None] | None:
    """Devices filled in order, each up to the fraction `part` of its room."""
    devices: list[int | None] = []
    device, left = 0, room_bytes[0] * part
    for size in layer_bytes:
        while size > left:
            device += 1
            if device == len(room_bytes):
                return None
            left = room_bytes[device] * part
        left -= size
        devices.append(device)
    return devices
