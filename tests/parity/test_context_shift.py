"""Answers of 20 contexts: each token is the one that the model gives for what is kept.

The reference computes the context anew at each shift, without scheduler and runner: `transformers`,
or the decoder itself.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model_zoo.registry import load
from runtime.engine.request import ContextShift, GenerationRequest, SamplingParams, StopRules
from tests.checkout import DEMO_MODEL
from tests.families.agreement import random_tokens
from tests.families.engine_runs import CPU, answers, running
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import tiny_tokenizer

CONTEXT, KEEP, PROMPT = 20, 4, 9
DROPPED = 8  # half of the tokens after the first 4
TOLERANCE = 1e-3  # of logits, by which rounding may change the most likely token


def shifting(prompt: list[int], context: int) -> GenerationRequest:
    stop, greedy = StopRules(20 * context), SamplingParams(temperature=0)
    return GenerationRequest("a", tuple(prompt), stop, greedy, shift=ContextShift(context, KEEP))


def check_answer(
    logits: Callable[[list[int]], Tensor],
    prompt: list[int],
    answer: list[int],
    *,
    length: int,
    dropped: int,
) -> int:
    """The number of shifts; each token must be the most likely one after the context before it.

    `logits` of all tokens of a context, computed at once.
    """
    context, begin, shifts = list(prompt), 0, 0
    while begin < len(answer):
        if len(context) == length:
            del context[KEEP : KEEP + dropped]
            shifts += 1
        given = len(context)
        drawn = answer[begin : begin + length - given]
        context += drawn
        with torch.inference_mode():
            found = logits(context[:-1])[given - 1 :]
        below = found.amax(dim=1) - found[range(len(drawn)), drawn]
        assert below.max() <= TOLERANCE, f"after {begin} tokens and {shifts} shifts"
        begin += len(drawn)
    return shifts


@pytest.mark.parametrize("family", TEXT_MODELS)
def test_each_family_goes_on_from_what_is_kept(tmp_path, family: str) -> None:
    path = tmp_path / "tiny.gguf"
    twin, known = TEXT_MODELS[family].write(path), tiny_tokenizer().get_vocab_size()
    prompt = random_tokens(PROMPT, seed=2)
    model = load(path, device=CPU, dtype=torch.float32)
    with running(model, context_tokens=CONTEXT, max_sequences=1, page_tokens=4) as engine:
        [delta] = answers(engine, [shifting(prompt, CONTEXT)], together=False)
    statistics = engine.statistics()
    assert len(delta.tokens) == 20 * CONTEXT
    shifts = check_answer(
        lambda tokens: twin(torch.tensor([tokens])).logits[0, :, :known],
        prompt,
        list(delta.tokens),
        length=CONTEXT,
        dropped=DROPPED,
    )
    assert statistics.shifts_total == shifts > 40
    assert statistics.pages_owned == 0


def test_the_demo_model_goes_on_from_what_is_kept() -> None:
    model = load(DEMO_MODEL, device=CPU, dtype=torch.float32)
    prompt = list(model.tokenizer.encode("Tell me about the sea"))
    with running(model, context_tokens=120, max_sequences=1) as engine:
        [delta] = answers(engine, [shifting(prompt, 120)], together=False)
    assert len(delta.tokens) == 20 * 120
    shifts = check_answer(
        lambda tokens: PagedDecoder(model.decoder).feed({0: tokens}),
        prompt,
        list(delta.tokens),
        length=120,
        dropped=56,  # half of the tokens after the first 4 is 58; a multiple of 8
    )
    assert shifts == engine.statistics().shifts_total > 40
    assert engine.statistics().pages_owned == 0
