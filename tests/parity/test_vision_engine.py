"""From the bytes of pictures to answers: every family in the whole engine, as `transformers`."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from runtime.engine.assembly import EngineOptions, assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.request import Delta, GenerationRequest, SamplingParams, StopRules
from runtime.vision.encoder import LocalEncoder
from tests.parity import (
    test_vision_gemma3,
    test_vision_gemma4,
    test_vision_idefics3,
    test_vision_internvl,
    test_vision_llama4,
    test_vision_llava,
    test_vision_llava_next,
    test_vision_mistral3,
    test_vision_mllama,
    test_vision_qwen3vl,
    test_vision_qwen25vl,
)
from tests.parity.test_engine import answers
from tests.parity.vision_agreement import CPU, Seeing, make_seeing

ANSWER = 12
ABOUTS = ("images in two turns", "text alone", "an image in the middle", "the same image twice")


@dataclass(frozen=True)
class Family:
    """`module`: the one that tests its logits."""

    module: ModuleType
    config: Callable[[], object]
    spelled: str
    flavour: str
    settings: dict[str, object]


FAMILIES = {
    "gemma3": Family(
        test_vision_gemma3, test_vision_gemma3.config, test_vision_gemma3.START, "llama.cpp", {}
    ),
    "gemma4": Family(
        test_vision_gemma4,
        lambda: test_vision_gemma4.CONFIGS["large"],
        test_vision_gemma4.PLACE,
        "llama.cpp",
        test_vision_gemma4.SETTINGS,
    ),
    "gemma4_small": Family(
        test_vision_gemma4,
        lambda: test_vision_gemma4.CONFIGS["small"],
        test_vision_gemma4.PLACE,
        "ollama",
        test_vision_gemma4.SETTINGS,
    ),
    "idefics3": Family(
        test_vision_idefics3,
        test_vision_idefics3.config,
        test_vision_idefics3.PLACE,
        "llama.cpp",
        test_vision_idefics3.SETTINGS,
    ),
    "internvl": Family(
        test_vision_internvl,
        test_vision_internvl.config,
        test_vision_internvl.PLACE + "\n",
        "llama.cpp",
        {"max_patches": 6},
    ),
    "llava": Family(
        test_vision_llava,
        test_vision_llava.config,
        test_vision_llava.PLACE + "\n",
        "llama.cpp",
        test_vision_llava.SETTINGS["padded"],
    ),
    "llava_next": Family(
        test_vision_llava_next,
        test_vision_llava_next.config,
        test_vision_llava_next.PLACE + "\n",
        "llama.cpp",
        test_vision_llava_next.SETTINGS,
    ),
    "llama4": Family(
        test_vision_llama4, test_vision_llama4.config, test_vision_llama4.WHOLE, "ollama", {}
    ),
    "mistral3": Family(
        test_vision_mistral3,
        test_vision_mistral3.config,
        test_vision_mistral3.PLACE,
        "llama.cpp",
        {},
    ),
    "mllama": Family(
        test_vision_mllama, test_vision_mllama.config, test_vision_mllama.PLACE, "ollama", {}
    ),
    "qwen25vl": Family(
        test_vision_qwen25vl,
        test_vision_qwen25vl.config,
        "<|vision_start|><|image_pad|><|vision_end|>",
        "ollama",
        {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
    ),
    "qwen3vl": Family(
        test_vision_qwen3vl,
        lambda: test_vision_qwen3vl.CONFIGS["dense"],
        "<|vision_start|><|image_pad|><|vision_end|>",
        "llama.cpp",
        {"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 30}},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request, tmp_path_factory) -> Seeing:
    family = FAMILIES[request.param]
    return make_seeing(
        family.config(),
        tmp_path_factory.mktemp("models"),
        family.module.expected,
        special=family.module.SPECIAL,
        spelled=family.spelled,
        flavour=family.flavour,
        settings=family.settings,
    )


@contextlib.contextmanager
def running(seeing: Seeing, **options) -> Iterator[AsyncEngine]:
    assert seeing.model.tower is not None
    settings = {"context_tokens": 256, "max_sequences": 6, "step_tokens": 16, **options}
    engine, _ = assemble(
        seeing.model.decoder,
        seeing.model.tokenizer.token_bytes,
        device=CPU,
        options=EngineOptions(**settings),
        encoder=LocalEncoder(seeing.model.tower, device=CPU),
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def request(seeing: Seeing, about: str, number: int = 0) -> GenerationRequest:
    prompt = seeing.prompt(about)
    return GenerationRequest(
        f"{about} {number}",
        prompt.tokens,
        StopRules(ANSWER),
        SamplingParams(temperature=0),
        spans=prompt.spans,
        images=prompt.images,
    )


def check_answer(seeing: Seeing, about: str, delta: Delta) -> None:
    """Each token is the most likely one to the twin, given those before."""
    assert len(delta.tokens) == ANSWER and delta.error is None
    prompt = seeing.prompt(about)
    whole = replace(prompt, tokens=(*prompt.tokens, *delta.tokens[:-1]))
    with torch.inference_mode():
        logits = seeing.expected(seeing.twin, whole)[-ANSWER:]
    assert list(delta.tokens) == logits.argmax(-1).tolist()


def test_requests_with_and_without_images_together_are_answered_as_by_transformers(seeing) -> None:
    with running(seeing) as engine:
        deltas = answers(engine, [request(seeing, about) for about in ABOUTS], together=True)
    statistics = engine.statistics()  # after closing: the loop has told its last
    for about, delta in zip(ABOUTS, deltas, strict=True):
        check_answer(seeing, about, delta)
    assert statistics.pages_owned == 0


def test_the_same_request_again_finds_what_was_computed_of_its_images(seeing) -> None:
    about = "images in two turns"
    with running(seeing, page_tokens=16) as engine:
        first, again = answers(
            engine, [request(seeing, about), request(seeing, about, 1)], together=False
        )
    assert first.tokens == again.tokens
    assert again.usage is not None and again.usage.cached_tokens > 0
    check_answer(seeing, about, again)
