"""Measures the sampler's time for the rows of one step with a vocabulary of 128k."""

import time
from statistics import median

import torch

from bench.contender import TEMPERATURE, TOP_K, TOP_P
from runtime.engine.request import SamplingParams
from runtime.engine.step_plan import SlotLoad
from runtime.worker.pinned_buffer import PinnedBuffer
from runtime.worker.sampler import Draws, Sampler, SamplingPath
from runtime.worker.step_changes import write_loads

WARM_UPS = 5
REPEATS = 40


def sampling_ms(rows: int, vocab_size: int, threads: int) -> float:
    """The median milliseconds for `rows` sequences with top_k 40, top_p and temperature."""
    torch.set_num_threads(threads)
    sampler = _loaded_sampler(rows, vocab_size)
    draws = _draws(rows)
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))
    for _ in range(WARM_UPS):
        sampler.sample(logits, draws)
    return 1000 * median(_seconds(sampler, logits, draws) for _ in range(REPEATS))


def _seconds(sampler: Sampler, logits: torch.Tensor, draws: Draws) -> float:
    begin = time.perf_counter()
    sampler.sample(logits, draws)
    return time.perf_counter() - begin


def _loaded_sampler(rows: int, vocab_size: int) -> Sampler:
    sampler = Sampler(
        slots=rows, context_tokens=64, vocab_size=vocab_size, device=torch.device("cpu")
    )
    loads = [
        SlotLoad(
            row, (), SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, seed=row)
        )
        for row in range(rows)
    ]
    sampler.load(write_loads(PinnedBuffer(1 << 20, None), loads, sampler))
    return sampler


def _draws(rows: int) -> Draws:
    return Draws(
        slots=torch.arange(rows),
        positions=torch.full((rows,), 8),
        counts=tuple(rows if path is SamplingPath.TOP else 0 for path in SamplingPath),
        width=TOP_K,
    )
