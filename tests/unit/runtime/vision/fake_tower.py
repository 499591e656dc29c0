"""Fake towers, whose features are a function of the digest."""

import threading

import torch
from torch import Tensor

from runtime.vision.encoder import ImageLimits, ImageOutline, Pause, PreparedImage, no_pause
from tests.patience import HANG_S


def features_of(digest: bytes, rows: int, width: int) -> Tensor:
    draw = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(rows, width, generator=draw)


def picture(number: int, rows: int = 3) -> PreparedImage:
    """Pixels and digest are the image's number; images with more rows have more pixels."""
    pixels = torch.full((rows,), float(number))
    return PreparedImage(pixels, (1, rows), bytes([number]), rows)


class PretendTower:
    """Records what it encodes; each release of `gate`, if given, lets one part of a batch pass."""

    parts = 1

    def __init__(
        self,
        *,
        rows: int = 8,
        width: int = 16,
        whole: int = 0,
        gate: threading.Semaphore | None = None,
        broken: frozenset[int] = frozenset(),
        error: Exception | None = None,
    ) -> None:
        largest = ImageOutline((rows,), (1, rows), rows)
        self.limits = ImageLimits(rows, largest, width, torch.float32, whole)
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()
        self.entered = threading.Semaphore(0)
        self._gate, self._broken = gate, broken
        self._error = error or ValueError("the picture is upside down")

    @property
    def encoded(self) -> list[int]:
        return [number for batch in self.batches for number in batch]

    def activation_bytes(self, images: int) -> int:
        return 100 * images

    def encode(self, pixels: Tensor, grid: tuple[int, int], pause: Pause = no_pause) -> Tensor:
        numbers = [int(number) for number in pixels[:, 0].tolist()]
        self.threads.add(threading.get_ident())
        if numbers[0]:  # the worst one, at start, is never held up
            for _ in range(self.parts):
                pause()
                self.entered.release()
                if self._gate is not None:
                    assert self._gate.acquire(timeout=HANG_S)
            self.batches.append(numbers)
        if self._broken.intersection(numbers):
            raise self._error
        size = pixels.shape[1], self.limits.width
        return torch.stack([features_of(bytes([number]), *size) for number in numbers])
