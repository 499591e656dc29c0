"""`python -m bench.host`: the host's time for a decode step, with a device that takes no time."""

import argparse
import asyncio
import os
import platform
import time
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

import torch

from bench.machine import describe_processor
from bench.sections import HOST, publish
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import GenerationRequest, Result, SamplingParams, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.kv.spec import CacheKind, CacheLayout, Full, LayerCache, Sliding
from runtime.worker.input_preparer import InputPreparer, StepLimits
from runtime.worker.sampler import Drawn, Sampler
from runtime.worker.step_results import Launched, outcomes

SEQUENCES = (1, 64, 256)
KINDS: dict[str, tuple[CacheKind, ...]] = {
    "full": (Full(),),
    "full, sliding": (Full(), Sliding(512)),
}
PROMPT_TOKENS, ANSWER_TOKENS, CONTEXT_TOKENS = 500, 200, 1024
STEP_TOKENS, PAGE_TOKENS, VOCABULARY = 2048, 16, 128256
CPU = torch.device("cpu")
LEAST, MOST = PROMPT_TOKENS, PROMPT_TOKENS + ANSWER_TOKENS
INTRODUCTION = f"""\
{HOST}

Written by `make bench` and `python -m bench.host`: processor time of the engine's thread from one
decode step to the next, in milliseconds, with a runner that prepares inputs and reads results but
computes nothing. A GPU computes meanwhile; a step takes at least this long. Sequences have
{LEAST} to {MOST} tokens, and their streams are read on another thread. The goals are 0.5 ms for 1
sequence and 3 ms for 256.
"""


class StubRunner:
    """Prepares inputs and reads results like `DeviceRunner`, but computes nothing. `steps`: the
    number of rows of each step, and the thread's processor time when it was launched."""

    def __init__(self, layout: CacheLayout, limits: StepLimits) -> None:
        self.steps: list[tuple[int, int]] = []
        pool = KVPool(
            layout,
            pages=[1] * len(layout.groups),
            slots=limits.slots,
            pages_per_sequence=limits.context_tokens // PAGE_TOKENS,
            type=CacheType.BFLOAT16,
            device=CPU,
        )
        sampler = Sampler(
            slots=limits.slots,
            context_tokens=limits.context_tokens,
            vocab_size=VOCABULARY,
            device=CPU,
        )
        self._preparer = InputPreparer(layout, pool, sampler, limits, device=CPU)

    def launch(self, plan: StepPlan) -> Launched:
        self.steps.append((sum(chunk.length for chunk in plan.chunks), time.thread_time_ns()))
        inputs = self._preparer.prepare(plan)
        count = len(inputs.drawing)
        tokens, finite = torch.full((count,), 100), torch.ones(count, dtype=torch.bool)
        none = torch.zeros(0, 0)
        empty = none.flatten()
        drawn = Drawn(tokens, finite, empty, none.long(), none, empty)
        return Launched(plan.chunks, inputs.drawing, drawn, {}, (), none, inputs.scored, None, None)

    def collect(self, launched: Launched) -> tuple[Result, ...]:
        return outcomes(launched)


def step_ms(kinds: tuple[CacheKind, ...], sequences: int) -> float:
    """The median processor time in milliseconds of steps that decode all sequences."""
    layers = [LayerCache(kind, 1, 8, 8) for kind in kinds]
    layout = CacheLayout.of(layers, page_tokens=PAGE_TOKENS)
    runner = StubRunner(layout, StepLimits(sequences, STEP_TOKENS, CONTEXT_TOKENS))
    pages = [sequences * CONTEXT_TOKENS // PAGE_TOKENS] * len(kinds)
    manager = KVCacheManager(layout.kinds, pages, page_tokens=PAGE_TOKENS)
    engine = Engine(
        Scheduler(manager, slots=sequences, step_tokens=STEP_TOKENS),
        runner,
        token_bytes=lambda token: b"word ",
        limits=EngineLimits(CONTEXT_TOKENS, VOCABULARY, max_live=2 * sequences, slots=sequences),
        depth=2,
    )
    asyncio.run(_stream_all(AsyncEngine(engine), sequences))
    full = [
        (before, after)
        for (rows, before), (_, after) in pairwise(runner.steps)
        if rows == sequences
    ]
    return median((after - before) / 1e6 for before, after in full[2:])


async def _stream_all(engine: AsyncEngine, count: int) -> None:
    engine.start()

    async def stream(number: int) -> None:
        prompt = (number, *range(PROMPT_TOKENS - 1))
        sampling = SamplingParams(seed=number)
        request = GenerationRequest(f"{number}", prompt, StopRules(ANSWER_TOKENS), sampling)
        async for _ in engine.stream(request):
            pass

    await asyncio.gather(*(stream(number) for number in range(count)))
    engine.close()


def host_section(rounds: int) -> str:
    """The section of bench/RESULTS.md."""
    load_average = os.getloadavg()[0]
    rows = []
    for name, kinds in KINDS.items():
        found = [median(step_ms(kinds, count) for _ in range(rounds)) for count in SEQUENCES]
        rows.append(f"| {name} | " + " | ".join(f"{ms:.2f}" for ms in found) + " |")
    return "\n".join(
        [
            INTRODUCTION,
            f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"- {describe_processor()}; load average when it began: {load_average:.1f}",
            f"- {rounds} rounds; Python {platform.python_version()}",
            "",
            "| kinds of cache | " + " | ".join(f"{n} sequences" for n in SEQUENCES) + " |",
            "|:---" + "|---:" * len(SEQUENCES) + "|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write bench/RESULTS.md")
    arguments = parser.parse_args()
    section = host_section(arguments.rounds)
    publish(HOST, section, write=arguments.write)


if __name__ == "__main__":
    main()
