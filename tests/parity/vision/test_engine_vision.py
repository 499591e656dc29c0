"""The whole engine with images in prompts, alone and in batches, against `transformers`."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from model_zoo.registry import load
from runtime.engine.context_shift import cut_of
from runtime.engine.request import ContextShift, GenerationRequest, SamplingParams, StopRules
from runtime.errors import ConfigurationError, DoesNotFitError, RequestError
from runtime.vision.encoder import LocalEncoder
from runtime.worker.input_preparer import StepLimits
from tests.families import engine_runs
from tests.families.engine_runs import answers
from tests.families.image_rows import OPTIONS, tiny_config
from tests.parity.vision.image_text_models import (
    GRIDS,
    HIDDEN,
    LARGEST,
    MODELS,
    ImageTextModel,
    mllama,
)
from tests.tiny_models import write_tiny
from tests.unit.runtime.vision.fake_tower import PretendTower

CPU = torch.device("cpu")
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory) -> ImageTextModel:
    return MODELS[request.param](tmp_path_factory.mktemp("models"))


def running(tiny: ImageTextModel, tower: PretendTower | None = None, **options):
    encoder = LocalEncoder(tower or tiny.tower(), device=CPU, weight_bytes=0)
    sizes = {"max_sequences": 6, "step_tokens": 16, **options}
    return engine_runs.running(tiny.model, encoder=encoder, **sizes)


def about(tiny: ImageTextModel, name: str, text: list[int], places: dict[int, int], **more):
    """`places`: the image at each position of the text; the position of its length is its end."""
    prompt, spans = [], []
    for position, token in enumerate([*text, None]):
        if position in places:
            spans.append(tiny.span(len(prompt), places[position]))
            prompt += [tiny.image_token or 0] * spans[-1].length
        prompt += [] if token is None else [token]
    images = tuple(map(tiny.image, dict.fromkeys(places.values())))
    options = {"stop": StopRules(12), "sampling": GREEDY, **more}
    return GenerationRequest(name, tuple(prompt), spans=tuple(spans), images=images, **options)


def mixed_requests(tiny: ImageTextModel) -> Iterator[GenerationRequest]:
    """Texts with common prefixes and images; some have no image, some start with one."""
    r = random.Random(8)
    vocab = tiny.model.tokenizer.vocab_size
    base = [r.randrange(vocab) for _ in range(60)]
    for number in range(20):
        text = base[: r.choice([15, 40])] + [r.randrange(vocab) for _ in range(r.randint(1, 50))]
        chosen = sorted(r.sample([0, 4, 5, 12, 30], r.choice([0, 1, 2, 3])))
        places = {at: r.choice(list(GRIDS)) for at in chosen if at < len(text)}
        sampling = GREEDY if number % 2 else SamplingParams(seed=number)
        stop = StopRules(r.randint(5, 25))
        yield about(tiny, str(number), text, places, sampling=sampling, stop=stop)


@torch.inference_mode()
def best_by_transformers(tiny: ImageTextModel, request: GenerationRequest, answer: tuple[int, ...]):
    logits = tiny.logits([*request.prompt, *answer], request.spans)
    known = tiny.model.tokenizer.vocab_size
    return logits[len(request.prompt) - 1 : -1, :known].argmax(-1).tolist()


def test_images_leave_a_full_context_as_a_whole(tiny) -> None:
    text, places = list(range(40, 66)), {3: 2, 6: 1, 12: 3, 20: 2}
    request = about(tiny, "a", text, places, stop=StopRules(120))
    shift = ContextShift(len(request.prompt) + 9, keep=4)
    with running(tiny) as engine:
        [delta] = answers(engine, [replace(request, shift=shift)], together=False)
    context, spans, begin, held = list(request.prompt), request.spans, 0, []
    while begin < len(delta.tokens):
        if len(context) == shift.context_tokens:
            cut = cut_of(shift, len(request.prompt), spans)
            del context[cut.begin : cut.end]
            spans = cut.spans(spans)
        given, held = len(context), [*held, len(spans)]
        context += delta.tokens[begin : begin + shift.context_tokens - given]
        best = best_by_transformers(
            tiny,
            replace(request, prompt=tuple(context[:given]), spans=spans),
            tuple(context[given:]),
        )
        assert context[given:] == best, f"after {begin} tokens"
        begin += len(best)
    assert held[0] == 4 and 0 < held[1] < 4
    assert held[-1] == sum(span.end <= shift.keep for span in request.spans)
    assert engine.statistics().pages_owned == 0


@pytest.fixture(scope="module")
def alone(tiny):
    requests = list(mixed_requests(tiny))
    with running(tiny, prefix_cache=False, step_tokens=256) as engine:
        return requests, answers(engine, requests, together=False)


def test_greedy_answers_are_those_of_transformers(tiny, alone) -> None:
    for request, delta in zip(*alone, strict=True):
        if request.sampling == GREEDY:
            assert list(delta.tokens) == best_by_transformers(tiny, request, delta.tokens)


@pytest.mark.parametrize(("depth", "scarce"), [(3, True), (1, False)])
def test_requests_in_a_batch_get_the_answers_they_get_alone(tiny, alone, depth, scarce) -> None:
    requests, expected = alone
    tower = tiny.tower()
    least = tiny.rows_at_once * tower.limits.row_bytes
    cache = {"cache_tokens": 256, "image_cache_bytes": least} if scarce else {}
    with running(tiny, tower, depth=depth, **cache) as engine:
        together = answers(engine, requests, together=True)
    statistics = engine.statistics()  # the closed loop changes them no more
    assert [delta.tokens for delta in together] == [delta.tokens for delta in expected]
    assert len({token for delta in expected for token in delta.tokens}) > 20
    assert (statistics.preemptions_total > 0) == scarce
    assert statistics.cached_tokens_total > 0 or scarce
    assert statistics.pages_owned == 0 and statistics.images_waiting == 0
    assert sorted(set(tower.encoded)) == list(GRIDS)
    assert len(tower.encoded) == len(GRIDS) or scarce


def test_a_second_turn_about_the_same_images_encodes_none(tiny) -> None:
    tower = tiny.tower()
    text, places = list(range(40, 60)), {2: 1, 11: 2}
    with running(tiny, tower) as engine:
        first = about(tiny, "a", text, places)
        [delta] = answers(engine, [first], together=False)
        assert tower.encoded == [1, 2]
        later = about(tiny, "b", [*text, *delta.tokens, 7, 8], places)
        stranger = about(tiny, "c", [*text, *delta.tokens, 7, 8], {2: 4, 11: 2})
        [again] = answers(engine, [later], together=False)
        assert tower.encoded == [1, 2]
        [different] = answers(engine, [stranger], together=False)
        assert tower.encoded == [1, 2, 4]
    assert again.usage is not None and again.usage.cached_tokens == 32
    assert list(again.tokens) == best_by_transformers(tiny, later, again.tokens)
    assert different.usage is not None and different.usage.cached_tokens == 0
    assert list(different.tokens) == best_by_transformers(tiny, stranger, different.tokens)


def test_an_image_longer_than_a_step_runs_in_one_or_is_split(tiny) -> None:
    request = about(tiny, "a", list(range(40, 50)), {2: 2})
    with running(tiny, max_sequences=3, step_tokens=4) as engine:
        [delta] = answers(engine, [request], together=False)
    steps = engine.statistics().steps_total  # the closed loop changes them no more
    assert list(delta.tokens) == best_by_transformers(tiny, request, delta.tokens)
    # 20 positions: 12 to a step where all ten of the image's must fit beside two other rows.
    assert steps - len(delta.tokens) + 1 == (2 if tiny.whole else -(-len(request.prompt) // 4))


@pytest.mark.parametrize("proposed", [0, 2, 9])
def test_a_whole_image_fits_a_step_beside_the_draws_of_other_sequences(tiny, proposed) -> None:
    """The sequence that computes the image does not draw, or draws in its last row."""
    options = {"max_sequences": 4, "step_tokens": 4, "proposed_tokens": proposed}
    draws = StepLimits(4, 256, 256, proposed).draws
    with running(tiny, **options) as engine:
        assert engine.limits.step_tokens == (LARGEST + draws - 1 if tiny.whole else 4)


@pytest.mark.parametrize("step_tokens", [12, 40])
def test_images_may_be_at_the_start_at_the_end_or_all_of_a_prompt(tiny, step_tokens) -> None:
    text = list(range(40, 50))
    requests = [
        about(tiny, "around", text, {0: 1, len(text): 2}),
        about(tiny, "alone", [], {0: 3}),
        about(tiny, "to the last place", list(range(40, 61)), {21: 2}),
    ]
    with running(tiny, context_tokens=32, page_tokens=8, step_tokens=step_tokens) as engine:
        first = answers(engine, requests, together=True)
        again = answers(engine, requests, together=True)
    for request, delta, repeated in zip(requests, first, again, strict=True):
        assert list(delta.tokens) == best_by_transformers(tiny, request, delta.tokens)
        assert repeated.tokens == delta.tokens
    lengths = [min(12, 32 - len(request.prompt)) for request in requests]
    assert [len(delta.tokens) for delta in first] == lengths
    assert tiny.image_token is not None or lengths == [6, 12, 1]


def test_memory_for_images_is_planned_and_too_little_is_refused(tiny) -> None:
    tower = tiny.tower()
    least = tiny.rows_at_once * tower.limits.row_bytes
    short = running(tiny, image_cache_bytes=least - 1)
    with pytest.raises(ConfigurationError, match="image_cache_bytes"), short:
        pass
    tower.activation_bytes = lambda images: 1 << 50
    with pytest.raises(DoesNotFitError, match="for images"), running(tiny, tower):
        pass


def test_a_start_without_memory_for_the_largest_image_fails(tiny) -> None:
    tower = tiny.tower()

    def encode(pixels, grid, pause):
        raise MemoryError

    tower.encode = encode
    with pytest.raises(DoesNotFitError, match="largest image"), running(tiny, tower):
        pass


def test_a_model_without_images_has_no_cache_for_them(tmp_path) -> None:
    path = tmp_path / "blind.gguf"
    twin = write_tiny(path, tiny_config(), **OPTIONS)
    model = load(path, device=CPU, dtype=torch.float32)
    blind = ImageTextModel(model, lambda tokens, _: twin(torch.tensor([tokens])).logits[0], HIDDEN)
    request = about(blind, "a", list(range(60, 100)), {})
    with running(blind) as engine:
        [delta] = answers(engine, [request], together=False)
    assert list(delta.tokens) == best_by_transformers(blind, request, delta.tokens)


def test_more_images_than_the_model_accepts_are_refused(tmp_path) -> None:
    tiny = mllama(tmp_path)
    request = about(tiny, "a", list(range(40, 60)), dict.fromkeys(range(5), 1))
    with running(tiny) as engine, pytest.raises(RequestError, match="5 images"):
        answers(engine, [request], together=False)


def test_pages_that_could_hold_rows_of_two_runs_are_refused(tmp_path) -> None:
    refused = running(mllama(tmp_path), page_tokens=24)
    with pytest.raises(ConfigurationError, match="page_tokens"), refused:
        pass
