"""A fake runner without tensors: the next token is a function of all tokens before it."""

from collections.abc import Callable

from runtime.engine.request import Sampled
from runtime.engine.step_plan import StepPlan

VOCABULARY = 97


def next_token(tokens: list[int]) -> int:
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCABULARY


def answer(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class PretendRunner:
    """Executes steps in `collect`, as late as possible; `fault` is called before each step."""

    def __init__(self, fault: Callable[[], None] = lambda: None) -> None:
        self.slots: dict[int, list[int]] = {}
        self.fault = fault
        self.steps = 0

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, launched: StepPlan) -> tuple[Sampled | None, ...]:
        self.fault()
        self.steps += 1
        for load in launched.slot_loads:
            self.slots[load.slot] = list(load.tokens)
        results: list[Sampled | None] = []
        for chunk in launched.chunks:
            tokens, end = self.slots[chunk.slot], chunk.start + chunk.length
            assert end <= len(tokens)
            if chunk.samples:
                tokens[end:] = [next_token(tokens[:end])]
                results.append(Sampled(tokens[end], -1.0))
            else:
                results.append(None)
        return tuple(results)
