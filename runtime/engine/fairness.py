"""Fair queueing over tenants: the order of service, and each tenant's share of a bounded queue."""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Items of one tenant are served in order of arrival, tenants in turn.

    Tenants with the fewest running items come first; among equals, the tenant whose last item was
    served, or whose first item was added, the longest ago. So a tenant without running items waits
    for at most one item of each other tenant. No state is kept for tenants without waiting items.
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
        """Remove an item that is being served, and end its tenant's turn."""
        self._end_turn(tenant)
        self.remove(tenant, item)

    def remove(self, tenant: str, item: T) -> None:
        queue = self._queues[tenant]
        del queue[item]
        if not queue:
            del self._queues[tenant], self._turns[tenant]

    def in_turn(self, running: Mapping[str, int]) -> Iterator[tuple[str, T]]:
        """All items with their tenants, in the order of service if each is served when yielded.

        `running`: items of each tenant that are being served. Items that have been yielded may be
        removed during the iteration.
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


class PriorityQueue(Generic[T]):
    """Items of the lowest priority number are served first; within each, as in a `FairQueue`."""

    def __init__(self) -> None:
        self._queues: dict[int, FairQueue[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self.in_turn({}))

    def add(self, tenant: str, item: T, priority: int) -> None:
        self._queues.setdefault(priority, FairQueue()).add(tenant, item)

    def serve(self, tenant: str, item: T, priority: int) -> None:
        """Remove an item that is being served, and end its tenant's turn."""
        self._queues[priority].serve(tenant, item)
        self._forget_empty(priority)

    def remove(self, tenant: str, item: T, priority: int) -> None:
        self._queues[priority].remove(tenant, item)
        self._forget_empty(priority)

    def in_turn(self, running: Mapping[str, int]) -> Iterator[tuple[str, T]]:
        """As `FairQueue.in_turn`."""
        served = Counter(running)
        for _, queue in sorted(self._queues.items()):
            for tenant, item in queue.in_turn(served):
                yield tenant, item
                served[tenant] += 1

    def _forget_empty(self, priority: int) -> None:
        if not self._queues[priority]:
            del self._queues[priority]


def may_enter(own: int, total: int, limit: int, *, reserved: int = 0) -> bool:
    """Whether a tenant with `own` of the `total` occupied places may take another one of `limit`.

    It may have `reserved` places, and beyond these as many as are still free. So a single tenant
    fills about half of the places, and n tenants leave one part in n + 1 to others.
    """
    free = limit - total
    return free > 0 and own < reserved + free
