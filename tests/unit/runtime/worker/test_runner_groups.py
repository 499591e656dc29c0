"""Four cache kinds in one model, on a real pool: answers are those of one dense pass."""

import random
from collections import deque
from functools import cache

import pytest
import torch
from torch import Tensor

from runtime.engine.request import GenerationRequest, ImageSpan, SamplingParams, StopRules
from runtime.engine.scheduler import Scheduler
from runtime.kernels.attention import Scoring, paged_attention, paged_attention_twin, write_cache
from runtime.kv.cache_kinds import CacheKind, Chunked, Cross, Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import Batch, KVCache
from runtime.worker.runner import DeviceRunner
from tests.unit.runtime.engine.pretend_device import visible, visible_rows

VOCAB, WIDTH, HEADS, CONTEXT, PAGE_TOKENS = 61, 16, 2, 160, 4
CPU = torch.device("cpu")
# By digest: rows and padding.
IMAGES = {b"\x01": (5, 0), b"\x02": (9, 3), b"\x03": (2, 7)}


class MixedModel:
    """A layer of each kind; depends on the past only through the cache."""

    vocab_size, hidden_size, context_length = VOCAB, WIDTH, CONTEXT
    causal = generates = True
    position_axes = 1
    weight_bytes = 1000

    def __init__(self, *, lead_in: bool, attend=paged_attention) -> None:
        cross = Cross(3, 12, lead_in=lead_in, alignment=8)
        self.kinds: tuple[CacheKind, ...] = (Sliding(6), Full(), cross, Chunked(8), Sliding(6))
        self.cache_layers = tuple(LayerCache(k, 1, WIDTH // HEADS, WIDTH) for k in self.kinds)
        self._attend = attend
        draw = torch.Generator().manual_seed(9)
        self.embedding, self.places, self.head, self.mixing = (
            torch.randn(VOCAB, WIDTH, generator=draw),
            torch.randn(CONTEXT, WIDTH, generator=draw) * 0.5,
            torch.randn(WIDTH, VOCAB, generator=draw) * 2,
            torch.randn(len(self.kinds), WIDTH, WIDTH, generator=draw) * 0.5,
        )

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        x = self.embedding[batch.tokens] + self.places[batch.positions]
        for index in range(len(self.kinds)):
            pages = cache.layer(index)
            plan = batch.plans[pages.group]
            stored = torch.cat([x[:0], *batch.cross_features]) if plan.image_writes else x
            if len(plan.write_cell):
                write_cache(self._keys(stored), stored.unsqueeze(1), pages, plan)
            queries = (x @ self.mixing[index]).unflatten(1, (HEADS, -1))
            seen = self._attend(queries, pages, plan, Scoring(1.0))
            x = x + seen.mean(dim=1)
        return x[batch.output_rows]

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.head

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        return 0

    def features(self, digest: bytes) -> Tensor:
        draw = torch.Generator().manual_seed(digest[0])
        return torch.randn(sum(IMAGES[digest]), WIDTH, generator=draw)

    def dense_answer(self, asked: GenerationRequest) -> list[int]:
        """Greedy decoding with a full pass for each token, by direct rules."""
        tokens = list(asked.prompt)
        while len(tokens) < len(asked.prompt) + asked.stop.max_tokens:
            x = self.embedding[tokens] + self.places[: len(tokens)]
            for index, kind in enumerate(self.kinds):
                queries = (x @ self.mixing[index]).unflatten(1, (HEADS, -1))
                seen = [self._seen(kind, p, x, asked.spans) for p in range(len(x))]
                rows = [self._plain(q, s) for q, s in zip(queries, seen, strict=True)]
                x = x + torch.stack(rows)
            tokens.append(int((x[-1] @ self.head).argmax()))
        return tokens[len(asked.prompt) :]

    def _seen(self, kind: CacheKind, position: int, x: Tensor, spans) -> Tensor:
        if not isinstance(kind, Cross):
            return x[list(visible(kind, position, spans))]
        found = visible_rows(kind, position, spans)
        # Rows of padding are numbered -1, -2, ... behind the others.
        rows = [IMAGES[d][0] - 1 - row if row < 0 else row for d, row in found]
        features = [self.features(d)[row] for (d, _), row in zip(found, rows, strict=True)]
        return torch.stack(features) if features else x[:0]

    def _plain(self, queries: Tensor, seen: Tensor) -> Tensor:
        scores = queries @ self._keys(seen)[:, 0].T
        return (scores.softmax(dim=1) @ seen).mean(dim=0)

    def _keys(self, x: Tensor) -> Tensor:
        return x[:, None, : WIDTH // HEADS]


def run(model: MixedModel, requests: list[GenerationRequest], **sizes) -> tuple[list, Scheduler]:
    settings = {"slots": 4, "step_tokens": 24, "pages": 60, "depth": 1, **sizes}
    layout = CacheLayout.of(model.cache_layers, page_tokens=PAGE_TOKENS)
    pages = [settings["pages"]] * len(layout.groups)
    common = {"slots": settings["slots"], "step_tokens": settings["step_tokens"]}
    pool = KVPool(
        layout,
        pages=pages,
        slots=settings["slots"],
        pages_per_sequence=CONTEXT // PAGE_TOKENS,
        type=CacheType.FLOAT32,
        device=CPU,
    )
    runner = DeviceRunner(
        model,
        pool,
        layout,
        StepLimits(**common, context_tokens=CONTEXT),
        device=CPU,
        image_features=model.features,
    )
    runner.warm_up()
    cache_manager = KVCacheManager(layout.kinds, pages, page_tokens=PAGE_TOKENS)
    scheduler = Scheduler(cache_manager, step_image_rows=layout.image_rows, **common)
    sequences = [scheduler.add(request) for request in requests]
    flying: deque = deque()
    while scheduler.waiting or scheduler.running:
        plan = scheduler.plan()
        if plan is not None:
            flying.append((plan, runner.launch(plan)))
        if plan is None or len(flying) >= settings["depth"]:
            oldest, launched = flying.popleft()
            list(scheduler.retire(oldest, runner.collect(launched)))
    answers = [s.tokens[len(s.request.prompt) :] for s in sequences]
    return list(zip(answers, [s.cached for s in sequences], strict=True)), scheduler


def crowd() -> list[GenerationRequest]:
    r = random.Random(2)
    base = [r.randrange(VOCAB) for _ in range(40)]
    places = [[], [0], [4], [4, 5], [0, 1, 17], [4, 17]]
    made = []
    for number in range(12):
        prompt = base[: r.choice([12, 30])] + [r.randrange(VOCAB) for _ in range(r.randint(8, 60))]
        spans = []
        for at in places[number % len(places)]:
            digest = r.choice(list(IMAGES)[:2])
            spans.append(ImageSpan(at, 1, False, digest, *IMAGES[digest]))
        greedy = SamplingParams(temperature=0.0)
        stop = StopRules(r.randint(5, 20))
        made.append(GenerationRequest(str(number), tuple(prompt), stop, greedy, tuple(spans)))
    return made


@cache
def dense_answers(*, lead_in: bool) -> list[list[int]]:
    model = MixedModel(lead_in=lead_in)
    return [model.dense_answer(request) for request in crowd()]


@pytest.mark.parametrize(("depth", "pages"), [(1, 300), (3, 44)])
@pytest.mark.parametrize("lead_in", [True, False])
def test_four_cache_kinds_give_the_dense_answers(lead_in, depth, pages) -> None:
    model = MixedModel(lead_in=lead_in)
    requests = crowd()
    results, scheduler = run(model, [*requests, *requests], depth=depth, pages=pages)
    expected = dense_answers(lead_in=lead_in)
    assert [answer for answer, _ in results] == expected * 2
    assert len({token for answer in expected for token in answer}) > 10
    assert (scheduler.preemptions > 0) == (pages == 44)
    assert sum(cached for _, cached in results) > 0 or pages == 44


@pytest.mark.parametrize("lead_in", [True, False])
def test_the_twin_gives_the_same_answers_from_bounds_that_the_host_knows(lead_in) -> None:
    model = MixedModel(lead_in=lead_in, attend=paged_attention_twin)
    results, _ = run(model, crowd(), depth=2, step_tokens=7)
    assert [answer for answer, _ in results] == dense_answers(lead_in=lead_in)
