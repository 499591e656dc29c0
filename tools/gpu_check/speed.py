"""Measures a model of 8B's shape with random blocks: tokens per second, steps and products."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.make_model import Shape, write_model
from bench.vocabulary import Vocabulary, synthetic_vocabulary
from runtime.engine.assembly import EngineOptions, assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.kernels.triton.products import product
from runtime.kv.cache_types import CacheType
from runtime.quant.block_types import Compute, Weight, block_type
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner
from tests.cuda.large_model import SHAPE, VOCABULARY
from tests.families.engine_runs import answers
from tests.kernels.random_weights import random_weight
from tools.gpu_check.ceilings import Ceilings, measure, seconds
from tools.gpu_check.models import load_decoder
from tools.gpu_check.report import Task

LABEL = "Q4_K_M"
TINY = Shape(layers=1, hidden=256, feed_forward=256, heads=4, kv_heads=2, head_dim=64, context=512)
_ROTATED_BYTES = 256 << 20  # total of the copies of a matrix, more than caches hold


@dataclass(frozen=True)
class Load:
    """streams: the numbers of decoding streams; each has a prompt of `prompt` tokens and an answer
    of `answer` tokens. prefills: lengths of single prompts."""

    streams: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 512
    answer: int = 200
    prefills: tuple[int, ...] = (512, 2048, 8192)
    step_tokens: int = 2048


# Answers are so long that the first streams still decode when the last prompt has been computed.
FULL, DRY = Load(), Load((1, 2), 8, 6, (16,), 16)


def run(task: Task) -> None:
    shape = TINY if task.dry else replace(SHAPE, layers=32)
    measure_model(task, "8B", shape, LABEL)
    ceilings = measure(task)
    matrices = {"head": (VOCABULARY, shape.hidden)} | shape.matrices()
    if task.dry:
        matrices = {"ffn_down": (2, 256)}
    finer = ("head", "attn_v", "ffn_down")
    for name, size in matrices.items():
        for type in ("Q6_K", "Q4_K") if name in finer else ("Q4_K",):
            _measure_product(
                task, f"{name} {type}", random_weight(block_type(type), *size), ceilings
            )


def measure_model(task: Task, name: str, shape: Shape, label: str) -> None:
    """Writes, loads and serves a model; measures tokens per second, host time and launches."""
    path, load = task.folder / f"{name}.gguf", DRY if task.dry else FULL
    write_model(path, label, vocabulary(task), shape)
    decoder = load_decoder(path, task.device, torch.bfloat16, Compute.FINE)
    path.unlink()
    context_tokens, most = load.prompt + load.answer, max(load.streams)
    for graphs in (False, True):
        label = f"{name}, graphs" if graphs else name
        with _engine(task, decoder, context_tokens, most, load, graphs=graphs) as engine:
            for streams in load.streams:
                with task.report.guarding(f"{label}, {streams} streams"):
                    _measure_decoding(task, label, engine, streams, load)
            with task.report.guarding(f"{label}, launches"):
                _measure_launches(task, label, engine)
    with _engine(task, decoder, max(load.prefills) + 16, 1, load) as engine:
        for length in load.prefills:
            with task.report.guarding(f"{name}, prefill of {length}"):
                taken = median(_prefill_s(engine, length) for _ in range(3))
                task.report.figure(f"{name}, prefill of {length}", length / taken, "tokens/s")


def step_seconds(task: Task, decoder: DecoderModel) -> dict[str, float]:
    """The median time of a step for each number of streams, and of a prompt of each length."""
    load = DRY if task.dry else FULL
    found, most = {}, max(load.streams)
    with _engine(task, decoder, load.prompt + load.answer, most, load, graphs=True) as engine:
        for streams in load.streams:
            _, pairs = _decode(engine, streams, load)
            found[f"{streams} streams"] = median(b.began - a.began for a, b in pairs)
    with _engine(task, decoder, max(load.prefills) + 16, 1, load) as engine:
        for length in load.prefills:
            taken = median(_prefill_s(engine, length) for _ in range(3))
            found[f"prefill of {length}"] = taken
    return found


def vocabulary(task: Task) -> Vocabulary:
    whole = synthetic_vocabulary()
    if not task.dry:
        return whole
    return replace(whole, tokens=whole.tokens[:512], types=whole.types[:512], merges=[])


@contextmanager
def _engine(
    task: Task,
    decoder: DecoderModel,
    context_tokens: int,
    sequences: int,
    load: Load,
    *,
    graphs: bool = False,
) -> Iterator[AsyncEngine]:
    options = EngineOptions(
        context_tokens,
        sequences,
        load.step_tokens,
        kv_dtype=CacheType.BFLOAT16,
        prefix_cache=False,
        cuda_graphs=graphs,
    )
    engine, _ = assemble(decoder, lambda token: b"t", device=task.device, options=options)
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
    """A launched step: its number of rows, the times at which the launch began and ended, and the
    processor time of the engine's thread when it began, in seconds."""

    rows: int
    began: float
    ended: float
    processor: float


@contextmanager
def _recording() -> Iterator[list[Step]]:
    steps, launch = list[Step](), DeviceRunner.launch

    def recorded(runner: DeviceRunner, plan):
        began, processor = time.perf_counter(), time.thread_time()
        launched = launch(runner, plan)
        rows = sum(chunk.length for chunk in plan.chunks)
        steps.append(Step(rows, began, time.perf_counter(), processor))
        return launched

    with patch.object(DeviceRunner, "launch", recorded):
        yield steps


def _decode(engine: AsyncEngine, streams: int, load: Load) -> tuple[bool, list[tuple[Step, Step]]]:
    """Whether all answers are whole, and pairs of consecutive steps that decode all streams."""
    requests = [_request(number, load.prompt, load.answer) for number in range(streams)]
    with _recording() as steps:
        deltas = answers(engine, requests, together=True)
    whole = all(len(delta.tokens) == load.answer and not delta.error for delta in deltas)
    return whole, [(a, b) for a, b in pairwise(steps) if a.rows == b.rows == streams]


def _measure_decoding(task: Task, name: str, engine: AsyncEngine, streams: int, load: Load) -> None:
    whole, pairs = _decode(engine, streams, load)
    task.report.check(f"{name}, {streams} streams have whole answers", whole)
    step_s = median(b.began - a.began for a, b in pairs)
    task.report.figure(f"{name}, {streams} streams", streams / step_s, "tokens/s")
    host_ms = median(b.processor - a.processor for a, b in pairs) * 1e3
    task.report.figure(f"{name}, {streams} streams, processor time a step", host_ms, "ms")
    launch_ms = median(a.ended - a.began for a, _ in pairs) * 1e3
    task.report.figure(f"{name}, {streams} streams, launch of a step", launch_ms, "ms")


def _measure_launches(task: Task, name: str, engine: AsyncEngine) -> None:
    """Counts kernels and copies on the device per step of one stream; the prompt counts as a
    step."""
    kind = ProfilerActivity.CPU if task.dry else ProfilerActivity.CUDA
    with _recording() as steps, profile(activities=[kind]) as recorded:
        answers(engine, [_request(0, 1, 4 if task.dry else 32)], together=True)
    count = sum(event.device_type == DeviceType.CUDA for event in recorded.events())
    task.report.check(f"{name}, launches are seen", task.dry or count > 0)
    task.report.figure(f"{name}, launches a step", count / len(steps), "launches")


def _prefill_s(engine: AsyncEngine, length: int) -> float:
    began = time.perf_counter()
    deltas = answers(engine, [_request(0, length, 1)], together=True)
    assert len(deltas[0].tokens) == 1, deltas[0].error
    return time.perf_counter() - began


def _measure_product(task: Task, name: str, weight: Weight, ceilings: Ceilings) -> None:
    """Measures a product relative to the device's ceiling: the longer of the least times for its
    bytes and for its operations."""
    planar = replace(weight, compute=Compute.FINE).in_planes(task.device)
    copies = 1 if task.dry else max(1, _ROTATED_BYTES // planar.nbytes)
    ring = [planar, *(replace(planar, data=planar.data.clone()) for _ in range(copies - 1))]
    outs, elements = planar.shape
    for rows in (1,) if task.dry else (1, 8, 64, 512):
        with task.report.guarding(f"{name}, {rows} rows"):
            x = torch.randn(rows, elements, device=task.device).to(dtype_of(task))
            taken = seconds(_rotating(x, ring), task.device)
            nbytes = planar.nbytes + 2 * rows * (outs + elements)
            least = max(
                nbytes / ceilings.bytes_s, 2 * rows * outs * elements / ceilings.operations_s
            )
            task.report.figure(f"{name}, {rows} rows, share of the ceiling", least / taken, "")


def _rotating(x: torch.Tensor, ring: list[Weight]):
    calls = [0]

    def call() -> None:
        calls[0] += 1
        product(x, ring[calls[0] % len(ring)])

    return call


def dtype_of(task: Task) -> torch.dtype:
    """float32 in a dry run, since Triton's interpreter is unreliable for bfloat16."""
    return torch.float32 if task.dry else torch.bfloat16
