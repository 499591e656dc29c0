"""Ranks that are threads of one process, which start quickly."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from runtime.distributed.process_group import ProcessRanks
from tests.patience import HANG_S

Result = TypeVar("Result")


class ThreadRanks(ProcessRanks):
    """Rank `rank` of a `Meeting`; the arithmetic is that of processes."""

    def __init__(self, rank: int, meeting: "Meeting") -> None:
        super().__init__(rank, meeting.size, torch.device("cpu"))
        self._meeting = meeting

    def of_all(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in self._meeting.brought(self.rank, x))


class Meeting:
    """Exchanges tensors between `size` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._things: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    def brought(self, rank: int, thing: Tensor) -> list[Tensor]:
        self._things[rank] = thing.clone()
        self._barrier.wait(HANG_S)
        things = list(self._things)
        self._barrier.wait(HANG_S)
        return things

    def each(self, work: Callable[[ThreadRanks], Result]) -> list[Result]:
        """The result of `work` of each rank, computed at the same time."""

        def run(rank: int) -> Result:
            try:
                return work(ThreadRanks(rank, self))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(run, rank) for rank in range(self.size)]
        broken = [future.exception() for future in futures]
        causes = [error for error in broken if error is not None]
        causes.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if causes:
            raise causes[0]
        return [future.result() for future in futures]
