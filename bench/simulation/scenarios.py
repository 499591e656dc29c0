"""The simulated scenarios: machines, traces and durations."""

from dataclasses import dataclass, replace

from bench.simulation.replica import StepCosts
from bench.simulation.traces import Mix
from bench.simulation.world import ClusterSpec

# Measured by `make bench` on 2026-11-21 with a Q4_0 model on two cores of an AMD EPYC. A prompt of
# 512 tokens took 2.96 s; steps with 1, 4 and 16 sequences took 26, 40 and 128 ms, near 19 ms, and
# 6.7 ms for each.
CPU = StepCosts(
    step_s=0.019,
    prefill_row_s=0.00574,
    decode_row_s=0.0067,
    cached_token_s=0.0,
    step_tokens=512,
    slots=16,
    cache_tokens=32_000,
)
# Calculated: 8 billion weights in bfloat16 on one accelerator with 80 GB, 3.35 TB/s and 990 TFLOP/s
# (data sheet of the H100 SXM) at 40% of its arithmetic: a step reads 16 GB of weights, a token
# takes 16 GFLOP, and each cached token is 128 KiB to read. 1 ms is added for everything else.
ACCELERATOR = StepCosts(
    step_s=0.006,
    prefill_row_s=40e-6,
    decode_row_s=20e-6,
    cached_token_s=40e-9,
    step_tokens=2048,
    slots=128,
    cache_tokens=450_000,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and its trace; measured from `warm_s` to `seconds`.

    `in_time_s`: limit of the time to first token for an answer to count as in time.
    """

    name: str
    cluster: ClusterSpec
    mix: Mix
    seconds: float
    warm_s: float
    in_time_s: float

    def with_ingresses(self, count: int) -> "Scenario":
        return replace(self, cluster=replace(self.cluster, ingresses=count))


def scenarios() -> list[Scenario]:
    return [
        _cpu("conversations", Mix(4 * 0.06, chats=1, think_s=30, systems=5)),
        _cpu("prompts without common prefixes", Mix(4 * 0.12, unshared=1)),
        _accelerators("conversations", Mix(64 * 9, chats=1, think_s=8), 45),
        _accelerators("prompts without common prefixes", Mix(64 * 14, unshared=1), 40),
        _accelerators("documents with many questions each", Mix(64 * 11, documents=1), 40),
        long_answers(64, 60),
        everything(64, 60),
        everything(2048, 16),
    ]


def long_answers(count: int, seconds: float) -> Scenario:
    """A scenario in which all slots are in use long before prompts queue."""
    few = replace(ACCELERATOR, slots=16)
    mix = Mix(count * 1.2, chats=1, think_s=5, answer=400)
    name = f"{count} accelerators with 16 slots each, conversations with long answers"
    return Scenario(name, ClusterSpec((few,) * count), mix, seconds, seconds / 3, 0.5)


def late_replicas(seconds: float) -> Scenario:
    """A scenario in which prompts queue on one machine while autoscaling starts three more."""
    cluster = ClusterSpec((CPU,) * 4, late=3, late_s=40.0)
    name = "an overloaded CPU machine, and three more that join after 40 s"
    return Scenario(name, cluster, Mix(4 * 0.15, unshared=1), seconds, 0.0, 10.0)


def everything(count: int, seconds: float) -> Scenario:
    """A scenario with all kinds of prompts, bursts, every second replica at half speed, and
    failures."""
    costs = tuple(ACCELERATOR.slower(1 + number % 2) for number in range(count))
    cluster = ClusterSpec(
        costs,
        report_every_s=max(0.1, count / 2000),
        fail_at_s=seconds / 2,
        failing=count // 16,
        replaced_after_s=seconds / 6,
    )
    mix = Mix(
        count * 2.6,
        chats=0.6,
        documents=0.2,
        unshared=0.2,
        think_s=6,
        systems=200,
        libraries=10 * count,
        burst_every_s=seconds / 4,
        burst_s=seconds / 30,
    )
    name = (
        f"{count} accelerators, every second one at half speed: conversations, documents and "
        f"others, three times as many in bursts; {count // 16} fail at once and are replaced"
    )
    return Scenario(name, cluster, mix, seconds, seconds / 4, 0.5)


def _cpu(name: str, mix: Mix) -> Scenario:
    return Scenario(f"4 CPU machines, {name}", ClusterSpec((CPU,) * 4), mix, 7200, 600, 10.0)


def _accelerators(name: str, mix: Mix, seconds: float) -> Scenario:
    cluster = ClusterSpec((ACCELERATOR,) * 64)
    return Scenario(f"64 accelerators, {name}", cluster, mix, seconds, seconds / 3, 0.5)
