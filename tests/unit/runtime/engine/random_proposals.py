"""Random proposals of any length, right or wrong, for every sequence that may have proposals."""

import random
from collections.abc import Callable, Sequence

from runtime.engine.request import GenerationRequest
from runtime.engine.sequence import Sequence as Running
from runtime.engine.speculation import Speculation
from runtime.engine.step_plan import StepPlan


class RandomProposals(Speculation):
    """`right`: the answer to a request, of which each is replaced with probability `wrong`.
    `draws`: rows of a step that may draw."""

    def __init__(
        self,
        r: random.Random,
        *,
        draws: int,
        right: Callable[[GenerationRequest], Sequence[int]],
        wrong: float = 0.2,
    ) -> None:
        self.r, self.draws, self.right, self.wrong = r, draws, right, wrong

    def observe(self, plan: StepPlan, duration_ns: int) -> None:
        pass

    def propose(self, running: Sequence[Running], *, joining: int) -> None:
        room = self.draws - len(running) - joining
        for sequence in running:
            sequence.proposed, sequence.waits_to_propose = (), False
            if not sequence.may_propose or self.r.random() < 0.2:
                continue
            if sequence.pending:
                sequence.waits_to_propose = self.r.random() < 0.7
                continue
            begin = len(sequence.tokens)
            most = max(0, min(room, self.r.randint(0, 6), sequence.most_tokens - begin - 1))
            answered = sequence.answered
            tokens = self.right(sequence.request)[answered : answered + most]
            sequence.proposed = tuple(
                max(t, 2) - 1 if self.r.random() < self.wrong else t for t in tokens
            )
            room -= len(sequence.proposed)
