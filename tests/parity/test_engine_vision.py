"""The whole engine with images in the text: alone, in a crowd, as `transformers`."""

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from runtime.engine.assembly import EngineOptions, assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.errors import ConfigurationError, DoesNotFitError
from runtime.vision.encoder import LocalEncoder
from tests.parity.paged_decoder import PagedDecoder
from tests.parity.sighted import GRIDS, LARGEST, MODELS, Sighted
from tests.parity.test_engine import answers
from tests.unit.runtime.vision import PretendTower, features_of, picture

CPU = torch.device("cpu")
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=MODELS)
def sighted(request, tmp_path_factory) -> Sighted:
    return MODELS[request.param](tmp_path_factory.mktemp("models"))


def tower_of(sighted: Sighted) -> PretendTower:
    return PretendTower(rows=LARGEST, width=sighted.width, whole=LARGEST if sighted.whole else 0)


@contextlib.contextmanager
def running(sighted: Sighted, tower: PretendTower | None = None, **options):
    settings = {"context_tokens": 256, "max_sequences": 6, "step_tokens": 16, **options}
    engine, _ = assemble(
        sighted.model.decoder,
        sighted.model.tokenizer.token_bytes,
        device=CPU,
        options=EngineOptions(**settings),
        encoder=LocalEncoder(tower or tower_of(sighted), device=CPU),
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def about(sighted: Sighted, name: str, text: list[int], places: dict[int, int], **more):
    """`places`: where in the text which image goes; its length: behind all of it."""
    prompt, spans = [], []
    for position, token in enumerate([*text, None]):
        if position in places:
            spans.append(sighted.span(len(prompt), places[position]))
            prompt += [0] * spans[-1].length
        prompt += [] if token is None else [token]
    images = [picture(number, spans[i].length) for i, number in enumerate(places.values())]
    own = {image.digest: image for image in images}
    asked = {"stop": StopRules(12), "sampling": GREEDY, **more}
    return GenerationRequest(
        name, tuple(prompt), spans=tuple(spans), images=tuple(own.values()), **asked
    )


def crowd(sighted: Sighted) -> Iterator[GenerationRequest]:
    """Texts that share beginnings and images; some have none, some begin with one."""
    r = random.Random(8)
    vocab = sighted.model.tokenizer.vocab_size
    base = [r.randrange(vocab) for _ in range(60)]
    for number in range(20):
        text = base[: r.choice([15, 40])] + [r.randrange(vocab) for _ in range(r.randint(1, 50))]
        chosen = sorted(r.sample([0, 4, 5, 12, 30], r.choice([0, 1, 2, 3])))
        places = {at: r.choice(list(GRIDS)) for at in chosen if at < len(text)}
        sampling = GREEDY if number % 2 else SamplingParams(seed=number)
        stop = StopRules(r.randint(5, 25))
        yield about(sighted, str(number), text, places, sampling=sampling, stop=stop)


@torch.inference_mode()
def best_by_transformers(sighted: Sighted, request: GenerationRequest, answer: tuple[int, ...]):
    logits = sighted.logits([*request.prompt, *answer], request.spans)
    known = sighted.model.tokenizer.vocab_size
    return logits[len(request.prompt) - 1 : -1, :known].argmax(-1).tolist()


def test_logits_agree_however_a_prompt_is_cut(sighted) -> None:
    request = about(sighted, "a", list(range(40, 70)), {0: 1, 4: 2, 5: 3, 20: 2})
    prompt, spans = request.prompt, request.spans
    features = {s.digest: features_of(s.digest, s.length, sighted.width) for s in spans}
    with torch.inference_mode():
        expected = sighted.logits(prompt, spans)
    for size in (len(prompt), 17, 3):
        paged = PagedDecoder(sighted.model.decoder, dtype=torch.float32)
        paged.show(1, [(span, features[span.digest]) for span in spans])
        found, start = [], 0
        while start < len(prompt):
            end = min(start + size, len(prompt))
            while any(s.whole and s.start < end < s.end for s in spans):
                end += 1
            found.append(paged.feed({1: prompt[start:end]}))
            start = end
        assert torch.allclose(torch.cat(found), expected, atol=TOLERANCE), size


def test_two_sequences_in_one_batch_see_their_own_images(sighted) -> None:
    first = about(sighted, "a", list(range(40, 60)), {3: 1, 9: 2})
    other = about(sighted, "b", list(range(45, 60)), {3: 3})
    paged = PagedDecoder(sighted.model.decoder, dtype=torch.float32)
    for slot, request in enumerate((first, other)):
        shown = [(s, features_of(s.digest, s.length, sighted.width)) for s in request.spans]
        paged.show(slot, shown)
    found = paged.feed({0: first.prompt, 1: other.prompt})
    with torch.inference_mode():
        expected = [sighted.logits(request.prompt, request.spans) for request in (first, other)]
    assert torch.allclose(found, torch.cat(expected), atol=TOLERANCE)


def test_greedy_answers_about_images_are_those_of_transformers(sighted) -> None:
    requests = [request for request in crowd(sighted) if request.sampling == GREEDY]
    with running(sighted) as engine:
        results = answers(engine, requests, together=True)
    for request, delta in zip(requests, results, strict=True):
        assert list(delta.tokens) == best_by_transformers(sighted, request, delta.tokens)


@pytest.fixture(scope="module")
def alone(sighted):
    requests = list(crowd(sighted))
    with running(sighted, prefix_cache=False, step_tokens=256) as engine:
        return requests, answers(engine, requests, together=False)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("scarce", [True, False])
def test_a_crowd_gets_what_each_request_gets_alone(sighted, alone, depth, scarce) -> None:
    requests, expected = alone
    tower = tower_of(sighted)
    one = LARGEST * tower.limits.row_bytes
    cache = {"cache_tokens": 256, "image_cache_bytes": one} if scarce else {}
    with running(sighted, tower, depth=depth, **cache) as engine:
        together = answers(engine, requests, together=True)
    statistics = engine.statistics()  # after closing: the loop has told its last
    assert [delta.tokens for delta in together] == [delta.tokens for delta in expected]
    assert len({token for delta in expected for token in delta.tokens}) > 20
    assert (statistics.preemptions_total > 0) == scarce
    assert statistics.pages_owned == 0 and statistics.images_waiting == 0
    assert sorted(set(tower.encoded)) == list(GRIDS)
    assert len(tower.encoded) == len(GRIDS) or scarce


def test_a_second_turn_about_the_same_images_encodes_none(sighted) -> None:
    tower = tower_of(sighted)
    text, places = list(range(40, 60)), {2: 1, 11: 2}
    with running(sighted, tower) as engine:
        first = about(sighted, "a", text, places)
        [delta] = answers(engine, [first], together=False)
        assert tower.encoded == [1, 2]
        later = about(sighted, "b", [*text, *delta.tokens, 7, 8], places)
        stranger = about(sighted, "c", [*text, *delta.tokens, 7, 8], {2: 4, 11: 2})
        [again] = answers(engine, [later], together=False)
        assert tower.encoded == [1, 2]
        [different] = answers(engine, [stranger], together=False)
        assert tower.encoded == [1, 2, 4]
    assert again.usage is not None and again.usage.cached_tokens == 32
    assert list(again.tokens) == best_by_transformers(sighted, later, again.tokens)
    assert different.usage is not None and different.usage.cached_tokens == 0
    assert list(different.tokens) == best_by_transformers(sighted, stranger, different.tokens)


def test_an_image_longer_than_a_step_runs_in_one_or_is_split(sighted) -> None:
    request = about(sighted, "a", list(range(40, 50)), {2: 2})
    with running(sighted, max_sequences=3, step_tokens=4) as engine:
        [delta] = answers(engine, [request], together=False)
    steps = engine.statistics().steps_total  # after closing: the loop has told its last
    assert list(delta.tokens) == best_by_transformers(sighted, request, delta.tokens)
    # 20 positions: 12 to a step where all ten of the image's must fit beside two other rows.
    assert steps - len(delta.tokens) + 1 == (2 if sighted.whole else 5)


@pytest.mark.parametrize("step_tokens", [12, 40])
def test_images_may_be_the_beginning_the_end_and_all_of_a_prompt(sighted, step_tokens) -> None:
    text = list(range(40, 50))
    requests = [
        about(sighted, "around", text, {0: 1, len(text): 2}),
        about(sighted, "alone", [], {0: 3}),
        about(sighted, "to the last place", list(range(40, 61)), {21: 2}),
    ]
    assert len(requests[2].prompt) == 31
    with running(sighted, context_tokens=32, page_tokens=8, step_tokens=step_tokens) as engine:
        first = answers(engine, requests, together=True)
        again = answers(engine, requests, together=True)
    for request, delta, repeated in zip(requests, first, again, strict=True):
        assert list(delta.tokens) == best_by_transformers(sighted, request, delta.tokens)
        assert repeated.tokens == delta.tokens
    assert [len(delta.tokens) for delta in first] == [6, 12, 1]


def test_room_for_images_is_planned_and_missing_room_is_refused(sighted) -> None:
    tower = tower_of(sighted)
    least = LARGEST * tower.limits.row_bytes
    short = running(sighted, image_cache_bytes=least - 1)
    with pytest.raises(ConfigurationError, match="image_cache_bytes"), short:
        pass
    tower.activation_bytes = lambda images: 1 << 50
    with pytest.raises(DoesNotFitError, match="for images"), running(sighted, tower):
        pass


def test_a_worst_image_that_finds_no_memory_stops_the_start(sighted) -> None:
    tower = tower_of(sighted)

    def encode(pixels, grid):
        raise MemoryError

    tower.encode = encode
    with pytest.raises(DoesNotFitError, match="largest image"), running(sighted, tower):
        pass


def test_an_engine_is_an_async_engine(sighted) -> None:
    with running(sighted) as engine:
        assert isinstance(engine, AsyncEngine) and engine.limits.image_rows == LARGEST
