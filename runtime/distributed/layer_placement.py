"""Which device computes which layers of a model, where they are more than one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from runtime.errors import ConfigurationError

_STEPS = 40  # of the search for the fullest that a device has to be


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The device of each layer, and `main`: of embedding, head and everything beside the layers."""

    layers: tuple[torch.device, ...]
    main: torch.device

    @property
    def all(self) -> tuple[torch.device, ...]:
        """Each device once, `main` first."""
        return tuple(dict.fromkeys((self.main, *self.layers)))


def by_shares(layers: int, shares: Sequence[float], *, most: int | None = None) -> list[int | None]:
    """The number of the device of each layer, None for the host.

    The last `most` layers go to devices, in their order, and in proportion to `shares`: layer i of
    n to the first device at whose end more than i/n of all shares lie. As llama.cpp counts.
    """
    if not shares or min(shares) < 0 or not sum(shares):
        raise ConfigurationError(
            f"`tensor_split` is {list(shares)}; it needs a number for each device, none below 0 "
            "and one above it."
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
    """The number of the device of each layer, None for the host.

    All on `main` where they fit there. Else as many of the last ones as fit on all devices, in
    their order, each as full as the others; `most` limits how many.
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
    """With the fullest device as empty as can be; None where they do not fit."""
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
    """One device after the other, each up to that part of its room."""
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
