"""The whole engine on a tiny model with cross-attention to images against `transformers`."""

import random
from dataclasses import replace

import pytest
import torch

from model_zoo.registry import load
from runtime.engine.context_shift import cut_of
from runtime.engine.request import ContextShift, GenerationRequest, SamplingParams, StopRules
from runtime.errors import ConfigurationError, RequestError
from runtime.vision.encoder import LocalEncoder
from tests.families import engine_runs
from tests.families.engine_runs import answers
from tests.families.image_rows import (
    OPTIONS,
    Picture,
    PictureTower,
    logits_of_twin,
    tiny_config,
    write_with_image_size,
)
from tests.tiny_models import write_tiny

CPU = torch.device("cpu")
# Few pictures, so that they come again: by digest, their tiles.
TILES_OF = {b"\x00": 3, b"\x01": 1, b"\x02": 2}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "seeing.gguf"
    twin = write_with_image_size(path, tiny_config())
    return load(path, device=CPU, dtype=torch.float32), twin


def running(model, *, tower: PictureTower | None = None, **options):
    encoder = LocalEncoder(tower or PictureTower(), device=CPU, weight_bytes=0)
    return engine_runs.running(model, encoder=encoder, **options)


def conversation(tokens: list[int], pictures: list[Picture], image_token: int) -> tuple[int, ...]:
    for picture in pictures:
        tokens[picture.position] = image_token
    return tuple(tokens)


def mixed_requests(model, twin) -> list[tuple[GenerationRequest, list[Picture]]]:
    """Prompts that share beginnings and pictures; some have none, some begin with one."""
    r = random.Random(5)
    vocab = model.tokenizer.vocab_size
    base = [r.randrange(vocab) for _ in range(60)]
    places = [[], [0], [3], [3, 4], [0, 1, 30], [3, 30], [40]]
    made = []
    for number in range(24):
        shared = r.choice([20, 48])
        tokens = base[:shared] + [r.randrange(vocab) for _ in range(r.randint(1, 60))]
        digests = [r.choice(list(TILES_OF)[:2]) for _ in range(3)]
        chosen = [at for at in places[number % len(places)] if at < len(tokens)]
        pictures = [Picture(at, TILES_OF[d], d) for at, d in zip(chosen, digests, strict=False)]
        prompt = conversation(tokens, pictures, twin.config.vocab_size)
        sampling = SamplingParams(temperature=0) if number % 2 else SamplingParams(seed=number)
        stop = StopRules(r.randint(5, 40))
        made.append((about(pictures, str(number), prompt, stop, sampling), pictures))
    return made


def about(pictures: list[Picture], *asked) -> GenerationRequest:
    images = {picture.digest: picture.prepared for picture in pictures}
    spans = tuple(picture.span for picture in pictures)
    return GenerationRequest(*asked, spans, images=tuple(images.values()))


def test_greedy_answers_about_images_are_those_of_transformers(seeing) -> None:
    model, twin = seeing
    asked = [
        (r, pictures) for r, pictures in mixed_requests(model, twin) if r.sampling.temperature == 0
    ]
    with running(model) as engine:
        results = answers(engine, [request for request, _ in asked], together=True)
    known = model.tokenizer.vocab_size
    for (request, pictures), delta in zip(asked, results, strict=True):
        logits = logits_of_twin(twin, [*request.prompt, *delta.tokens], pictures)
        best = logits[len(request.prompt) - 1 : -1, :known].argmax(-1)
        assert list(delta.tokens) == best.tolist()


def test_images_leave_a_full_context(seeing) -> None:
    model, twin = seeing
    pictures = [Picture(0, 3, b"\x00"), Picture(1, 1, b"\x01"), Picture(30, 2, b"\x02")]
    prompt = conversation(list(range(60, 100)), pictures, twin.config.vocab_size)
    request = about(pictures, "a", prompt, StopRules(120), SamplingParams(temperature=0))
    shift, known = ContextShift(52, keep=1), model.tokenizer.vocab_size
    with running(model) as engine:
        [delta] = answers(engine, [replace(request, shift=shift)], together=False)
    context, begin, held = list(prompt), 0, []
    while begin < len(delta.tokens):
        if len(context) == 52:
            cut = cut_of(shift, len(prompt), [picture.span for picture in pictures])
            del context[cut.begin : cut.end]
            stay = [p for p in pictures if not cut.begin <= p.position < cut.end]
            pictures = [replace(p, position=cut.moved(p.position)) for p in stay]
        given, held = len(context), [*held, [p.position for p in pictures]]
        context += delta.tokens[begin : begin + 52 - given]
        best = logits_of_twin(twin, context, pictures)[given - 1 : -1, :known].argmax(-1)
        assert context[given:] == best.tolist(), f"after {begin} tokens"
        begin += len(best)
    assert held[:3] == [[0, 1, 30], [0, 6], [0]]
    assert engine.statistics().pages_owned == 0


@pytest.fixture(scope="module")
def alone(seeing):
    model, twin = seeing
    requests = [request for request, _ in mixed_requests(model, twin)]
    with running(model, prefix_cache=False, step_tokens=256) as engine:
        return requests, answers(engine, requests, together=False)


@pytest.mark.parametrize(("depth", "cache_tokens"), [(3, 256), (1, None)])
def test_requests_in_a_batch_get_the_answers_they_get_alone(
    seeing, alone, depth, cache_tokens
) -> None:
    model, _ = seeing
    requests, expected = alone
    with running(model, depth=depth, cache_tokens=cache_tokens) as engine:
        together = answers(engine, requests, together=True)
    statistics = engine.statistics()  # after closing: the loop has told its last
    assert [d.tokens for d in together] == [d.tokens for d in expected]
    assert statistics.cached_tokens_total > 0 or cache_tokens is not None
    assert (statistics.preemptions_total > 0) == (cache_tokens is not None)
    assert statistics.pages_owned == 0


def test_a_follow_up_reuses_the_rows_of_its_images(seeing) -> None:
    model, twin = seeing
    picture = Picture(5, 3, b"\x00")
    prompt = conversation(list(range(60, 100)), [picture], twin.config.vocab_size)
    sampling = SamplingParams(temperature=0)
    first = about([picture], "a", prompt, StopRules(30), sampling)
    tower = PictureTower()
    with running(model, tower=tower) as engine:
        [delta] = answers(engine, [first], together=False)
        turn = (*prompt, *delta.tokens, 5, 6, 7)
        follow_up = about([picture], "b", turn, StopRules(9), sampling)
        [again] = answers(engine, [follow_up], together=False)
        other = Picture(5, 1, b"\x01")
        stranger = about([other], "c", turn, StopRules(9), sampling)
        [different] = answers(engine, [stranger], together=False)
    assert again.usage is not None and again.usage.cached_tokens == 64
    assert different.usage is not None and different.usage.cached_tokens == 0
    logits = logits_of_twin(twin, [*turn, *again.tokens], [picture])[len(turn) - 1 : -1]
    assert list(again.tokens) == logits[:, : model.tokenizer.vocab_size].argmax(-1).tolist()
    assert different.tokens != again.tokens
    assert tower.encoded[1:] == [picture.digest, other.digest]  # the first is the worst one's


def test_a_model_without_images_has_no_cache_for_them(tmp_path) -> None:
    path = tmp_path / "blind.gguf"
    twin = write_tiny(path, tiny_config(), **OPTIONS)
    model = load(path, device=CPU, dtype=torch.float32)
    prompt = tuple(range(60, 100))
    request = GenerationRequest("a", prompt, StopRules(20), SamplingParams(temperature=0))
    with running(model) as engine:
        [delta] = answers(engine, [request], together=False)
    logits = logits_of_twin(twin, [*prompt, *delta.tokens], [])[len(prompt) - 1 : -1]
    assert list(delta.tokens) == logits[:, : model.tokenizer.vocab_size].argmax(-1).tolist()


def test_more_images_than_the_model_accepts_are_refused(seeing) -> None:
    model, _ = seeing
    pictures = [Picture(at, 3, b"\x00") for at in range(5)]
    request = about(pictures, "a", tuple(range(20)), StopRules(5), SamplingParams())
    with running(model) as engine, pytest.raises(RequestError, match="5 images"):
        answers(engine, [request], together=False)


def test_pages_that_could_hold_rows_of_two_runs_are_refused(seeing) -> None:
    model, _ = seeing
    with pytest.raises(ConfigurationError, match="page_tokens"), running(model, page_tokens=24):
        pass
