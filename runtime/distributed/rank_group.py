"""The ranks of one engine, from joining to the end."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from runtime import tls
from runtime.distributed.broadcaster import Broadcaster
from runtime.distributed.control_channel import ControlChannel, RankInfo, RankZero
from runtime.distributed.process_group import ProcessRanks
from runtime.engine.memory_plan import MemoryPlan
from runtime.errors import CaravanError, ConfigurationError, EngineDeadError, ModelFileError
from runtime.kv.spec import CacheLayout

logger = logging.getLogger(__name__)


class RankGroup:
    """All ranks, seen from the first, which waits here until they have joined.

    `machine_ranks`: how many run on this machine; `device_ranks`: how many of these allocate from
    the same memory as this one, itself included. `watch` is called, on a thread of its own, when a
    rank has failed; `check` then raises why. ConfigurationError where ranks have the same GPU.
    """

    def __init__(self, lead: RankZero, device: torch.device) -> None:
        self.watch: Callable[[], None] = lambda: None
        self._lead = lead
        lead.gather()
        memories = [memory_name(device), *(words["memory"] for words in lead.words())]
        places = _Places(lead.machines, memories)
        if device.type == "cuda":
            places.check_one_rank_per_device()
        if places.several_machines and tls.configured():
            logger.warning(
                "TLS is configured, but the ranks of this model are on several hosts and exchange "
                "tensors by gloo or NCCL, which do not encrypt. Encrypt the network between these "
                "hosts, or keep the ranks on one (`parallel: {placement: strict_pack}`)."
            )
        self.machine_ranks, self.device_ranks = places.machine_ranks[0], places.device_ranks[0]
        lead.tell_words({"machine": places.machine_ranks, "device": places.device_ranks})
        self.ranks = ProcessRanks.leading(lead, device)
        self.broadcaster = Broadcaster(lead, self.ranks)
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
        with self.broadcaster.explaining():
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
    """Another rank, which has joined; `machine_ranks` and `device_ranks` as in `RankGroup`."""

    def __init__(self, rank_info: RankInfo, device: torch.device) -> None:
        self.control_channel = ControlChannel(rank_info)
        self.control_channel.tell_words({"memory": memory_name(device)})
        places = self.control_channel.received_words()
        self.machine_ranks = int(places["machine"][rank_info.rank])
        self.device_ranks = int(places["device"][rank_info.rank])
        self.ranks = ProcessRanks.following(self.control_channel, device)

    def tell_loaded(self, digest: str) -> None:
        self.control_channel.tell_words({"loaded": digest})

    def agree(self, memory: MemoryPlan, layout: CacheLayout, dtype: torch.dtype) -> MemoryPlan:
        return _agreed(self.ranks, memory, layout, dtype)

    def close(self) -> None:
        self.control_channel.close()
        self.ranks.close()


def memory_name(device: torch.device) -> str:
    """The memory that `device` allocates from, a name that no other on this machine has.

    A GPU's number will not do: each process may see one GPU alone, under the number 0.
    """
    if device.type != "cuda":
        return "host"
    return str(torch.cuda.get_device_properties(device).uuid)


class _Places:
    """Where ranks compute: for each of them its machine's address and its memory's name."""

    def __init__(self, machines: Sequence[str], memories: Sequence[str]) -> None:
        self._devices = list(zip(machines, memories, strict=True))
        on_machine, on_device = Counter(machines), Counter(self._devices)
        self.machine_ranks = [on_machine[machine] for machine in machines]
        self.device_ranks = [on_device[device] for device in self._devices]

    @property
    def several_machines(self) -> bool:
        return self.machine_ranks[0] < len(self.machine_ranks)

    def check_one_rank_per_device(self) -> None:
        """NCCL connects no two ranks on one GPU."""
        for rank, device in enumerate(self._devices):
            first = self._devices.index(device)
            if first < rank:
                raise ConfigurationError(
                    f"Ranks {first} and {rank} have the same GPU, {device[1]} of {device[0]}; each "
                    "rank needs one of its own. Set `num_gpus: 1`."
                )


def _agreed(
    ranks: ProcessRanks, memory: MemoryPlan, layout: CacheLayout, dtype: torch.dtype
) -> MemoryPlan:
    *pages, tokens = ranks.lowest((*memory.pages, memory.cache_tokens))
    agreed = memory.with_pages(pages, layout, dtype, cache_tokens=tokens)
    (total,) = ranks.totals((agreed.reserved_bytes,))
    return replace(agreed, others_bytes=total - agreed.reserved_bytes)
