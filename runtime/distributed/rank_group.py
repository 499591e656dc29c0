"""The ranks of one engine: joining, agreement on memory, failures, end."""

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
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_types import CacheType

logger = logging.getLogger(__name__)


class RankGroup:
    """All ranks, on rank 0. The constructor waits until they have joined.

    `machine_ranks`: ranks on this machine; `device_ranks`: ranks that allocate from the same memory
    as this one; both include it. `watch` is called, on a thread of its own, when a rank has failed;
    `check` then raises the reason. ConfigurationError: two ranks have the same GPU.
    """

    def __init__(self, rank_zero: RankZero, device: torch.device) -> None:
        self.watch: Callable[[], None] = lambda: None
        self._rank_zero = rank_zero
        rank_zero.wait_for_ranks()
        memories = [
            memory_name(device),
            *(each["memory"] for each in rank_zero.receive_json()),
        ]
        places = _Places(rank_zero.machines, memories)
        if device.type == "cuda":
            places.check_one_rank_per_device()
        if places.several_machines and tls.configured():
            logger.warning(
                "TLS is configured, but the ranks of this model are on several hosts and exchange "
                "tensors by gloo or NCCL, which do not encrypt. Encrypt the network between these "
                "hosts, or keep the ranks on one (`parallel: {placement: strict_pack}`)."
            )
        self.machine_ranks, self.device_ranks = places.machine_ranks[0], places.device_ranks[0]
        rank_zero.send_json({"machine": places.machine_ranks, "device": places.device_ranks})
        self.ranks = ProcessRanks.leading(rank_zero, device)
        self.broadcaster = Broadcaster(rank_zero, self.ranks)
        rank_zero.watch = self._failed

    def wait_loaded(self, digest: str) -> None:
        """Wait until all ranks have loaded their part of the file with this digest; raises the
        failure of one that cannot."""
        for rank, message in enumerate(self._rank_zero.receive_json(), start=1):
            if message["loaded"] != digest:
                raise ModelFileError(
                    f"Rank {rank} of {self.ranks.size} has a different file under this name than "
                    "rank 0; all ranks need the same one."
                )

    def agree(
        self,
        memory: MemoryPlan,
        layout: CacheLayout,
        type: CacheType,
        options: Mapping[str, Any],
    ) -> MemoryPlan:
        """The plan with as many pages as every rank has memory for. The other ranks plan with
        `options`."""
        self._rank_zero.send_json(options)
        with self.broadcaster.rank_errors():
            return _agreed(self.ranks, memory, layout, type)

    def check(self) -> None:
        """EngineDeadError: a rank has failed."""
        try:
            self._rank_zero.check()
        except CaravanError as error:
            raise EngineDeadError(str(error)) from error

    def close(self) -> None:
        """Also ends the other ranks."""
        self._rank_zero.close()
        self.ranks.close()

    def _failed(self) -> None:
        self.ranks.abort()
        self.watch()


class Member:
    """A rank other than 0, which has joined; `machine_ranks`, `device_ranks` as in `RankGroup`.

    Errors of the constructor are reported to rank 0 as well.
    """

    def __init__(self, rank_info: RankInfo, device: torch.device) -> None:
        self.control_channel = ControlChannel(rank_info)
        try:
            self.control_channel.send_json({"memory": memory_name(device)})
            places = self.control_channel.receive_json()
            self.machine_ranks = int(places["machine"][rank_info.rank])
            self.device_ranks = int(places["device"][rank_info.rank])
            self.ranks = ProcessRanks.following(self.control_channel, device)
        except Exception as error:
            self.control_channel.fail(error)
            self.control_channel.close()
            raise

    def report_loaded(self, digest: str) -> None:
        self.control_channel.send_json({"loaded": digest})

    def agree(self, memory: MemoryPlan, layout: CacheLayout, type: CacheType) -> MemoryPlan:
        return _agreed(self.ranks, memory, layout, type)

    def close(self) -> None:
        self.control_channel.close()
        self.ranks.close()


def memory_name(device: torch.device) -> str:
    """A name of the memory that `device` allocates from, unique on this machine.

    A GPU's index is not unique: each process may see a single GPU with index 0.
    """
    if device.type != "cuda":
        return "host"
    return str(torch.cuda.get_device_properties(device).uuid)


class _Places:
    """The machine's address and the memory's name of each rank."""

    def __init__(self, machines: Sequence[str], memories: Sequence[str]) -> None:
        self._devices = list(zip(machines, memories, strict=True))
        on_machine, on_device = Counter(machines), Counter(self._devices)
        self.machine_ranks = [on_machine[machine] for machine in machines]
        self.device_ranks = [on_device[device] for device in self._devices]

    @property
    def several_machines(self) -> bool:
        return self.machine_ranks[0] < len(self.machine_ranks)

    def check_one_rank_per_device(self) -> None:
        """NCCL does not support two ranks on one GPU."""
        for rank, device in enumerate(self._devices):
            first = self._devices.index(device)
            if first < rank:
                raise ConfigurationError(
                    f"Ranks {first} and {rank} have the same GPU, {device[1]} of {device[0]}; each "
                    "rank needs one of its own. Set `num_gpus: 1`."
                )


def _agreed(
    ranks: ProcessRanks, memory: MemoryPlan, layout: CacheLayout, type: CacheType
) -> MemoryPlan:
    *pages, tokens = ranks.lowest((*memory.pages, memory.cache_tokens))
    agreed = memory.with_pages(pages, layout, type, cache_tokens=tokens)
    (total,) = ranks.totals((agreed.reserved_bytes,))
    return replace(agreed, others_bytes=total - agreed.reserved_bytes)
