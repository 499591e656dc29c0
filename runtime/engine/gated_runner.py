"""A runner on processors that also encode images, which pauses beside its longest steps."""

from contextlib import nullcontext
from typing import Any

from runtime.engine.request import Result
from runtime.engine.step_plan import Runner, StepPlan
from runtime.vision.step_gate import StepGate


class GatedRunner:
    """Closes the gate, which pauses encoding, while `runner.launch` computes a step with prompts
    and running streams."""

    def __init__(self, runner: Runner, gate: StepGate) -> None:
        self._runner, self._gate = runner, gate

    def launch(self, plan: StepPlan) -> Any:
        lengths = [chunk.length for chunk in plan.chunks]
        delays = min(lengths) == 1 < max(lengths)
        with self._gate.closed() if delays else nullcontext():
            return self._runner.launch(plan)

    def collect(self, launched: Any) -> tuple[Result, ...]:
        return self._runner.collect(launched)
