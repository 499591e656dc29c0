"""Ranks of one engine: which of them share memory, and the memory plan of each."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.distributed import process_group
from runtime.distributed import rank_group as team_module
from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.distributed.rank_group import Member, RankGroup
from runtime.engine.assembly import assemble, compute_part
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import MemoryPlan
from runtime.errors import ConfigurationError, EngineDeadError
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_types import CacheType
from tests.certificates import Authority
from tests.patience import HANG_S

HOST = "127.0.0.1"
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 1 << 30
WEIGHTS, FREE = 37 * GIB, 40 * GIB  # free beside the weights
# Half of a model: 37 GiB of weights, and 128 KiB of keys and values for each token.
DECODER = SimpleNamespace(
    causal=True,
    generates=True,
    cache_layers=[LayerCache(Full(), 8, 128, 128)] * 32,
    cache_devices=None,
    layer_devices=None,
    source_layers=range(32),
    key_rotations=None,
    context_length=131_072,
    vocab_size=1_000,
    hidden_size=64,
    weight_bytes=WEIGHTS,
    activation_bytes=lambda tokens, outputs: GIB,
)
OPTIONS = EngineOptions(context_tokens=4096, max_sequences=32, kv_dtype=CacheType.Q8_0)


class Planned(Exception):
    """Ends an assembly after the memory plan, before any allocation."""

    def __init__(self, memory: MemoryPlan, sent: Any) -> None:
        self.memory, self.sent = memory, sent


def stop(memory: MemoryPlan, layout: CacheLayout, type: CacheType, sent: Any = None) -> None:
    """`sent`: rank 0's options for the others."""
    raise Planned(memory, sent)


@pytest.fixture
def joined(monkeypatch):
    """A function from the memory names of the ranks to the joined group."""

    def join(device: torch.device, memories: Sequence[str]) -> tuple[RankGroup, list[Member]]:
        names = {"rank-0": memories[0]}
        monkeypatch.setattr(
            team_module, "memory_name", lambda _: names[threading.current_thread().name]
        )
        rank_zero = RankZero(HOST, len(memories))
        members: list[Member] = []

        def sit(rank_info: RankInfo) -> None:
            members.append(Member(rank_info, device))

        threads = []
        for rank_info, memory in zip(rank_zero.rank_infos, memories[1:], strict=True):
            names[f"rank-{rank_info.rank}"] = memory
            threads.append(
                threading.Thread(target=sit, args=(rank_info,), name=f"rank-{rank_info.rank}")
            )
        found: list[RankGroup | Exception] = []

        def wait_for_ranks() -> None:
            try:
                found.append(RankGroup(rank_zero, device))
            except ConfigurationError as error:
                found.append(error)
                rank_zero.close()

        threads.append(threading.Thread(target=wait_for_ranks, name="rank-0"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rank_zero.close()
        (rank_group,) = found
        if isinstance(rank_group, Exception):
            raise rank_group
        return rank_group, sorted(members, key=lambda member: member.control_channel.rank_info.rank)

    class NoGroup:
        """Replaces the process group, of which a process has at most one."""

        leading = following = staticmethod(lambda line, device: None)

    monkeypatch.setattr(team_module, "ProcessRanks", NoGroup)
    return join


def test_ranks_with_their_own_gpu_share_the_machine_but_no_memory(joined) -> None:
    rank_group, members = joined(CUDA, ["GPU-a", "GPU-b", "GPU-c"])
    assert [rank.device_ranks for rank in (rank_group, *members)] == [1, 1, 1]
    assert [rank.machine_ranks for rank in (rank_group, *members)] == [3, 3, 3]


def test_ranks_on_processors_share_their_machines_memory(joined) -> None:
    rank_group, members = joined(CPU, ["host", "host"])
    assert [rank.device_ranks for rank in (rank_group, *members)] == [2, 2]


@pytest.mark.parametrize(
    ("machines", "warns"), [(("10.0.0.1", "10.0.0.2"), True), (("10.0.0.1", "10.0.0.1"), False)]
)
def test_tls_does_not_cover_tensors_between_hosts_and_the_log_says_so(
    joined, monkeypatch, caplog, tmp_path, machines, warns
) -> None:
    for name, value in Authority(tmp_path).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(RankZero, "machines", list(machines))
    with caplog.at_level("WARNING"):
        joined(CPU, ["host", "host"])
    assert ("gloo or NCCL" in caplog.text) == warns


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_two_ranks_on_one_gpu_are_refused_by_its_name(joined) -> None:
    with pytest.raises(ConfigurationError, match=r"Ranks 0 and 2 .* GPU-a .*num_gpus: 1"):
        joined(CUDA, ["GPU-a", "GPU-b", "GPU-a"])


Join = Callable[[int, Callable[[], None]], None]


@pytest.fixture
def joining(monkeypatch) -> Iterator[Callable[[Join], None]]:
    """A function that forms a group of two ranks, each of which calls what it is passed, with its
    number and a function that joins, where it would join by `torch.distributed`."""
    members = []  # one that is lost is reported in place of the failure
    really_join = process_group._join
    with ExitStack() as ending:

        def form(join: Join) -> None:
            def joined(store: Any, rank: int, size: int, device: torch.device) -> None:
                join(rank, lambda: really_join(store, rank, size, device))

            monkeypatch.setattr(process_group, "_join", joined)
            rank_zero = ending.enter_context(closing(RankZero(HOST, 2)))
            pool = ending.enter_context(ThreadPoolExecutor(1))
            members.append(pool.submit(Member, *rank_zero.rank_infos, CPU))
            RankGroup(rank_zero, CPU)

        yield form


def test_the_failure_of_a_rank_that_joins_is_raised_while_rank_0_waits_for_it(joining) -> None:
    """As NCCL's initialisation fails when a container has too little shared memory."""
    ended = threading.Event()

    def join(rank: int, really: Callable[[], None]) -> None:
        if rank:
            raise RuntimeError("NCCL needs more shared memory")
        ended.wait(HANG_S)

    with pytest.raises(EngineDeadError, match=r"Rank 1 of 2: .*NCCL needs more shared memory"):
        joining(join)
    ended.set()


def test_rank_0_stops_joining_when_another_rank_has_failed(joining, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "STEP_TIMEOUT", timedelta(seconds=2 * HANG_S))

    def join(rank: int, really: Callable[[], None]) -> None:
        if rank:
            raise RuntimeError("no memory")
        really()

    with pytest.raises(EngineDeadError, match=r"Rank 1 of 2: .*no memory"):
        joining(join)
    for thread in threading.enumerate():
        if thread.name == "joining-ranks":
            thread.join(HANG_S)
            assert not thread.is_alive()


def test_a_failure_of_rank_0_to_join_is_raised(joining, monkeypatch) -> None:
    monkeypatch.setattr(RankZero, "cause_of", lambda self, error: error)

    def join(rank: int, really: Callable[[], None]) -> None:
        if not rank:
            raise RuntimeError("no such interface")

    with pytest.raises(EngineDeadError, match="Rank 0 cannot join the others: no such interface"):
        joining(join)


@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_with_its_own_gpu_plans_for_all_of_its_memory(monkeypatch, size: int) -> None:
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: FREE)
    alone = planned_by_first(device_ranks=1, machine_ranks=1)
    assert alone.cache_tokens >= OPTIONS.context_tokens
    assert planned_by_first(device_ranks=1, machine_ranks=size) == alone
    follower = planned_by_follower(device_ranks=1, machine_ranks=size)
    assert follower.pages == alone.pages


def test_ranks_of_one_memory_divide_it(monkeypatch) -> None:
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: 100 * GIB)
    for planned in (planned_by_first, planned_by_follower):
        assert planned(device=CPU, device_ranks=2, machine_ranks=2).available_bytes == 50 * GIB


def test_ranks_of_one_memory_set_aside_the_host_pages_of_each(monkeypatch) -> None:
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: 200 * GIB)
    options = replace(OPTIONS, host_cache_bytes=30 * GIB, set_aside_bytes=10 * GIB)
    for planned in (planned_by_first, planned_by_follower):
        plan = planned(options, device=CPU, device_ranks=2, machine_ranks=2)
        assert plan.available_bytes == (200 - 2 * 30 - 10) // 2 * GIB


def test_other_ranks_receive_all_options(monkeypatch) -> None:
    monkeypatch.setattr("runtime.engine.memory_plan.available_bytes", lambda device: FREE)
    sent = planned_first(OPTIONS, CUDA, {"device_ranks": 1, "machine_ranks": 1}).sent
    received = json.loads(json.dumps(sent["options"]))
    assert received == asdict(OPTIONS) | {"kv_dtype": "q8_0"}


def planned_by_first(
    options: EngineOptions = OPTIONS, *, device: torch.device = CUDA, **ranks: int
) -> MemoryPlan:
    return planned_first(options, device, ranks).memory


def planned_first(options: EngineOptions, device: torch.device, ranks: dict[str, int]) -> Planned:
    rank_group: Any = SimpleNamespace(agree=stop, **ranks)
    decoder: Any = DECODER
    with pytest.raises(Planned) as planned:
        assemble(decoder, lambda token: b"", device=device, options=options, rank_group=rank_group)
    return planned.value


def planned_by_follower(
    options: EngineOptions = OPTIONS, *, device: torch.device = CUDA, **ranks: int
) -> MemoryPlan:
    sent = json.loads(json.dumps(planned_first(options, device, ranks).sent))
    control_channel = SimpleNamespace(receive_json=lambda: sent)
    member: Any = SimpleNamespace(agree=stop, control_channel=control_channel, **ranks)
    decoder: Any = DECODER
    with pytest.raises(Planned) as planned:
        compute_part(decoder, member, device=device)
    return planned.value.memory
