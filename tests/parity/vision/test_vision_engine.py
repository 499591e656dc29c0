"""Answers about images of every vision family in the whole engine, as `transformers` gives them."""

from dataclasses import replace

import pytest
import torch

from runtime.engine.request import Delta, GenerationRequest, SamplingParams, StopRules
from runtime.vision.encoder import LocalEncoder
from tests.families import engine_runs
from tests.families.engine_runs import answers
from tests.families.vision_agreement import CPU, VisionPair
from tests.families.vision_families import VISION_MODELS

ANSWER = 12
CONVERSATIONS = (
    "images in two turns",
    "text alone",
    "an image in the middle",
    "the same image twice",
)


FAMILIES = [name for name, row in VISION_MODELS.items() if row.engine_flavour]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory) -> VisionPair:
    row = VISION_MODELS[request.param]
    return row.write(tmp_path_factory.mktemp("models"), flavour=row.engine_flavour)


def running(pair: VisionPair, **options):
    assert pair.model.tower is not None
    encoder = LocalEncoder(pair.model.tower, device=CPU, weight_bytes=0)
    sizes = {"context_tokens": 320, "max_sequences": 6, "step_tokens": 16, **options}
    return engine_runs.running(pair.model, encoder=encoder, **sizes)


def request(pair: VisionPair, name: str, number: int = 0) -> GenerationRequest:
    prompt = pair.prompt(name)
    return GenerationRequest(
        f"{name} {number}",
        prompt.tokens,
        StopRules(ANSWER),
        SamplingParams(temperature=0),
        spans=prompt.spans,
        images=prompt.images,
    )


def check_answer(pair: VisionPair, name: str, delta: Delta) -> None:
    """Each token is the twin's most likely one after those before it."""
    assert len(delta.tokens) == ANSWER and delta.error is None
    prompt = pair.prompt(name)
    whole = replace(prompt, tokens=(*prompt.tokens, *delta.tokens[:-1]))
    with torch.inference_mode():
        logits = pair.expected(pair.twin, whole)[-ANSWER:]
    assert list(delta.tokens) == logits.argmax(-1).tolist()


def test_answers_with_and_without_images_are_those_of_transformers(pair) -> None:
    with running(pair) as engine:
        deltas = answers(engine, [request(pair, name) for name in CONVERSATIONS], together=True)
    statistics = engine.statistics()  # the closed loop changes them no more
    for name, delta in zip(CONVERSATIONS, deltas, strict=True):
        check_answer(pair, name, delta)
    assert statistics.pages_owned == 0


def test_a_repeated_request_finds_cached_pages_of_its_images(pair) -> None:
    name = "images in two turns"
    with running(pair, page_tokens=16) as engine:
        first, again = answers(
            engine, [request(pair, name), request(pair, name, 1)], together=False
        )
    assert first.tokens == again.tokens
    assert again.usage is not None and again.usage.cached_tokens > 0
    check_answer(pair, name, again)
