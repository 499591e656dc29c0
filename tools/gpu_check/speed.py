"""A model of 8B's shape with random blocks: tokens a second, and what a step and a product take."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from types import MappingProxyType
from unittest.mock import patch

import torch

from bench.make_model import Shape, write_model
from bench.vocabulary import Vocabulary, synthetic_vocabulary
from runtime.distributed.rank_group import RankGroup
from runtime.engine.assembly import assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.engine.step_plan import StepPlan
from runtime.kernels.triton.products import product
from runtime.kv.cache_types import CacheType
from runtime.quant.block_types import block_type
from runtime.quant.weight import Compute
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner
from runtime.worker.step_results import Launched
from tests.cuda.large_model import SHAPE, VOCABULARY
from tests.families.engine_runs import answers
from tests.kernels.random_weights import random_weight
from tools.gpu_check.ceilings import Ceilings, measure, recorded_seconds
from tools.gpu_check.kernel_times import profiling, report_kernels
from tools.gpu_check.models import load_decoder
from tools.gpu_check.report import Goal, Task

LABEL = "Q4_K_M"
TINY = Shape(layers=1, hidden=256, feed_forward=256, heads=4, kv_heads=2, head_dim=64, context=512)
_NO_GOALS: Mapping[str, Goal] = MappingProxyType({})
_ROTATED_BYTES = 256 << 20  # of copies of a matrix, more than caches hold


@dataclass(frozen=True)
class Load:
    """streams: of decoding, with prompts of `prompt` tokens and `answer` more; prefills: lengths of
    prompts, of which that of a whole step has a goal."""

    streams: tuple[int, ...] = (1, 4, 16, 64, 256)
    prompt: int = 924
    answer: int = 200
    prefills: tuple[int, ...] = (512, 2048, 8192)
    step_tokens: int = 2048

    @property
    def context_tokens(self) -> int:
        return self.prompt + self.answer


# About 1k tokens of context. Long answers: the first streams still decode when the last prompt has
# been computed.
FULL, DRY = Load(), Load((1, 2), 8, 6, (16,), 16)


def load_of(task: Task) -> Load:
    return DRY if task.dry else FULL


def run(task: Task) -> None:
    shape = TINY if task.dry else replace(SHAPE, layers=32)
    load = load_of(task)
    goals: dict[str, Goal] = {
        f"8B, graphs, {load.streams[0]} streams": ("at least", 400),
        f"8B, graphs, {load.streams[-1]} streams": ("at least", 11_000),
        f"8B, prefill of {load.step_tokens}": ("at least", 20_000),
    }
    task.make([("8B", partial(measure_model, task, "8B", shape, LABEL, goals))])
    ceilings = measure(task)
    matrices: dict[str, tuple[int, ...]] = {"head": (VOCABULARY, shape.hidden)} | shape.matrices()
    if task.dry:
        matrices = {"ffn_down": (2, 256)}
    finer = ("head", "attn_v", "ffn_down")
    products = [
        (f"{name} {type}", type, size)
        for name, size in matrices.items()
        for type in (("Q6_K", "Q4_K") if name in finer else ("Q4_K",))
    ]
    task.make(
        (name, partial(_measure_product, task, name, type, size, ceilings))
        for name, type, size in products
    )


def measure_model(
    task: Task, name: str, shape: Shape, label: str, goals: Mapping[str, Goal] = _NO_GOALS
) -> None:
    """Tokens a second, host time and launches of a model that is written, loaded and served.
    goals: by the names of figures."""
    path, load = task.folder / f"{name}.gguf", load_of(task)
    write_model(path, label, vocabulary(task), shape)
    decoder = load_decoder(path, task.device, torch.bfloat16, Compute.FINE)
    path.unlink()
    for graphs in (False, True):
        label = f"{name}, graphs" if graphs else name
        with decoding_engine(task, decoder, graphs=graphs) as engine:
            for streams in load.streams:
                with task.report.guarding(f"{label}, {streams} streams"):
                    _measure_decoding(task, label, engine, streams, goals)
            for streams in {load.streams[0], load.streams[-1]} if graphs else ():
                with task.report.guarding(f"{label}, {streams} streams, kernels"):
                    _profile_decoding(task, f"{label}, {streams} streams", engine, streams)
    with prefill_engine(task, decoder) as engine:
        for length in load.prefills:
            shown = f"{name}, prefill of {length}"
            with task.report.guarding(shown):
                speed = length / prefill_s(engine, length)
                task.report.figure(shown, speed, "tokens/s", goals.get(shown))
        with task.report.guarding(f"{name}, prefill, kernels"):
            _profile_prefill(task, f"{name}, prefill of {load.step_tokens}", engine)


def step_seconds(task: Task, name: str, decoder: DecoderModel) -> dict[str, float]:
    """The mean time of a step of so many streams, which is what llama.cpp's program divides by, and
    the median time of a prompt of so many tokens."""
    load, found = load_of(task), {}
    with decoding_engine(task, decoder, graphs=True) as engine:
        for streams in load.streams:
            pairs = decode(task, f"{name}, {streams} streams", engine, streams)
            found[f"{streams} streams"] = fmean(b.began - a.began for a, b in pairs)
    with prefill_engine(task, decoder) as engine:
        for length in load.prefills:
            found[f"prefill of {length}"] = prefill_s(engine, length)
    return found


def vocabulary(task: Task) -> Vocabulary:
    whole = synthetic_vocabulary()
    if not task.dry:
        return whole
    return replace(
        whole, tokens=whole.tokens[:512], types=whole.types[:512], merges=whole.merges[:256]
    )


def decoding_engine(
    task: Task, decoder: DecoderModel, *, graphs: bool = False, rank_group: RankGroup | None = None
) -> AbstractContextManager[AsyncEngine]:
    """For all streams of a load."""
    load = load_of(task)
    options = EngineOptions(load.context_tokens, max(load.streams), cuda_graphs=graphs)
    return _engine(task, decoder, options, rank_group)


def prefill_engine(task: Task, decoder: DecoderModel) -> AbstractContextManager[AsyncEngine]:
    """For one prompt."""
    return _engine(task, decoder, EngineOptions(max(load_of(task).prefills) + 16, 1), None)


@contextmanager
def _engine(
    task: Task, decoder: DecoderModel, options: EngineOptions, rank_group: RankGroup | None
) -> Iterator[AsyncEngine]:
    options = replace(
        options,
        step_tokens=load_of(task).step_tokens,
        kv_dtype=CacheType.BFLOAT16,
        prefix_cache=False,
    )
    engine, _ = assemble(
        decoder, lambda token: b"t", device=task.device, options=options, rank_group=rank_group
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def _request(number: int, prompt: int, answer: int) -> GenerationRequest:
    tokens = tuple(260 + (number * 7 + position) % 250 for position in range(prompt))
    return GenerationRequest(f"{number}", tokens, StopRules(answer), SamplingParams(temperature=0))


@dataclass(frozen=True)
class Step:
    """rows; when it was launched, until when, and the processor time of the engine's thread then:
    seconds."""

    rows: int
    began: float
    ended: float
    processor: float


@contextmanager
def _recording() -> Iterator[list[Step]]:
    steps, launch = list[Step](), DeviceRunner.launch

    def recorded(runner: DeviceRunner, plan: StepPlan) -> Launched:
        began, processor = time.perf_counter(), time.thread_time()
        launched = launch(runner, plan)
        rows = sum(chunk.length for chunk in plan.chunks)
        steps.append(Step(rows, began, time.perf_counter(), processor))
        return launched

    with patch.object(DeviceRunner, "launch", recorded):
        yield steps


def decode(task: Task, name: str, engine: AsyncEngine, streams: int) -> list[tuple[Step, Step]]:
    """Steps that decode so many streams, each with the next one."""
    load = load_of(task)
    requests = [_request(number, load.prompt, load.answer) for number in range(streams)]
    with _recording() as steps:
        deltas = answers(engine, requests, together=True)
    whole = all(len(delta.tokens) == load.answer and not delta.error for delta in deltas)
    task.report.check(f"{name} have whole answers", whole)
    return [(a, b) for a, b in pairwise(steps) if a.rows == b.rows == streams]


def median_s(pairs: Sequence[tuple[Step, Step]]) -> float:
    """The time of a step, from its launch to that of the next."""
    return median(b.began - a.began for a, b in pairs)


def _measure_decoding(
    task: Task, name: str, engine: AsyncEngine, streams: int, goals: Mapping[str, Goal]
) -> None:
    shown = f"{name}, {streams} streams"
    pairs = decode(task, shown, engine, streams)
    task.report.figure(shown, streams / median_s(pairs), "tokens/s", goals.get(shown))
    host_ms = median(b.processor - a.processor for a, b in pairs) * 1e3
    task.report.figure(f"{shown}, processor time a step", host_ms, "ms")
    launch_ms = median(a.ended - a.began for a, _ in pairs) * 1e3
    task.report.figure(f"{shown}, launch of a step", launch_ms, "ms")


def _profile_decoding(task: Task, name: str, engine: AsyncEngine, streams: int) -> None:
    with profiling(task, lambda rows: rows == streams) as found:
        decode(task, f"{name}, profiled,", engine, streams)
    report_kernels(task, name, found)


def _profile_prefill(task: Task, name: str, engine: AsyncEngine) -> None:
    with profiling(task, lambda rows: rows > 1) as found:
        answers(engine, [_request(0, load_of(task).step_tokens, 4)], together=True)
    report_kernels(task, name, found)


def prefill_s(engine: AsyncEngine, length: int) -> float:
    """The median time of a prompt of so many tokens and the token after it, after one that is not
    measured."""
    _prompt_s(engine, length)
    return median(_prompt_s(engine, length) for _ in range(5))


def _prompt_s(engine: AsyncEngine, length: int) -> float:
    began = time.perf_counter()
    deltas = answers(engine, [_request(0, length, 1)], together=True)
    assert len(deltas[0].tokens) == 1, deltas[0].error
    return time.perf_counter() - began


def _measure_product(
    task: Task, name: str, type: str, size: tuple[int, ...], ceilings: Ceilings
) -> None:
    """The share of what the device could do: of its bytes or its operations, which take longer."""
    weight = random_weight(block_type(type), *size)
    planar = replace(weight, compute=Compute.FINE).in_planes(task.device)
    copies = 1 if task.dry else max(1, _ROTATED_BYTES // planar.nbytes)
    ring = [planar, *(replace(planar, data=planar.data.clone()) for _ in range(copies - 1))]
    outs, elements = planar.shape
    for rows in (1,) if task.dry else (1, 8, 64, 512):
        with task.report.guarding(f"{name}, {rows} rows"):
            x = torch.randn(rows, elements, device=task.device).to(dtype_of(task))
            taken = recorded_seconds([partial(product, x, each) for each in ring], task.device)
            nbytes = planar.nbytes + 2 * rows * (outs + elements)
            least = max(
                nbytes / ceilings.bytes_s, 2 * rows * outs * elements / ceilings.operations_s
            )
            task.report.figure(f"{name}, {rows} rows, share of the ceiling", least / taken, "")


def dtype_of(task: Task) -> torch.dtype:
    """Triton's interpreter has no bfloat16 to be relied on."""
    return torch.float32 if task.dry else torch.bfloat16
