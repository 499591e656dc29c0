"""The kernels that draw tokens, interpreted, against the sampler's torch code, and their code."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.engine.request import SamplingParams
from runtime.kernels.draws import DrawnRows, draw_all, draw_all_twin, draw_top_twin
from runtime.kernels.random_numbers import uniforms
from runtime.kernels.triton import draws, thresholds
from runtime.worker import sampler
from tests.cuda.compiled import compile_all
from tests.cuda.fake_device import DEVICE, fake_cuda
from tests.unit.runtime.worker.test_sampler import sample, transformers_probabilities

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40, top_p=0.9, seed=3),
    SamplingParams(top_k=40, top_p=0.0, temperature=2.5, seed=4),
    SamplingParams(top_k=40, seed=3, dropped=20),
    SamplingParams(top_k=40, min_p=0.2, temperature=0.3, seed=-1),
    SamplingParams(top_k=256, top_p=1.0, temperature=3.0, seed=2**64 - 1),
    SamplingParams(top_k=7, top_p=0.5, min_p=0.01, temperature=1e-9),
    SamplingParams(top_k=0, top_p=0.5, seed=4),
    SamplingParams(top_k=0, top_p=0.98, temperature=2.5, seed=5),
    SamplingParams(top_k=0, top_p=0.0, temperature=2.5, seed=6),
    SamplingParams(top_k=0, top_p=0.999, min_p=0.05, temperature=1.5, seed=7),
    SamplingParams(top_k=257, top_p=1.0, temperature=8.0, seed=8),
    SamplingParams(top_k=290, top_p=0.99, temperature=20.0, dropped=3, seed=9),
    SamplingParams(top_k=0, top_p=1.0, temperature=2.0, seed=10),
    SamplingParams(top_k=0, top_p=1.0, min_p=0.01, temperature=3.0, seed=-11),
    SamplingParams(typical_p=0.9, seed=12),  # which no kernel draws
]
OF_ALL = PARAMS[8:-1]
CEILINGS = {"extent": 40, "weights": 112, "threshold": 128, "subtraction": 48}  # registers
INF = torch.inf


def both(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, params: list[SamplingParams], **options: object
) -> tuple[sampler.Drawn, sampler.Drawn]:
    """Drawn by the kernels and by torch."""
    monkeypatch.setattr(sampler, "draw_top", draws.draw_top)
    monkeypatch.setattr(sampler, "draw_all", thresholds.draw_all)
    kernels = sample(logits.clone(), params, **options)
    monkeypatch.setattr(sampler, "draw_top", draw_top_twin)
    monkeypatch.setattr(sampler, "draw_all", draw_all_twin)
    return kernels, sample(logits.clone(), params, **options)


@pytest.mark.parametrize("vocabulary", [300, 1100])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_those_of_the_twin(
    vocabulary: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "BLOCK", 512)
    monkeypatch.setattr(thresholds, "BLOCK", 256)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(len(PARAMS), vocabulary, generator=generator)
    positions = torch.randint(100, (len(logits),), generator=generator).tolist()
    logits = logits.round() if ties else logits
    kernels, torchs = both(monkeypatch, logits, PARAMS, positions=positions)
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


SPECIAL: dict[str, list[float]] = {
    "one is possible": [-INF] * 9 + [-5.0] + [-INF] * 90,
    "two are possible": [-INF] * 30 + [1.0, -INF, 0.5],
    "equal": [2.5] * 99,
    "zeros of both signs": [0.0, -0.0, 0.0, -0.0, -1.0],
    "near zero": [1e-45, 0.0, -1e-45, 1e-38, 2.0],
    "far apart": [3e38, -3e38, 3e38, 0.0],
    "one": [-7.0],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_logits_are_drawn_as_by_the_twin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "BLOCK", 64)
    logits = torch.tensor([SPECIAL[name]] * len(OF_ALL))
    kernels, torchs = both(monkeypatch, logits, OF_ALL)
    assert kernels.tokens.tolist() == torchs.tokens.tolist() and kernels.finite.all()


@pytest.mark.parametrize("temperature", [0.9, 1e4])
def test_buckets_with_many_tokens_are_searched_part_by_part(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few buckets, or with all logits but one in the same bucket."""
    monkeypatch.setattr(thresholds, "BLOCK", 256)
    monkeypatch.setattr(thresholds, "BUCKETS", 8)
    monkeypatch.setattr(thresholds, "TILE", 128)
    logits = torch.randn(len(OF_ALL), 290, generator=torch.Generator().manual_seed(5))
    logits[:, ::3] = logits[:, ::3].round()
    logits[:, 5] = -1e6
    params = [replace(each, temperature=temperature) for each in OF_ALL]
    kernels, torchs = both(monkeypatch, logits, params)
    assert kernels.tokens.tolist() == torchs.tokens.tolist()


def test_draws_among_all_tokens_follow_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is that of transformers, whose inverse is taken at the random number: in the
    order of logits, or, without top_k and top_p, in that of tokens."""
    monkeypatch.setattr(thresholds, "BLOCK", 256)
    params = [replace(each, seed=seed) for seed in range(3) for each in OF_ALL]
    logits = 3 * torch.randn(len(params), 330, generator=torch.Generator().manual_seed(2))
    places = torch.tensor([1 + each.dropped for each in params])
    noise = uniforms(torch.tensor([each.seed for each in params]), places)
    expected = []
    for row, each, chance in zip(logits, params, noise, strict=True):
        ordered = sampler.path_of(each, len(row)) is sampler.SamplingPath.SORTED
        ids = row.sort(descending=True, stable=True).indices if ordered else torch.arange(330)
        sums = transformers_probabilities(row, each)[ids].cumsum(0)
        expected.append(ids[torch.searchsorted(sums, chance * sums[-1], right=True)].item())
    kernels, _ = both(monkeypatch, logits, params)
    assert kernels.tokens.tolist() == expected and len(set(expected)) > 10


def test_a_row_alone_is_drawn_as_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(len(OF_ALL), 600, generator=torch.Generator().manual_seed(3))
    together, _ = both(monkeypatch, logits, OF_ALL)
    for row in (0, 4, len(OF_ALL) - 1):
        alone, _ = both(monkeypatch, logits[row : row + 1], OF_ALL[row : row + 1])
        assert alone.tokens.item() == together.tokens[row]


def test_draws_among_all_tokens_are_three_launches_that_a_graph_can_capture() -> None:
    rows, vocabulary = 5, 262_144
    with fake_cuda() as fake, torch.inference_mode():
        logits = torch.empty(rows, vocabulary, device=DEVICE)
        slots = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        floats = torch.empty(rows, sampler.FLOATS, device=DEVICE)
        ints = torch.empty(rows, sampler.INTS, dtype=torch.int64, device=DEVICE)
        history = torch.empty(rows, 64, dtype=torch.int32, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=None, capture_error_mode="thread_local")
        draw_all(DrawnRows(logits, slots, slots, floats, ints, history), ordered=3)
        graph.capture_end()
    assert fake.graphs == [graph]
    names = ["extent_kernel", "weight_kernel", "threshold_kernel"]
    assert [launch.name for launch in fake.graphs[0].launches] == names


def test_kernels_keep_tokens_in_registers() -> None:
    assert_draw_code(90)


def assert_draw_code(capability: int) -> None:
    code = compile_all("tests.cuda.draw_specimens", capability)
    for name, kernel in code.items():
        assert kernel.stack == 0, (name, kernel)
        assert kernel.registers <= CEILINGS.get(name, 224), (name, kernel)
        assert kernel.shared <= 64 << 10, (name, kernel)
    assert code["weights"].count("RED.E.ADD.64") or code["weights"].count("REDG.E.ADD.64")
    assert not code["weights"].count("ATOM")
    for name in CEILINGS:
        assert code[name].count("LDG.E.128"), (name, code[name].instructions)
