"""The masks of grammars, as a step on a CUDA device finds them."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import takewhile

import pytest
import torch

from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk
from runtime.worker.mask_worker import MaskWorker
from tests.cuda.computing_device import ComputingCuda
from tests.cuda.fake_device import DEVICE, fake_cuda


@dataclass(frozen=True)
class Only:
    """Allows one token, again and again."""

    token: int
    free: int = 0

    def matcher(self) -> "Only":
        return self

    def accept(self, token: int) -> None:
        assert token == self.token

    def allowed(self, mask: memoryview) -> None:
        mask[self.token // 32] = 1 << self.token % 32

    def acceptable(self, tokens: Tokens[int]) -> int:
        return sum(1 for _ in takewhile(self.token.__eq__, tokens))

    def look_ahead(self, tokens: Tokens[int], masks: Tokens[memoryview]) -> None:
        for mask in masks:
            self.allowed(mask)


def sequence_of(grammar: Only) -> Sequence:
    greedy = SamplingParams(temperature=0)
    return Sequence(GenerationRequest("a", (1,), StopRules(2), greedy, grammar=grammar), [1])


@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("count", [1, 8])
def test_all_words_of_the_masks_are_uploaded(rows: int, count: int) -> None:
    """Also those of the last tokens of the last mask, with an even and an odd number of rows."""
    vocabulary, width = 150, 160  # padded to words
    tokens = [vocabulary - 1 - 20 * row for row in range(count)]
    chunks = {
        row: Chunk(sequence_of(Only(token)), 0, row, 0, 1, (1,), feedback=False, samples=True)
        for row, token in enumerate(tokens)
    }
    with fake_cuda(ComputingCuda()) as fake, torch.inference_mode():
        worker = MaskWorker(rows=rows, vocab_size=vocabulary, device=DEVICE, waits=True)
        pending = worker.begin(chunks, step_chunks=count)
        assert pending is not None
        masks, unmasked = pending.uploaded()
        assert masks.count == count and not unmasked
        fake.complete()
        words = masks.words._elements[:count].unsqueeze(2)
        bits = (words >> torch.arange(32)) & 1
        allowed = bits.reshape(count, width).nonzero()
    assert allowed.tolist() == [[row, token] for row, token in enumerate(tokens)]
