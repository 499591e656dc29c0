"""When a draft model proposes, depending on acceptance, the times of both models' steps and
load."""

import random
from collections.abc import Callable, Mapping

import pytest

from runtime.engine.draft_proposals import DraftProposals
from runtime.engine.ngram_proposals import NGramProposals
from runtime.engine.sequence import Sequence
from runtime.engine.step_costs import StepCosts
from tests.unit.runtime.engine.test_speculation import MOST, Decoding, repeated

STEP = 10_000  # ns


def step(rows: int) -> int:
    """The rows of a step that are few take hardly any time of their own."""
    return STEP + 200 * rows


def fast(rows: int) -> int:
    return STEP // 10


class FakeDrafter:
    """Knows the texts; `right`: the probability of each token. A step takes `cost` ns."""

    def __init__(self, *, right: float, cost: Callable[[int], int]) -> None:
        self.costs = StepCosts()
        self.r, self.right, self.cost = random.Random(3), right, cost
        self.texts: Mapping[Sequence, list[int]] = {}
        self.time = self.drafts = 0

    def keep(self, running) -> None:
        pass

    def room(self, sequence: Sequence) -> int:
        return 1000

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        for number in range(max(wanted.values())):
            rows = sum(count > number for count in wanted.values())
            self.costs.observe(rows, self.cost(rows))
            self.time += self.cost(rows)
        self.drafts += len(wanted)
        return {sequence: self._tokens(sequence, n) for sequence, n in wanted.items()}

    def _tokens(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        begin = len(sequence.tokens)
        some = self.texts[sequence][begin : begin + count]
        return tuple(t if self.r.random() < self.right else t + 1 for t in some)


def unrelated(length: int = 1100) -> list[int]:
    """Nothing occurs twice."""
    r = random.Random(length)
    return [r.randrange(10**6) for _ in range(length)]


def decode(
    drafter: FakeDrafter,
    *texts: list[int],
    ngram: bool = False,
    drafts: DraftProposals | None = None,
    **options,
) -> Decoding:
    decoding = Decoding(*texts, cost=step, **options)
    speculation = decoding.speculation
    speculation._ngram = NGramProposals(most=MOST) if ngram else None
    speculation._drafts = drafts or DraftProposals(drafter, most=MOST)
    drafter.texts = decoding.texts
    return decoding.run()


def gain(drafter: FakeDrafter, *texts: list[int], **options) -> float:
    """The speed, compared with that of steps without drafts."""
    decoding = decode(drafter, *texts, **options)
    took = decoding.time + drafter.time
    alone = len(texts) / step(len(texts))
    return decoding.tokens / took / alone


def test_right_drafts_of_a_fast_model_pay() -> None:
    assert gain(FakeDrafter(right=1.0, cost=fast), unrelated()) > 3
    assert gain(FakeDrafter(right=0.8, cost=fast), unrelated()) > 1.8


def test_wrong_drafts_cost_little() -> None:
    for cost in (STEP // 10, STEP // 3, STEP):
        drafter = FakeDrafter(right=0.0, cost=lambda rows, cost=cost: cost)
        assert gain(drafter, unrelated()) > 0.97, cost
        assert drafter.drafts > 0


def test_a_draft_model_as_slow_as_the_model_is_hardly_used() -> None:
    drafter = FakeDrafter(right=1.0, cost=step)
    assert gain(drafter, unrelated()) > 0.97
    assert drafter.drafts < 40


def test_sequences_draft_together_where_one_among_them_would_not_pay() -> None:
    """A step of the draft model takes as long for one sequence as for six."""
    texts = [unrelated(1100 + n) for n in range(6)]
    slow = {"right": 0.9, "cost": lambda rows: int(0.3 * STEP)}
    assert gain(FakeDrafter(**slow), *texts, slots=40) > 1.4
    assert gain(FakeDrafter(**slow), *texts, slots=MOST - 1) > 0.97  # no room for so many rows


@pytest.mark.parametrize("depth", [2, 3])
def test_drafts_pay_although_steps_overlap(depth: int) -> None:
    texts = [unrelated(1100 + n) for n in range(3)]
    assert gain(FakeDrafter(right=0.9, cost=fast), *texts, slots=40, depth=depth) > 1.5


def test_repeated_text_is_proposed_before_drafts() -> None:
    drafter = FakeDrafter(right=1.0, cost=fast)
    decoding = decode(drafter, repeated(1100), ngram=True)
    assert decoding.scheduler.accepted_tokens > 800
    assert decoding.scheduler.drafted_tokens < 100
    decoding = decode(drafter, unrelated(), ngram=True)
    assert decoding.scheduler.drafted_tokens > 800


def test_sequences_draft_later_after_others_whose_drafts_did_not_pay() -> None:
    texts = [unrelated(400 + n) for n in range(30)]
    drafter = FakeDrafter(right=0.0, cost=lambda rows: STEP // 5)
    decode(drafter, *texts[:2], slots=1)
    first = drafter.drafts
    drafter = FakeDrafter(right=0.0, cost=lambda rows: STEP // 5)
    decoding = decode(drafter, *texts, slots=1)
    assert drafter.drafts < 6 * first
    assert decoding.scheduler.drafted_tokens < 100
    drafter.right = 1.0
    again = decode(drafter, *texts, slots=1, drafts=decoding.speculation._drafts)
    assert again.scheduler.accepted_drafts > 0.6 * again.tokens
