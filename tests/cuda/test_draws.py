"""The kernels that draw tokens, interpreted, against the sampler's torch code, and their code."""

import pytest
import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.kernels.draws import draw_top_twin
from runtime.kernels.triton import draws
from runtime.worker import sampler
from tests.cuda.compiled import CAPABILITIES, compile_all
from tests.unit.runtime.worker.test_sampler import sample

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40, top_p=0.9, seed=3),
    SamplingParams(top_k=40, seed=3, dropped=20),
    SamplingParams(top_k=40, min_p=0.2, temperature=0.3, seed=-1),
    SamplingParams(top_k=256, top_p=1.0, temperature=3.0, seed=2**64 - 1),
    SamplingParams(top_k=7, top_p=0.5, min_p=0.01, temperature=1e-9),
    SamplingParams(top_k=0, top_p=0.5, seed=4),  # which no kernel draws
]


def both(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, params: list[SamplingParams], **options: object
) -> tuple[sampler.Drawn, sampler.Drawn]:
    """Drawn by the kernels and by torch."""
    monkeypatch.setattr(sampler, "draw_top", draws.draw_top)
    kernels = sample(logits.clone(), params, **options)
    monkeypatch.setattr(sampler, "draw_top", draw_top_twin)
    return kernels, sample(logits.clone(), params, **options)


@pytest.mark.parametrize("vocabulary", [300, 1100])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_those_of_the_twin(
    vocabulary: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "BLOCK", 512)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(2 * len(PARAMS), vocabulary, generator=generator)
    positions = torch.randint(100, (len(logits),), generator=generator).tolist()
    logits = logits.round() if ties else logits
    kernels, torchs = both(monkeypatch, logits, PARAMS * 2, positions=positions)
    assert kernels.tokens.tolist() == torchs.tokens.tolist() and kernels.finite.all()


def test_tokens_of_one_slot_differ_by_position_as_those_of_the_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = torch.zeros(20, 100)
    params = [SamplingParams(top_k=50, seed=8)] * len(flat)
    kernels, torchs = both(monkeypatch, flat, params, positions=list(range(20)))
    assert kernels.tokens.tolist() == torchs.tokens.tolist()
    assert len(set(kernels.tokens.tolist())) > 10 and max(kernels.tokens.tolist()) < 50


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_reported(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2 * len(PARAMS), 300, generator=torch.Generator().manual_seed(1))
    logits[: len(PARAMS), 7] = bad
    if bad < 0:
        logits[: len(PARAMS)] = bad
    kernels, torchs = both(monkeypatch, logits, PARAMS * 2)
    assert kernels.finite.tolist() == torchs.finite.tolist()
    assert kernels.tokens[len(PARAMS) :].tolist() == torchs.tokens[len(PARAMS) :].tolist()
    assert ((kernels.tokens >= 0) & (kernels.tokens < 300)).all()


@pytest.mark.parametrize("capability", CAPABILITIES[::2])
def test_kernels_keep_tokens_in_registers(capability: int) -> None:
    code = compile_all("tests.cuda.draw_specimens", capability)
    for name, kernel in code.items():
        assert kernel.stack == 0, (name, kernel)
        assert kernel.registers <= 224 and kernel.shared <= 64 << 10, (name, kernel)
