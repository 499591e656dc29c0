"""Checks tiny models of several families: logits and tokens against the CPU, memory, and that no
launch waits for the device."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.registry import class_for
from runtime.engine.assembly import assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import MemoryPlan
from runtime.engine.request import GenerationRequest
from runtime.engine.step_plan import StepPlan
from runtime.kv.cache_types import CacheType
from runtime.quant.weight import Compute
from runtime.worker.model import DecoderModel
from runtime.worker.runner import DeviceRunner
from runtime.worker.step_results import Launched
from tests.families.agreement import random_tokens
from tests.families.engine_runs import answers, mixed_requests
from tests.families.factored_files import factored
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import TextFamily
from tests.tiny_models import tiny_tokenizer, write_tiny
from tools.gpu_check.report import Task

# xIELU, moments, one delta for each element, Mamba 2 with squared ReLU and experts, temperatures,
# layer norms of heads; then dense layers, experts, sliding windows, sinks,
# compressed keys, recurrent layers.
FAMILIES = (
    "apertus", "gemma3n", "kimi-linear", "nemotron_h_moe", "llama4", "command-r", "llama",
    "qwen3moe", "gemma3", "gpt-oss", "deepseek2", "qwen35moe", "granitehybrid", "lfm2",
)  # fmt: skip
FACTORED = ("llama", "qwen3moe")  # also in files with factors of matrices
TOLERANCE = 1e-3  # of log-probabilities in float32
CONTEXT, SEQUENCES = 256, 8
CPU = torch.device("cpu")


def run(task: Task) -> None:
    task.make(
        (label, partial(_check_file, task, label, write))
        for name in (("llama",) if task.dry else FAMILIES)
        for label, write in files_of(name, factors=name in FACTORED and not task.dry)
        if label.endswith("quantised") or not task.dry
    )


def files_of(name: str, *, factors: bool = False) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Labels, and what writes the files of a family: with plain weights, and with quantised ones if
    rows are long enough; with `factors`, with factors of matrices as those of NVFP4 have."""
    family = TEXT_MODELS[name]
    config = next(iter(family.configs))
    yield name, lambda path: family.write(path, config)
    if factors:
        yield f"{name}, factors", lambda path: _write_factored(family, path, config)
    if family.wide is not None and not family.keys:
        wide = family.wide_config()
        yield (
            f"{name}, quantised",
            lambda path: write_tiny(path, wide, type="q4_k_m", **family.options),
        )


def _write_factored(family: TextFamily, path: Path, config: str) -> None:
    source = path.with_name("plain.gguf")
    family.write(source, config)
    factored(source, path)


def load_decoder(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    compute: Compute = Compute.EXACT,
    *,
    deterministic: bool = False,
) -> DecoderModel:
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    options = ScopeOptions(compute=compute, deterministic=deterministic)
    scope = TensorScope(file, device=device, dtype=dtype, options=options)
    decoder = class_for(metadata)(scope, metadata)
    scope.check()
    return decoder


def _check_file(task: Task, name: str, write: Callable[[Path], None]) -> None:
    path = task.folder / f"{name}.gguf"
    write(path)
    decoder = load_decoder(path, task.device, torch.float32)
    expected = load_decoder(path, CPU, torch.float32)
    check_logits(task, name, decoder, expected)
    requests = mixed_requests(tiny_tokenizer().get_vocab_size())[:: 12 if task.dry else 1]
    found = {
        (depth, together): _tokens(task, name, decoder, requests, depth=depth, together=together)
        for depth, together in product((1, 2), (False, True))
    }
    graphs = _tokens(task, name, decoder, requests, depth=2, together=True, graphs=True)
    with started(expected, CPU, depth=1) as (reference, _):
        on_cpu = [delta.tokens for delta in answers(reference, requests, together=True)]
    for label, one, other in (
        ("tokens of the CPU", found[1, True], on_cpu),
        ("alone as together", found[1, False], found[1, True]),
        ("depth 1 as 2", found[1, True], found[2, True]),
        ("graphs as none", graphs, found[2, True]),
    ):
        equal = sum(a == b for a, b in zip(one, other, strict=True))
        whole = equal == len(requests) and all(one)
        task.report.check(f"{name}, {label}", whole, equal=equal, requests=len(requests))


def check_logits(task: Task, name: str, decoder: DecoderModel, expected: DecoderModel) -> None:
    """Checks the logits of two prompts in one step, and of a step that decodes both."""
    one, two = random_tokens(41, seed=1), random_tokens(23, seed=2)
    on_device, on_cpu = PagedDecoder(decoder, device=task.device), PagedDecoder(expected)
    worst = 0.0
    for tokens in ({0: one, 1: two}, {1: [5], 0: [7]}):
        got, right = (
            paged.feed(tokens).cpu()[:, : tiny_tokenizer().get_vocab_size()].log_softmax(-1)
            for paged in (on_device, on_cpu)
        )
        worst = max(worst, (got - right).nan_to_num(nan=torch.inf).abs().max().item())
    task.report.check(f"{name}, logits", worst <= TOLERANCE, error=worst)


def _tokens(
    task: Task,
    name: str,
    decoder: DecoderModel,
    requests: list[GenerationRequest],
    *,
    depth: int,
    together: bool,
    graphs: bool = False,
) -> list[tuple[int, ...]]:
    """The tokens of each request. Checks that no launch waits for the device, and that no more
    memory is used than planned besides the weights; with graphs, that a GPU captures decode
    steps."""
    name = f"{name}, depth {depth}, {'together' if together else 'alone'}{', graphs' * graphs}"
    allocated = _begin_peak(task)
    serving = started(decoder, task.device, depth=depth, cuda_graphs=graphs)
    with _never_waiting(task.device) as steps, serving as (engine, memory):
        deltas = answers(engine, requests, together=together)
        sizes = sorted(steps.recordings)
    if graphs:
        task.report.check(f"{name}, are captured", task.dry or len(sizes) > 1, sizes=sizes)
    errors = [delta.error for delta in deltas if delta.error]
    task.report.check(f"{name}, never waits", not errors and steps.count > 0, errors=errors[:1])
    planned = memory.step_bytes + memory.cache_bytes
    peak = 0 if task.dry else torch.cuda.max_memory_allocated(task.device) - allocated
    task.report.check(f"{name}, peak memory", peak <= planned, planned=planned, peak=peak)
    return [delta.tokens for delta in deltas]


@contextmanager
def started(
    decoder: DecoderModel, device: torch.device, **changes: Any
) -> Iterator[tuple[AsyncEngine, MemoryPlan]]:
    """A started engine with other options, and its memory plan."""
    options = EngineOptions(
        CONTEXT,
        SEQUENCES,
        step_tokens=32,
        cache_tokens=SEQUENCES * CONTEXT,
        kv_dtype=CacheType.FLOAT32,
    )
    options = replace(options, **changes)
    engine, memory = assemble(decoder, lambda token: b"t", device=device, options=options)
    engine.start()
    try:
        yield engine, memory
    finally:
        engine.close()


@dataclass
class Steps:
    """Counts launched steps. recordings: the numbers of rows for which steps are recorded."""

    count: int = 0
    recordings: set[int] = field(default_factory=set)


@contextmanager
def _never_waiting(device: torch.device) -> Iterator[Steps]:
    """A launch in which torch waits for the device raises an error and fails its requests."""
    steps, launch = Steps(), DeviceRunner.launch

    def checked(runner: DeviceRunner, plan: StepPlan) -> Launched:
        steps.count += 1
        steps.recordings |= runner.recorded_rows
        if device.type != "cuda":
            return launch(runner, plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(runner, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.object(DeviceRunner, "launch", checked):
        yield steps


def _begin_peak(task: Task) -> int:
    """Restarts the measurement of the peak; returns the bytes that are already allocated. torch
    does not count them on a CPU."""
    if task.dry:
        return 0
    gc.collect()  # frees the engines of earlier checks
    torch.cuda.reset_peak_memory_stats(task.device)
    return torch.cuda.memory_allocated(task.device)
