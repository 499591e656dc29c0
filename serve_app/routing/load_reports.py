"""Load reports of a replica: its current load and the prefix hashes of recent requests."""

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import islice

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.messages.replica_load import PrefixHashes, ReplicaLoad
from serve_app.messages.tasks import ChatDelta, Task
from serve_app.routing.prefix_hashes import prefix_hashes_of
from serve_app.transport.wire import LoadReport

# Number of earlier requests whose hashes a new subscriber receives.
MAX_HASHES = 256

Generate = Callable[[Task], AsyncGenerator[ChatDelta, None]]


class LoadReporter:
    """Wraps `generate` and records the prefix hashes of its requests at their first delta, when the
    cache has the prompt: a request may be refused or moved before. They are reported to every
    ingress, because the next turn of a conversation may come through another one."""

    def __init__(self, generate: Generate, statistics: Callable[[], EngineStatistics]) -> None:
        self._generate = generate
        self._statistics = statistics
        self._hashes: deque[PrefixHashes] = deque(maxlen=MAX_HASHES)
        self._recorded = 0

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:
        hashes = prefix_hashes_of(task)
        first = bool(hashes.keys)
        async with aclosing(self._generate(task)) as deltas:
            async for delta in deltas:
                if first:
                    self._hashes.append(hashes)
                    self._recorded += 1
                    first = False
                yield delta

    def report(self, since: int) -> LoadReport:
        """The current load and the hashes recorded after the report whose `recorded` is `since`."""
        new = min(self._recorded - since, len(self._hashes))
        hashes = tuple(islice(self._hashes, len(self._hashes) - new, None))
        return LoadReport(replica_load(self._statistics()), hashes, self._recorded)


def replica_load(statistics: EngineStatistics) -> ReplicaLoad:
    return ReplicaLoad(
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
