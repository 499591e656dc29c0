"""The ranks of one engine, from joining to the end."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from runtime.errors import CaravanError, EngineDeadError, ModelFileError
from runtime.kv.spec import CacheLayout
from runtime.lifeline import Lead, Lifeline, Seat
from runtime.memory import MemoryPlan
from runtime.parallel import ProcessRanks
from runtime.relay import Relay


class Team:
    """All ranks, seen from the first, which waits here until they have joined.

    `machine_ranks`: how many run on this machine. `watch` hears, on a thread of its own, when one
    has failed; `check` then raises why.
    """

    def __init__(self, lead: Lead, device: torch.device) -> None:
        self.watch: Callable[[], None] = lambda: None
        self._lead = lead
        lead.gather()
        machines = Counter(lead.machines)
        self.machine_ranks = machines[lead.address]
        lead.tell_words({"machines": dict(machines)})
        self.ranks = ProcessRanks.leading(lead, device)
        self.relay = Relay(lead, self.ranks)
        lead.watch = self._failed

    def await_parts(self, digest: str) -> None:
        """Until all have loaded theirs of the file that `digest` names; raises why one cannot."""
        for rank, words in enumerate(self._lead.words(), start=1):
            if words["loaded"] != digest:
                raise ModelFileError(
                    f"Rank {rank} of {self.ranks.size} has another file of this name than rank 0; "
                    "all need the same."
                )

    def agree(
        self, memory: MemoryPlan, layout: CacheLayout, dtype: torch.dtype, told: Mapping[str, Any]
    ) -> MemoryPlan:
        """As many pages as all have room for; the others plan by what they are `told`."""
        self._lead.tell_words(told)
        with self.relay.explaining():
            return _agreed(self.ranks, memory, layout, dtype)

    def check(self) -> None:
        """Raise EngineDeadError where one has failed."""
        try:
            self._lead.check()
        except CaravanError as error:
            raise EngineDeadError(str(error)) from error

    def close(self) -> None:
        """The others end too."""
        self._lead.close()
        self.ranks.close()

    def _failed(self) -> None:
        self.ranks.abort()
        self.watch()


class Member:
    """Another rank, which has joined; `machine_ranks` as in `Team`."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.lifeline = Lifeline(seat)
        machines = self.lifeline.received_words()["machines"]
        self.machine_ranks = int(machines[self.lifeline.address])
        self.ranks = ProcessRanks.following(self.lifeline, device)

    def tell_loaded(self, digest: str) -> None:
        self.lifeline.tell_words({"loaded": digest})

    def agree(self, memory: MemoryPlan, layout: CacheLayout, dtype: torch.dtype) -> MemoryPlan:
        return _agreed(self.ranks, memory, layout, dtype)

    def close(self) -> None:
        self.lifeline.close()
        self.ranks.close()


def _agreed(
    ranks: ProcessRanks, memory: MemoryPlan, layout: CacheLayout, dtype: torch.dtype
) -> MemoryPlan:
    *pages, tokens = ranks.lowest((*memory.pages, memory.cache_tokens))
    agreed = memory.with_pages(pages, layout, dtype, cache_tokens=tokens)
    (total,) = ranks.totals((agreed.reserved_bytes,))
    return replace(agreed, others_bytes=total - agreed.reserved_bytes)
