"""Encoding an image pauses during steps with both prompts and streams, and only then."""

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from runtime.engine.gated_runner import GatedRunner
from runtime.engine.request import GenerationRequest, StopRules
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk, StepPlan
from runtime.vision.encoder import LocalEncoder, Pause
from runtime.vision.step_gate import StepGate
from tests.patience import HANG_S
from tests.unit.runtime.vision.fake_tower import PretendTower, picture

CPU = torch.device("cpu")
MOMENT_S = 0.2  # in which a thread that does not wait goes on


class PartTower(PretendTower):
    """Makes each image in parts; the test is told of each that has been computed."""

    parts = 3

    def __init__(self) -> None:
        super().__init__()
        self.computed = threading.Semaphore(0)

    def encode(self, pixels: torch.Tensor, grid: tuple[int, int], pause: Pause) -> torch.Tensor:
        for _ in range(self.parts):
            pause()
            self.computed.release()
        return super().encode(pixels, grid)


@pytest.fixture
def encoder() -> Iterator[LocalEncoder]:
    with closing(LocalEncoder(PartTower(), device=CPU, weight_bytes=0)) as made:
        yield made


def plan_of(*lengths: int) -> StepPlan:
    request = GenerationRequest("a", (1,) * 9, StopRules(1))
    sequence = Sequence(request, [1] * 9)
    known = (1,) * 9
    chunks = [Chunk(sequence, 0, 0, 0, n, known[:n], False, False) for n in lengths]
    return StepPlan(tuple(chunks), (), ())


class Launches:
    """A runner whose `launch` calls `during`."""

    def __init__(self, during: Any) -> None:
        self.during = during

    def launch(self, plan: StepPlan) -> str:
        self.during()
        return "launched"

    def collect(self, launched: str) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("lengths", "waits"), [((1, 4), True), ((1, 1), False), ((5, 4), False), ((1,), False)]
)
def test_only_steps_with_prompts_and_streams_make_an_image_wait(
    encoder: LocalEncoder, lengths: tuple[int, ...], waits: bool
) -> None:
    tower = encoder._tower

    def submit() -> None:
        features.append(encoder.submit(picture(1)))
        patience = MOMENT_S if waits else HANG_S
        assert tower.computed.acquire(timeout=patience) is not waits

    features: list[Any] = []
    runner = GatedRunner(Launches(submit), encoder.gate)
    assert runner.launch(plan_of(*lengths)) == "launched"
    features[0].result(HANG_S)
    assert tower.encoded == [1]


def test_a_step_that_fails_opens_the_gate(encoder: LocalEncoder) -> None:
    def fail() -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError):
        GatedRunner(Launches(fail), encoder.gate).launch(plan_of(1, 4))
    encoder.submit(picture(1)).result(HANG_S)


def test_an_image_computes_for_as_long_as_it_has_paused() -> None:
    """Beside prompts without end."""
    now = 0.0
    paused: list[float] = []

    class Opened:
        """Each wait takes three seconds."""

        def is_set(self) -> bool:
            return False

        def wait(self) -> None:
            nonlocal now
            paused.append(now)
            now += 3.0

    gate = StepGate(lambda: now)
    gate._open = Opened()
    for _ in range(9):  # parts of a second each
        gate.pause()
        now += 1.0
    assert paused == [0.0, 6.0, 12.0]
