"""When tokens are proposed and how many, depending on acceptance, measured costs of rows and
load."""

import itertools
import random

import pytest

from runtime.engine.acceptance import LEAST_GAIN, LONGEST_PAUSE, Acceptance
from runtime.engine.ngram_proposals import NGramProposals
from runtime.engine.request import GenerationRequest, Sampled, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence
from runtime.engine.speculation import Speculation
from runtime.engine.step_costs import StepCosts
from runtime.engine.step_yield import ProposalCandidate, StepYield
from runtime.kv.cache_kinds import Full
from runtime.kv.cache_manager import KVCacheManager

MOST, DRAWS = 8, 16


class Decoding:
    """One engine's schedule without a device: each sequence gets the tokens of its `text`, and a
    step of n rows takes `cost(n)` ns."""

    def __init__(self, *texts: list[int], cost, depth: int = 1, slots: int = DRAWS) -> None:
        self.cost, self.depth = cost, depth
        self.ngram = NGramProposals(most=MOST)
        self.speculation = Speculation(
            draws=max(slots, MOST + 1), overlaps=depth > 1, ngram=self.ngram
        )
        manager = KVCacheManager([Full()], [4000], page_tokens=16)
        self.scheduler = Scheduler(
            manager, slots=slots, step_tokens=4096, speculation=self.speculation
        )
        self.texts: dict[Sequence, list[int]] = {}
        for number, text in enumerate(texts):
            request = GenerationRequest(f"{number}", tuple(text[:100]), StopRules(len(text) - 100))
            self.texts[self.scheduler.add(request)] = text
        self.lengths: list[int] = []  # proposed tokens of each decode step
        self.time = self.tokens = 0

    def run(self) -> "Decoding":
        flying: list = []
        while self.scheduler.running or self.scheduler.waiting:
            plan = self.scheduler.plan()
            if plan is not None:
                flying.append(plan)
            if plan is None or len(flying) >= self.depth:
                self._retire(flying.pop(0))
        return self

    def _retire(self, plan) -> None:
        rows = sum(chunk.length for chunk in plan.chunks)
        if rows == len(plan.chunks):
            self.lengths.append(len(plan.proposals))
            self.time += self.cost(rows)
        self.speculation.observe(plan, self.cost(rows))
        results = tuple(
            Sampled(self.texts[c.sequence][c.start + c.length]) if c.samples else None
            for c in plan.chunks
        )
        for advance in self.scheduler.retire(plan, results):
            self.tokens += 1
            if advance.finish is not None:
                expected = self.texts[advance.sequence]
                assert advance.sequence.tokens == expected

    @property
    def speed(self) -> float:
        return self.tokens / self.time


def repeated(length: int = 600) -> list[int]:
    r = random.Random(1)
    return [r.randrange(1000) for _ in range(60)] * (length // 60)


def unrelated(seed: int = 2, length: int = 600, letters: int = 4) -> list[int]:
    """Runs of three tokens recur, and what follows them does not."""
    r = random.Random(seed)
    return [r.randrange(letters) for _ in range(length)]


def nearly_free(rows: int) -> int:
    return 1000 + 20 * rows


def test_copied_text_takes_few_steps() -> None:
    decoding = Decoding(repeated(), cost=nearly_free).run()
    assert len(decoding.lengths) < 500 / 6
    assert max(decoding.lengths) == MOST


@pytest.mark.parametrize("depth", [2, 3])
def test_copied_text_takes_few_steps_although_steps_overlap(depth: int) -> None:
    decoding = Decoding(repeated(), cost=nearly_free, depth=depth).run()
    assert len(decoding.lengths) < 500 / 6


def test_text_that_cannot_be_foretold_is_nearly_as_fast_as_without_proposals() -> None:
    for seed in range(5):
        decoding = Decoding(unrelated(seed, 1500), cost=lambda rows: 1000 + 300 * rows).run()
        assert sum(decoding.lengths) > 0
        assert decoding.speed > 0.97 / 1300


def test_proposals_end_while_they_would_be_wrong() -> None:
    text = unrelated(length=3000, letters=8)
    lengths = Decoding(text, cost=lambda rows: 1000 + 300 * rows).run().lengths
    assert 0 < sum(length > 0 for length in lengths) < 0.03 * len(lengths)


def copied(seed: int, *, change: float, length: int = 600) -> list[int]:
    """One passage again and again; each token is another one with the probability `change`."""
    r = random.Random(seed)
    passage = [r.randrange(1000) for _ in range(100)]
    text = list(passage)
    while len(text) < length:
        text += [token if r.random() >= change else r.randrange(1000, 2000) for token in passage]
    return text[:length]


@pytest.mark.parametrize("change, gain", [(0, 1.9), (0.05, 1.4), (0.12, 1.15)])
def test_all_sequences_that_copy_propose(change: float, gain: float) -> None:
    """A row costs a twelfth of a step with one row."""

    def cost(rows: int) -> int:
        return 12_500 + 1_500 * rows

    decoding = Decoding(*(copied(seed, change=change) for seed in range(4)), cost=cost).run()
    assert decoding.speed > gain * 4 / cost(4)


def test_accepted_proposals_grow_by_doubling() -> None:
    acceptance, tokens, lengths = Acceptance(), [7] * 64, [0]
    while lengths[-1] < 12:
        acceptance.propose(tuple(tokens[: acceptance.most]), sum(lengths))
        lengths.append(acceptance.most)
        assert acceptance.review(tokens, 12)
    assert lengths[1:] == [2, 4, 8, 12]


def drawn_candidates(r: random.Random, count: int) -> list[ProposalCandidate]:
    chances = [r.choice((0.0, 0.3, 0.6, 0.9, 1.0)) for _ in range(count)]
    return [
        ProposalCandidate(None, Acceptance(tried=1.0, accepted=chance), r.randint(1, 4))
        for chance in chances
    ]


def test_rows_are_divided_for_the_most_tokens_per_unit_of_time() -> None:
    """Against all divisions."""
    r, divided = random.Random(3), 0
    for _ in range(200):
        costs, row_ns = StepCosts(), r.choice((20, 100, 300))
        for rows in [*range(1, 16)] * 2:
            costs.observe(rows, 1000 + row_ns * rows)
        offers = drawn_candidates(r, 3)
        step = StepYield(costs, rows=4, tokens=4, room=r.randint(1, 12))

        def rate(counts: tuple[int, ...], step=step, offers=offers) -> float:
            pairs = zip(offers, counts, strict=True)
            tokens = step.tokens + sum(bid.acceptance.expected(n) - 1 for bid, n in pairs)
            return tokens / step.costs.of(step.rows + sum(counts))

        possible = itertools.product(*(range(bid.most + 1) for bid in offers))
        best = max(rate(counts) for counts in possible if sum(counts) <= step.room)
        counts = step.divided(offers)
        assert sum(counts) <= step.room
        if best >= LEAST_GAIN * step.rate:
            divided += 1
            assert rate(tuple(counts)) == pytest.approx(best, rel=1e-6)
        else:
            assert not any(counts)
    assert 100 < divided < 190


def test_the_steps_of_a_single_stream_do_not_overlap() -> None:
    costs = StepCosts()
    for rows in [*range(1, 16)] * 2:
        costs.observe(rows, 1000 + 20 * rows)
    unsure = ProposalCandidate(None, Acceptance(tried=1.0, accepted=0.5), 8)
    for rows, proposes in ((1, True), (2, False)):
        step = StepYield(costs, rows=rows, tokens=rows, room=8, overlaps=True)
        assert any(step.divided([unsure])) == proposes


def test_a_proposal_takes_rows_and_adds_the_tokens_that_are_expected_of_it() -> None:
    step = StepYield(StepCosts(), rows=4, tokens=4, room=8)
    step.take(ProposalCandidate(None, Acceptance(tried=1.0, accepted=0.5), 8), 2)
    assert (step.rows, step.room, step.tokens) == (6, 6, 4 + 0.5 + 0.25)


def waiting_to_propose(costs: StepCosts) -> tuple[NGramProposals, Sequence, StepYield]:
    """A stream that repeats itself; its last token is on the device only."""
    text, ngram = repeated(120), NGramProposals(most=MOST)
    sequence = Sequence(GenerationRequest("a", tuple(text), StopRules(50)), text)
    sequence.launched, sequence.pending = len(text), 1
    step = StepYield(costs, rows=1, tokens=1, room=8, overlaps=True)
    ngram.propose([sequence], step)
    return ngram, sequence, step


def test_a_sequence_that_waited_to_propose_in_vain_counts_as_rejected() -> None:
    ngram, sequence, step = waiting_to_propose(StepCosts())
    assert sequence.waits_to_propose and (step.rows, step.room) == (1, 8)
    sequence.append(Sampled(5000))
    sequence.pending = 0
    before = ngram._records[sequence].acceptance.chance
    ngram.propose([sequence], step)
    assert not sequence.proposed and ngram._records[sequence].acceptance.chance < before


def test_no_sequence_waits_for_a_proposal_that_would_not_pay() -> None:
    costs = StepCosts()
    for rows in [*range(1, 16)] * 2:
        costs.observe(rows, 1000 + 2000 * rows)
    _, sequence, step = waiting_to_propose(costs)
    assert step.could_gain(MOST) and not sequence.waits_to_propose


@pytest.mark.parametrize("room", [3, 8, 100])
def test_overlapping_steps_gain_from_what_is_proposed(room: int) -> None:
    """A sequence that proposes takes part in every other step only."""
    costs = StepCosts()
    for rows in [*range(1, 16)] * 2:
        costs.observe(rows, 1000 + 20 * rows)
    step = StepYield(costs, rows=4, tokens=4, room=room, overlaps=True)
    sure, unsure = (
        ProposalCandidate(None, Acceptance(tried=1.0, accepted=chance), 8) for chance in (1.0, 0.3)
    )
    first, second = step.divided([sure, unsure])
    assert second == 0 and first == min(room, 8)


def test_proposals_return_when_the_text_can_be_foretold_again() -> None:
    text = unrelated(length=1200)
    text += repeated(1800)
    lengths = Decoding(text, cost=nearly_free).run().lengths
    assert sum(length == MOST for length in lengths) > 1500 / 9 / 2


def test_nothing_is_proposed_where_rows_are_not_cheaper_together() -> None:
    lengths = Decoding(repeated(), cost=lambda rows: 1000 * rows).run().lengths
    assert sum(lengths) < 60


def test_many_running_sequences_propose_nothing_once_rows_are_not_free() -> None:
    """Up to eight rows take no time of their own."""

    def cost(rows: int) -> int:
        return 1000 + 1000 * max(0, rows - 8)

    crowd = Decoding(*(repeated() for _ in range(12)), cost=cost).run()
    assert sum(crowd.lengths) < 0.1 * crowd.tokens
    one = Decoding(repeated(), cost=cost).run()
    assert sum(length >= 6 for length in one.lengths) > 40


def test_sequences_that_wait_to_be_admitted_have_their_rows() -> None:
    decoding = Decoding(*(repeated() for _ in range(20)), cost=nearly_free, slots=4)
    decoding.run()
    assert decoding.tokens == 20 * 500


def test_costs_follow_what_is_measured() -> None:
    costs, r = StepCosts(), random.Random(1)
    for rows in range(1, 13):
        costs.observe(rows, 1e6)  # what prepares for later steps
    for _ in range(200):
        rows = r.randint(1, 12)
        costs.observe(rows, 500 + 100 * rows + r.randrange(-20, 20))
    assert costs.of(1) == pytest.approx(600, rel=0.1)
    assert costs.of(9) == pytest.approx(1400, rel=0.1)
    for _ in range(300):
        costs.observe(1, 900)
    assert costs.of(1) == pytest.approx(900, rel=0.05)
    costs.observe(1, 1e9)  # the machine had something else to do
    assert costs.of(1) < 1000


def test_records_end_with_their_sequences() -> None:
    decoding = Decoding(repeated(), cost=nearly_free).run()
    assert len(decoding.ngram._records) == 1
    decoding.texts.clear()
    assert len(decoding.ngram._records) == 0
    assert LONGEST_PAUSE < 10_000
