"""Answers that are longer than many contexts: each token is the model's for the kept context.

The references use neither scheduler nor runner nor moved pages. They recompute the context at each
shift, by `transformers` or the decoder itself, or drop positions of one cache and rotate its keys.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from model_zoo.registry import load
from runtime.engine.context_shift import ContextCut
from runtime.engine.request import ContextShift, GenerationRequest, SamplingParams, StopRules
from runtime.kv.cache_types import CacheType
from runtime.kv.page_shift import can_move
from runtime.worker.model import DecoderModel
from tests.checkout import DEMO_MODEL
from tests.families.agreement import random_tokens, rotated
from tests.families.engine_runs import CPU, answers, running
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import DIVERSE, TEXT_MODELS
from tests.tiny_models import tiny_tokenizer

CONTEXT, KEEP, PROMPT = 20, 4, 9
DROPPED = 8  # half of the tokens after the first 4
CONTEXTS = 3  # in an answer, each of which shifts several times
TOLERANCE = 1e-3  # of logits, by which rounding may change the most likely token


def shifting(prompt: list[int], context: int, *, count: int | None = None) -> GenerationRequest:
    stop, greedy = StopRules(count or CONTEXTS * context), SamplingParams(temperature=0)
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


def check_moving_answer(
    decoder: DecoderModel,
    type: CacheType,
    prompt: list[int],
    answer: list[int],
    *,
    length: int,
    dropped: int,
) -> int:
    """The same with one contiguous cache, whose keys are rotated at each shift."""
    paged, rotations = PagedDecoder(decoder, slots=1, type=type), decoder.key_rotations
    assert rotations is not None

    def move(layer: int, keys: Tensor) -> Tensor:
        rotation = rotations[layer]
        return keys if rotation is None else rotated(keys, rotation, -dropped)

    todo, begin, cached, shifts = list(prompt), 0, 0, 0
    while True:
        cached += len(todo)
        below = [paged.feed({0: todo}, outputs=[len(todo) - 1])]
        drawn = answer[begin : begin + length - cached]
        begin += len(drawn)
        below += [paged.feed({0: [token]}) for token in drawn[:-1]]
        cached += len(drawn) - 1
        found = torch.cat(below)
        gaps = found.amax(dim=1) - found[range(len(drawn)), drawn]
        assert gaps.max() <= TOLERANCE, f"after {begin} tokens and {shifts} shifts"
        if begin == len(answer):
            return shifts
        paged.drop(0, KEEP, KEEP + dropped, move)
        todo, cached, shifts = drawn[-1:], cached - dropped, shifts + 1


@pytest.mark.parametrize("family", DIVERSE)
def test_a_family_continues_from_a_recomputed_context(tmp_path, family: str) -> None:
    path = tmp_path / "tiny.gguf"
    twin, known = TEXT_MODELS[family].write(path), tiny_tokenizer().get_vocab_size()
    prompt = random_tokens(PROMPT, seed=2)
    model = load(path, device=CPU, dtype=torch.float32)
    # The tokens that leave do not fill a page, so none can move.
    with running(model, context_tokens=CONTEXT, max_sequences=1, page_tokens=16) as engine:
        [delta] = answers(engine, [shifting(prompt, CONTEXT)], together=False)
    statistics = engine.statistics()
    assert len(delta.tokens) == CONTEXTS * CONTEXT
    shifts = check_answer(
        lambda tokens: twin(torch.tensor([tokens])).logits[0, :, :known],
        prompt,
        list(delta.tokens),
        length=CONTEXT,
        dropped=DROPPED,
    )
    assert statistics.shifts_total == shifts > 2 * CONTEXTS
    assert statistics.pages_owned == 0


# Recurrent states, chunks, images, learned positions.
STAYING = {
    "falcon-h1",
    "granitehybrid",
    "kimi-linear",
    "lfm2",
    "mamba",
    "nemotron_h_moe",
    "qwen35moe",
    "qwen4exp",
    "rwkv7",
    "llama4",
    "mllama",
    "gpt2",
}
CASES = [
    *((family, "plain", CacheType.FLOAT32) for family in DIVERSE),
    ("phi3", "partial_rotation", CacheType.FLOAT16),
    ("phi3", "window", CacheType.FLOAT16),
    ("deepseek2", "plain", CacheType.FLOAT16),
    ("glm-dsa", "deepseek_v32", CacheType.FLOAT32),
    ("llama", "plain", CacheType.FP8),
]


@pytest.mark.parametrize(("family", "config", "type"), CASES)
def test_cached_pages_move_where_the_family_allows_it(
    tmp_path, family: str, config: str, type: CacheType
) -> None:
    path = tmp_path / "tiny.gguf"
    # The second is a chunk of llama4, which could move by that.
    length, dropped = (60, 28) if family == "llama4" else (36, 16)
    TEXT_MODELS[family].write(path, config)
    model = load(path, device=CPU, dtype=torch.float32)
    kinds = [cache.kind for cache in model.decoder.cache_layers]
    moves = model.decoder.key_rotations is not None and can_move(
        kinds, ContextCut(KEEP, KEEP + dropped), length - 1, page_tokens=4
    )
    assert moves == (family not in STAYING)
    if not moves:
        return  # such contexts are recomputed, as above
    prompt = random_tokens(PROMPT, seed=2)
    options = {"max_sequences": 1, "page_tokens": 4, "kv_dtype": type}
    with running(model, context_tokens=length, **options) as engine:
        [delta] = answers(engine, [shifting(prompt, length, count=2 * length)], together=False)
    answer = list(delta.tokens)
    shifts = check_moving_answer(
        model.decoder, type, prompt, answer, length=length, dropped=dropped
    )
    assert shifts == engine.statistics().shifts_total > 2
    assert engine.statistics().pages_owned == 0


@pytest.mark.parametrize("page_tokens", [8, 16])
def test_the_demo_model_continues_from_the_kept_context(page_tokens: int) -> None:
    model, dropped = load(DEMO_MODEL, device=CPU, dtype=torch.float32), 56
    prompt = list(model.tokenizer.encode("Tell me about the sea"))
    options = {"context_tokens": 120, "max_sequences": 1, "page_tokens": page_tokens}
    with running(model, **options) as engine:
        [delta] = answers(engine, [shifting(prompt, 120)], together=False)
    answer = list(delta.tokens)
    assert len(answer) == CONTEXTS * 120
    if dropped % page_tokens:
        logits = partial(_at_once, model.decoder)
        shifts = check_answer(logits, prompt, answer, length=120, dropped=dropped)
    else:
        decoder, type = model.decoder, CacheType.FLOAT32
        shifts = check_moving_answer(decoder, type, prompt, answer, length=120, dropped=dropped)
    assert shifts == engine.statistics().shifts_total >= 2 * CONTEXTS - 1
    assert engine.statistics().pages_owned == 0


def _at_once(decoder: DecoderModel, tokens: list[int]) -> Tensor:
    return PagedDecoder(decoder).feed({0: tokens})
