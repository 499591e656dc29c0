"""What a replica tells those who choose among replicas: its load, and what it was asked lately."""

from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import islice

from runtime.engine.engine import EngineStatistics
from serve_app.gateway.tasks import ChatDelta, Task
from serve_app.routing.policy import Load
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.routing.prefixes import PrefixHashes
from serve_app.transport.wire import Report

# What a newcomer is told of the time before it.
CHAINS_KEPT = 256

Generate = Callable[[Task], AsyncGenerator[ChatDelta, None]]


class Reporter:
    """Stands before `generate` and remembers what passes, so that every ingress hears of all tasks
    and not only of its own: a conversation may come through another one next time."""

    def __init__(self, generate: Generate, statistics: Callable[[], EngineStatistics]) -> None:
        self._generate = generate
        self._statistics = statistics
        self._chains: deque[PrefixHashes] = deque(maxlen=CHAINS_KEPT)
        self._taken = 0

    def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        chain = prefix_hashes_of(task)
        if chain.keys:
            self._chains.append(chain)
            self._taken += 1
        return self._generate(task)

    def report(self, since: int) -> Report:
        """The load now, and what came after the report that had `since` as its `taken`."""
        new = min(self._taken - since, len(self._chains))
        chains = tuple(islice(self._chains, len(self._chains) - new, None))
        return Report(load_of(self._statistics()), chains, self._taken)


def load_of(statistics: EngineStatistics) -> Load:
    return Load(
        queued_tokens=statistics.queued_tokens,
        running=statistics.running,
        waiting=statistics.waiting,
        slots=statistics.slots,
        memory=statistics.pages_owned / max(1, statistics.pages_total),
        tokens_per_s=statistics.tokens_per_s,
        started=statistics.first_tokens_total,
        computed_tokens=statistics.computed_tokens_total + statistics.completion_tokens_total,
        cache_tokens=statistics.cacheable_tokens,
    )
