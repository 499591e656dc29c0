"""Which steps an engine computes before any other."""

from runtime.worker.input_preparer import StepLimits
from runtime.worker.sampler import SamplingPath, path_examples, path_of
from runtime.worker.scratch_steps import ScratchModel, scratch_plan, scratch_steps

LIMITS = StepLimits(slots=300, step_tokens=2048, context_tokens=512)


def test_the_largest_step_comes_first_and_the_largest_recorded_ones_before_the_others():
    most = {"most_recorded": 256, "most_span": 512, "compiles": False}
    steps = [(s.rows, s.draws) for s in scratch_steps(LIMITS, **most)]
    assert steps == [(2048, 300), (512, 1), (256, 256), (1, 1)]
    few = StepLimits(slots=5, step_tokens=64, context_tokens=512)
    steps = [(s.rows, s.draws) for s in scratch_steps(few, **most | {"most_span": 0})]
    assert steps == [(64, 5), (5, 5), (1, 1)]


def test_steps_that_compile_have_each_size_alone_and_with_a_prompt_and_each_way_of_drawing():
    steps = list(scratch_steps(LIMITS, most_recorded=256, most_span=0, compiles=True))
    decode = [step.rows for step in steps if step.rows == step.draws > 1]
    assert decode == [256, 300, 128, 64, 32, 16, 8, 4, 2]
    mixed = [(step.rows, step.draws) for step in steps if step.rows > step.draws][1:]
    assert mixed[:4] == [(2048, 300), (1024, 300), (512, 256), (256, 128)]
    assert mixed[-2:] == [(8, 4), (4, 2)] and len(mixed) == 10
    drawn = [step.sampling for step in steps if step.rows == 1]
    assert {path_of(sampling, 1000) for sampling in drawn} == {*SamplingPath} - {SamplingPath.CHAIN}
    assert set(path_examples()) <= set(drawn)


def test_without_a_second_slot_prompts_are_alone():
    limits = StepLimits(slots=1, step_tokens=8, context_tokens=64, proposed_tokens=3)
    steps = list(scratch_steps(limits, most_recorded=4, most_span=0, compiles=True))
    assert [(s.rows, s.draws) for s in steps[:6]] == [
        (8, 4),
        (4, 4),
        (2, 2),
        (1, 1),
        (8, 1),
        (4, 1),
    ]
    plan = scratch_plan(steps[0], limits, ScratchModel(causal=True, generates=True))
    assert [chunk.length for chunk in plan.chunks] == [5, 1, 1, 1]
    assert [load.slot for load in plan.slot_loads] == [0]
