"""What the host computes for a decode step, with a device that takes no time."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from bench.machine import describe_machine
from bench.sections import HOST
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine import Engine, EngineLimits
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_kinds import CacheKind, Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import Batch, KVCache, RowForm
from runtime.worker.recorded_steps import StepOutput
from runtime.worker.runner import DeviceRunner
from runtime.worker.sampler import Drawn, Draws, Sampler, TokenMasks
from runtime.worker.step_graphs import padded_rows
from runtime.worker.step_results import Launched, ResultCopier

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

Written by `make bench` and `python -m bench --only host`: processor time of the engine's thread
from one decode step to the next, in milliseconds. `DeviceRunner` launches steps of a model and a
sampler that compute nothing. A GPU computes meanwhile; a step takes at least this long. With
graphs, a step is repeated by one call; without, torch makes its batch, and launches of the model's
kernels would be added. Not measured: an upload, the call of a graph, and 13 launches of
head, sampler and results. Sequences have {LEAST} to {MOST} tokens, and their streams are read on
another thread. The goals are 0.5 ms for 1 sequence and 3 ms for 256.
"""


class StubModel:
    """A `DecoderModel` with these caches whose states are all the same."""

    vocab_size, hidden_size, context_length = VOCABULARY, 8, CONTEXT_TOKENS
    causal, generates, position_axes, weight_bytes = True, True, 1, 0
    cache_devices = layer_devices = key_rotations = None

    def __init__(self, cache_layers: Sequence[LayerCache]) -> None:
        self.cache_layers, self.source_layers = cache_layers, range(len(cache_layers))
        self._states = torch.zeros(max(SEQUENCES), self.hidden_size)

    def weight_bytes_on(self, device: torch.device) -> int:
        return 0

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        return self._states[: len(batch.output_rows)]

    def logits(self, states: Tensor) -> Tensor:
        return states

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        return 0


class StubSampler(Sampler):
    """Draws the same token in each row."""

    def sample(self, logits: Tensor, draws: Draws, masks: TokenMasks | None = None) -> Drawn:
        count = len(draws.slots)
        return Drawn(torch.full((count,), 100), torch.ones(count, dtype=torch.bool))


class StubRecorder:
    """A `StepRecorder` with the rows of CUDA graphs."""

    drawn_rows = most_span_rows = 0

    def __init__(self, most: int) -> None:
        self.most_rows = most

    def rows(self, form: RowForm, count: int) -> int | None:
        return padded_rows(count, self.most_rows) if form is RowForm.ONE_EACH else None

    def record(self, computation: Callable[[], StepOutput]) -> tuple["StubRecording", StepOutput]:
        result = computation()
        return StubRecording(result), result


@dataclass(frozen=True)
class StubRecording:
    result: StepOutput

    def replay(self) -> StepOutput:
        return self.result


class HostCopier(ResultCopier):
    """Packs results; there is no copy to wait for."""

    def _pinned(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8)


class Inert:
    """Stands for events and streams."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class HostRunner(DeviceRunner):
    """On a CPU as if on a CUDA device, but with one buffer of inputs.

    `steps`: the number of rows of each step, and the processor time of the thread when it was
    launched.
    """

    def __init__(
        self, model: StubModel, layout: CacheLayout, limits: StepLimits, *, graphs: bool
    ) -> None:
        self.steps: list[tuple[int, int]] = []
        pool = KVPool(
            layout,
            pages=[1] * len(layout.groups),
            slots=limits.slots + 1,
            pages_per_sequence=limits.context_tokens // PAGE_TOKENS,
            type=CacheType.BFLOAT16,
            device=CPU,
        )
        super().__init__(model, pool, layout, limits, device=CPU, recorded_bytes=int(graphs))
        self._copier = HostCopier(limits, hidden=model.hidden_size, device=CPU)

    def launch(self, plan: StepPlan) -> Launched:
        self.steps.append((sum(chunk.length for chunk in plan.chunks), time.thread_time_ns()))
        return super().launch(plan)


@contextmanager
def _stubs(limits: StepLimits) -> Iterator[None]:
    runner, recorder = "runtime.worker.runner", StubRecorder(limits.draws)
    with (
        patch(f"{runner}.Sampler", StubSampler),
        patch(f"{runner}.recorder_of", lambda *_, **options: recorder),
        patch.multiple(torch.cuda, Event=Inert, current_stream=Inert),
    ):
        yield


def step_ms(kinds: tuple[CacheKind, ...], sequences: int, *, graphs: bool) -> float:
    """The median over decode steps of all sequences."""
    limits = StepLimits(sequences, STEP_TOKENS, CONTEXT_TOKENS)
    with _stubs(limits):
        steps = _steps(kinds, limits, graphs=graphs)
    full = [(a, b) for (rows, a), (_, b) in pairwise(steps) if rows == sequences]
    return median((b - a) / 1e6 for a, b in full[2:])


def _steps(
    kinds: tuple[CacheKind, ...], limits: StepLimits, *, graphs: bool
) -> Sequence[tuple[int, int]]:
    """As of `HostRunner`."""
    sequences = limits.slots
    model = StubModel([LayerCache(kind, 1, 8, 8) for kind in kinds])
    layout = CacheLayout.of(model.cache_layers, page_tokens=PAGE_TOKENS)
    runner = HostRunner(model, layout, limits, graphs=graphs)
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
    return runner.steps


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
    machine, rows = describe_machine(packages=("torch",)), []
    for (name, kinds), graphs in product(KINDS.items(), (True, False)):
        found = [
            median(step_ms(kinds, count, graphs=graphs) for _ in range(rounds))
            for count in SEQUENCES
        ]
        label = f"{name}; {'with' if graphs else 'without'} graphs"
        rows.append(f"| {label} | " + " | ".join(f"{ms:.2f}" for ms in found) + " |")
    return "\n".join(
        [
            INTRODUCTION,
            machine,
            f"- {rounds} rounds",
            "",
            "| kinds of cache | " + " | ".join(f"{n} sequences" for n in SEQUENCES) + " |",
            "|:---" + "|---:" * len(SEQUENCES) + "|",
            *rows,
            "",
        ]
    )
