"""Rounds of random requests to engines with random settings, and the checks of each round.

In a round a tiny model answers requests that share beginnings, pictures, schemas and budgets of
thinking, shift their contexts, end at stop strings, or are aborted, while few pages make for
preemption and copies to host memory. Each answer must be the one that a plain engine gives to the
request alone.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat_model import ChatModel
from model_zoo.grammars.json_schema import compilable
from model_zoo.grammars.thinking_budget import ThinkingBudget
from model_zoo.grammars.token_grammar import TokenGrammars
from model_zoo.registry import load
from runtime.engine.assembly import assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import (
    ContextShift,
    Delta,
    GenerationRequest,
    Grammar,
    SamplingParams,
    StopRules,
)
from runtime.vision.encoder import LocalEncoder
from tests.families.engine_runs import CPU, collect
from tests.families.image_rows import Picture, picture_tower, tiny_config, write_with_image_size
from tests.families.text_families import TEXT_MODELS

CONTEXT = 192
REQUESTS = 32
LONGEST = 300  # tokens of an answer
# Sliding and full layers; one state per sequence; one compressed vector per token.
FAMILIES = ("gemma3", "qwen35", "deepseek2")
TILES_OF = {b"\x00": 3, b"\x01": 1, b"\x02": 2}
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", "yes", 1, None]}, "maxItems": 6},
    {"type": "string", "pattern": "^[a-c]{2,9}$"},
)
BUDGETS = (0, 3, 30)


@dataclass(frozen=True, slots=True)
class SoakModel:
    """A tiny model with everything that its requests need. `grammars`: for schemas and budgets."""

    name: str
    model: ChatModel
    grammars: tuple[Grammar, ...]
    image_token: int | None = None  # of a model that reads pictures

    @property
    def vocab_size(self) -> int:
        return self.model.tokenizer.vocab_size


def soak_models(folder: Path) -> list[SoakModel]:
    """Writes the models into `folder` and loads them."""
    made = []
    for family in FAMILIES:
        path = folder / f"{family}.gguf"
        TEXT_MODELS[family].write(path, "plain")
        made.append(_soak_model(family, path))
    path = folder / "mllama.gguf"
    twin = write_with_image_size(path, tiny_config())
    return [*made, _soak_model("mllama", path, image_token=twin.config.vocab_size)]


def _soak_model(name: str, path: Path, image_token: int | None = None) -> SoakModel:
    model = load(path, device=CPU, dtype=torch.float32)
    grammars = TokenGrammars(model.tokenizer)
    schemas = [json.dumps({"grammars": [{"json_schema": compilable(s)}]}) for s in SCHEMAS]
    compiled = tuple(map(grammars.compile, schemas))
    budgets = tuple(_budget(model, tokens) for tokens in BUDGETS)
    return SoakModel(name, model, (*compiled, *budgets), image_token)


def _budget(model: ChatModel, tokens: int) -> Grammar:
    """Answers begin within thinking, which ends after so many tokens."""
    parser, tokenizer = format_of("<think>").parser, model.tokenizer
    ending = tuple(tokenizer.encode("</think>"))
    new_parser = partial(parser, {}, thinks=True)
    return ThinkingBudget(None, tokens, ending, None, new_parser, tokenizer.token_bytes)


def play(
    soaked: SoakModel, seed: int, *, requests: int = REQUESTS, longest: int = LONGEST
) -> Counter[str]:
    """One round, with answers of at most `longest` tokens; returns what happened in it. Raises
    AssertionError."""
    random = Random(seed)
    asked = [_request(soaked, random, number, longest) for number in range(requests)]
    limits = [random.choice((None, None, 1, 5)) for _ in asked]  # deltas until the client leaves
    with _running(soaked, EngineOptions(CONTEXT, prefix_cache=False)) as engine:
        expected = asyncio.run(_answers(engine, asked, [None] * len(asked), together=False))
    options = _options(random)
    with _running(soaked, options) as engine:
        found = asyncio.run(_answers(engine, asked, limits, together=True))
    place = f"{soaked.name}, seed {seed}, {options}"
    for request, limit, one, other in zip(asked, limits, found, expected, strict=True):
        assert one.error is None, f"{place}: request {request.id}: {one.error}"
        begun = other.tokens if limit is None else other.tokens[: len(one.tokens)]
        assert one.tokens == begun, f"{place}: request {request.id} differs"
        assert limit is not None or (one.text, one.finish) == (other.text, other.finish), place
    statistics = engine.statistics()
    assert statistics.pages_owned == statistics.running == statistics.waiting == 0, place
    engine._engine._scheduler.cache_manager.check_idle()
    return Counter(
        requests=len(asked),
        grammars=sum(request.grammar is not None for request in asked),
        aborted=sum(one.finish is None for one in found),
        tokens=sum(len(one.tokens) for one in found),
        preemptions=statistics.preemptions_total,
        cached=statistics.cached_tokens_total,
        shifts=statistics.shifts_total,
        proposed=statistics.proposed_tokens_total,
        accepted=statistics.accepted_tokens_total,
        restored=statistics.host_pages_restored_total,
        images=statistics.images_encoded_total,
    )


def _options(random: Random) -> EngineOptions:
    return EngineOptions(
        CONTEXT,
        max_sequences=random.choice((2, 5, 8)),
        step_tokens=random.choice((16, 33, 64)),
        cache_tokens=random.choice((None, 2 * CONTEXT)),
        depth=random.choice((1, 2, 3)),
        host_cache_bytes=random.choice((0, 2**22)),
        proposed_tokens=random.choice((0, 6)),
    )


def _request(soaked: SoakModel, random: Random, number: int, longest: int) -> GenerationRequest:
    shared = Random(random.choice("abc"))  # few beginnings
    tokens = [shared.randrange(soaked.vocab_size) for _ in range(random.choice((1, 20, 48)))]
    tokens += [random.randrange(soaked.vocab_size) for _ in range(random.randint(1, 40))]
    pictures = []
    if soaked.image_token is not None and random.random() < 0.5:
        digests = [random.choice(sorted(TILES_OF)) for _ in range(random.randint(1, 2))]
        places = sorted(random.sample(range(len(tokens)), min(len(digests), len(tokens))))
        for at, digest in zip(places, digests, strict=False):
            tokens[at] = soaked.image_token
            pictures.append(Picture(at, TILES_OF[digest], digest))
    images = {picture.digest: picture.prepared for picture in pictures}
    grammar = random.choice((None, None, None, None, *soaked.grammars))
    ends = soaked.model.tokenizer.end_tokens if grammar is not None else frozenset()
    shift = ContextShift(random.choice((96, CONTEXT)), keep=random.choice((0, 5, -1)))
    request = GenerationRequest(
        str(number),
        tuple(tokens),
        StopRules(random.choice((5, 40, longest)), ends, random.choice(((), ("a", "zz")))),
        _sampling(random),
        tuple(picture.span for picture in pictures),
        images=tuple(images.values()),
        tenant=random.choice("xyz"),
        grammar=grammar,
    )
    return replace(request, shift=shift) if random.random() < 0.5 else request


def _sampling(random: Random) -> SamplingParams:
    seed = random.randrange(2**32)
    ways: tuple[Callable[[], SamplingParams], ...] = (
        lambda: SamplingParams(temperature=0),
        lambda: SamplingParams(temperature=0, repeat_penalty=1.2, frequency_penalty=0.3),
        lambda: SamplingParams(seed=seed),
        lambda: SamplingParams(seed=seed, top_k=0, top_p=0.9, logprobs=2),
        lambda: SamplingParams(seed=seed, typical_p=0.8, top_n_sigma=1.5),
        lambda: SamplingParams(temperature=0, dry_multiplier=1.5, dry_allowed_length=1),
        lambda: SamplingParams(seed=seed, bad_words=((3,), (4, 5), (6, 7, 8)), top_k=9),
    )
    return random.choice(ways)()


@contextlib.contextmanager
def _running(soaked: SoakModel, options: EngineOptions) -> Iterator[AsyncEngine]:
    reads = soaked.image_token is not None
    engine, _ = assemble(
        soaked.model.decoder,
        soaked.model.tokenizer.token_bytes,
        device=CPU,
        options=options,
        encoder=LocalEncoder(picture_tower(), device=CPU, weight_bytes=0) if reads else None,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def _answers(
    engine: AsyncEngine,
    requests: Sequence[GenerationRequest],
    limits: Sequence[int | None],
    *,
    together: bool,
) -> list[Delta]:
    asked = [collect(engine, *pair) for pair in zip(requests, limits, strict=True)]
    return list(await asyncio.gather(*asked)) if together else [await each for each in asked]
