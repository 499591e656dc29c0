"""What the engine does for recurrent models alone; `test_engine.py` has the rest."""

import random

import pytest
import torch

from model_zoo.chat_model import ChatModel
from runtime.engine.request import GenerationRequest, Pooling, SamplingParams, StopRules
from tests.families.engine_runs import RECURRENT, answers, hybrid, running


@pytest.fixture(scope="module", params=RECURRENT.items(), ids="-".join)
def model(request, tmp_path_factory) -> ChatModel:
    return hybrid(*request.param, tmp_path_factory.mktemp("models"))[0]


def test_a_follow_up_is_computed_anew_and_right(model) -> None:
    """Of its prefix there is no state, so none of its pages may be taken for it."""
    greedy = SamplingParams(temperature=0)
    turn = GenerationRequest("a", tuple(range(50, 90)), StopRules(30), greedy)
    with running(model) as engine:
        [delta] = answers(engine, [turn], together=False)
        again = GenerationRequest("b", turn.prompt + delta.tokens[:20], StopRules(10), greedy)
        [rest] = answers(engine, [again], together=False)
    assert rest.usage is not None and rest.usage.cached_tokens == 0
    assert rest.tokens == delta.tokens[20:]


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_vectors_of_prompts_in_a_batch_are_those_alone(model, pooling) -> None:
    r = random.Random(5)
    prompts = [tuple(r.randrange(300) for _ in range(n)) for n in (3, 70, 31, 90, 12)]
    requests = [
        GenerationRequest(str(i), prompt, StopRules(1), pooling=pooling)
        for i, prompt in enumerate(prompts)
    ]
    with running(model, step_tokens=256) as engine:
        alone = answers(engine, requests, together=False)
    with running(model, depth=2) as engine:
        together = answers(engine, requests, together=True)
    for one, other in zip(together, alone, strict=True):
        vectors = (bytearray(delta.vector) for delta in (one, other))
        ours, theirs = (torch.frombuffer(vector, dtype=torch.float32) for vector in vectors)
        assert torch.allclose(ours, theirs, atol=1e-5)
