"""Results of steps are copied in one piece without changes."""

from collections.abc import Iterator

import pytest
import torch

from runtime.engine.request import (
    GenerationRequest,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk
from runtime.worker.input_preparer import StepLimits
from runtime.worker.prompt_scores import ScoredChunk, ScoredStep, TokenScores
from runtime.worker.sampler import Drawn
from runtime.worker.step_results import Launched, ResultCopier, outcomes, result_bytes
from tests.cuda.fake_device import DEVICE, fake_cuda

HIDDEN, LIMITS = 6, StepLimits(slots=4, step_tokens=8, context_tokens=16)


@pytest.fixture
def copier() -> Iterator[ResultCopier]:
    """From the host's memory: pinned memory and events alone are fake."""
    with fake_cuda():
        yield ResultCopier(LIMITS, hidden=HIDDEN, device=DEVICE)


def launched(seed: int, *, scored: int = 2, pooled: int = 1, alternatives: int = 3) -> Launched:
    """Three tokens, the first ones with log-probabilities, a vector, and scores of a prompt."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(2**40, shape, generator=draw)

    chunks = []
    for slot in range(4):
        sampling = SamplingParams(logprobs=alternatives if slot < scored else None)
        pooling = Pooling.MEAN if slot == 3 else None
        request = GenerationRequest(f"{slot}", (1, 2), StopRules(4), sampling, pooling=pooling)
        chunks.append(Chunk(Sequence(request, [1, 2]), 0, slot, 0, 2, (1, 2), False, True))
    finite = torch.tensor([True, seed % 2 == 0, True])
    top = scored, alternatives
    logprobs = TokenScores(numbers(scored), tokens(*top), numbers(*top)) if scored else None
    drawn = Drawn(tokens(3), finite, logprobs)
    parts = ScoredStep((4, 5), (ScoredChunk(2, (8, 9), 1),)) if scored else ScoredStep((), ())
    scores = TokenScores(numbers(2), tokens(2, 1), numbers(2, 1)) if scored else None
    pooling = (3,) if pooled else ()
    vectors = numbers(pooled, HIDDEN) if pooled else None
    return Launched(tuple(chunks), (0, 1, 2), drawn, {}, pooling, vectors, parts, scores)


@pytest.mark.parametrize(
    "counts",
    [{}, {"scored": 0}, {"pooled": 0}, {"scored": 0, "pooled": 0}, {"alternatives": 0}],
    ids=str,
)
def test_results_are_the_same_after_the_copy(counts: dict[str, int], copier: ResultCopier) -> None:
    steps = [launched(seed, **counts) for seed in range(5)]
    expected = [outcomes(step) for step in steps]
    assert len(set(expected)) == 5
    first, second, third = (copier.begin(step) for step in steps[:3])
    assert [copier.finish(each) for each in (first, second)] == expected[:2]
    fourth, fifth = (copier.begin(step) for step in steps[3:])
    assert [copier.finish(each) for each in (third, fourth, fifth)] == expected[2:]


def test_a_buffer_is_used_again_once_its_results_are_read(copier: ResultCopier) -> None:
    places = []
    for seed in range(6):
        step = copier.begin(launched(seed))
        assert step.copy is not None
        places.append(step.copy.buffer.data_ptr())
        copier.finish(step)
    assert len(set(places)) <= 2


def test_the_largest_step_fits(copier: ResultCopier) -> None:
    slots, rows, most = LIMITS.slots, LIMITS.step_tokens, 20
    ones, wide = torch.ones(slots), torch.ones(slots, most)
    drawn = Drawn(ones.long(), ones.bool(), TokenScores(ones, wide.long(), wide))
    scores = TokenScores(torch.ones(rows), torch.ones(rows, most).long(), torch.ones(rows, most))
    step = Launched((), (), drawn, {}, (), torch.ones(slots, HIDDEN), ScoredStep((), ()), scores)
    copied = copier.begin(step)
    assert copied.copy is not None
    assert len(copied.copy.buffer) == result_bytes(LIMITS, hidden=HIDDEN)
