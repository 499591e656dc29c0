"""Fair queueing over tenants: the order of service, and each tenant's share of a bounded queue."""

import heapq
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Items of one tenant leave in order of arrival, tenants take turns.

    Tenants with the fewest running items come first; among equals the one whose last item was
    served, or that began to wait, the longest ago. So a tenant that has nothing running waits for
    at most one item of each other tenant. Of tenants without waiting items nothing is kept.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[T, None]] = {}
        self._turns: dict[str, int] = {}  # lower numbers come first
        self._next_turn = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self.in_turn({}))

    def count(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def add(self, tenant: str, item: T) -> None:
        if tenant not in self._queues:
            self._queues[tenant] = {}
            self._end_turn(tenant)
        self._queues[tenant][item] = None

    def serve(self, tenant: str, item: T) -> None:
        """Remove an item that gets what it waited for: the next turn is another tenant's."""
        self._end_turn(tenant)
        self.remove(tenant, item)

    def remove(self, tenant: str, item: T) -> None:
        queue = self._queues[tenant]
        del queue[item]
        if not queue:
            del self._queues[tenant], self._turns[tenant]

    def in_turn(self, running: Mapping[str, int]) -> Iterator[tuple[str, T]]:
        """All items, with their tenants, in the order in which they are served if each one is as
        soon as it is yielded.

        `running`: items of each tenant that are being served already. The queue may lose items
        that have been yielded while this runs.
        """
        turn = self._next_turn
        heap = [
            (running.get(tenant, 0), self._turns[tenant], tenant, iter(tuple(queue)))
            for tenant, queue in self._queues.items()
        ]
        heapq.heapify(heap)
        while heap:
            count, _, tenant, items = heap[0]
            item = next(items, None)
            if item is None:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (count + 1, turn, tenant, items))
            turn += 1
            yield tenant, item

    def _end_turn(self, tenant: str) -> None:
        self._turns[tenant] = self._next_turn
        self._next_turn += 1


def may_enter(own: int, total: int, limit: int, *, reserved: int = 0) -> bool:
    """Whether a tenant that holds `own` of `total` places may have one more of `limit`.

    It may hold as many as are still free, and `reserved` ones beyond. So one tenant alone fills
    half of the places, and n tenants leave one part in n + 1 for others.
    """
    free = limit - total
    return free > 0 and own < reserved + free
