"""Planned steps on a real pool give the tokens of a single pass over each sequence."""

from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.engine.request import (
    DrawFailure,
    GenerationRequest,
    Sampled,
    SamplingParams,
    StopRules,
)
from runtime.engine.scheduler import Scheduler
from runtime.errors import DoesNotFitError, ModelFileError
from runtime.kernels.random_numbers import uniforms
from runtime.kv.cache_kinds import CacheKind, Full, Sliding
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import KVPool
from runtime.vision.encoder import ImageLimits, ImageOutline
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import Batch, KVCache
from runtime.worker.runner import DeviceRunner
from tests.memory_profile import peak_bytes, recorded_memory

CPU = torch.device("cpu")
VOCAB, WIDTH, CONTEXT, PAGE_TOKENS = 61, 8, 96, 4
GREEDY = SamplingParams(temperature=0.0)


class TinyModel:
    """Two attention layers, one of them sliding; depends on the past only through the cache."""

    vocab_size = VOCAB
    hidden_size = WIDTH
    context_length = CONTEXT
    causal = generates = True
    position_axes = 1
    weight_bytes = 1000
    kinds: tuple[CacheKind, ...] = (Full(), Sliding(7))
    cache_layers = tuple(LayerCache(kind, 1, WIDTH, WIDTH) for kind in kinds)

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(9)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=draw)
        self.places = torch.randn(CONTEXT, WIDTH, generator=draw) * 0.5
        self.head = torch.randn(WIDTH, VOCAB, generator=draw) * 2
        self.batches: list[tuple[int, int]] = []  # rows and outputs of each step

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        self.batches.append((len(batch.tokens), len(batch.output_rows)))
        x = self.embedding[batch.tokens] + self.places[batch.positions]
        for index in range(2):
            pages = cache.layer(index)
            plan = batch.plans[pages.group]
            pages.keys.view(-1, WIDTH)[plan.write_cell] = x
            pages.values.view(-1, WIDTH)[plan.write_cell] = x.roll(1, dims=1)
            x = x + torch.stack([self._attend(x, row, plan, pages) for row in range(len(x))])
        return x[batch.output_rows]

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.head

    def _attend(self, x: Tensor, row: int, plan, pages) -> Tensor:
        seen = torch.arange(int(plan.visible_begin[row]), int(plan.visible_end[row]))
        table = plan.page_table[int(plan.row_slot[row])]
        cells = table[seen // PAGE_TOKENS].long() * PAGE_TOKENS + seen % PAGE_TOKENS
        keys, values = (t.view(-1, WIDTH)[cells] for t in (pages.keys, pages.values))
        return (keys @ x[row]).softmax(dim=0) @ values

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        return 0

    def plain_logits(self, tokens: list[int]) -> Tensor:
        """The last position's logits, in one dense pass without any cache."""
        count = len(tokens)
        x = self.embedding[tokens] + self.places[:count]
        behind = torch.arange(count)[:, None] - torch.arange(count)
        for reach in (CONTEXT, 7):
            hidden = (behind < 0) | (behind >= reach)
            x = x + (x @ x.T).masked_fill(hidden, -torch.inf).softmax(1) @ x.roll(1, dims=1)
        return x[-1] @ self.head


class Bench:
    """A scheduler and a runner, stepped by hand with `depth` steps in flight."""

    def __init__(
        self,
        model: TinyModel,
        *,
        slots: int = 4,
        step_tokens: int = 64,
        pages: int = 100,
        depth: int = 1,
        proposed_tokens: int = 0,
    ) -> None:
        layout = CacheLayout.of(model.cache_layers, page_tokens=PAGE_TOKENS)
        self.pool = KVPool(
            layout,
            pages=(pages, pages),
            slots=slots,
            pages_per_sequence=CONTEXT // PAGE_TOKENS,
            type=CacheType.FLOAT32,
            device=CPU,
        )
        self.runner = DeviceRunner(
            model,
            self.pool,
            layout,
            StepLimits(slots, step_tokens, CONTEXT, proposed_tokens),
            device=CPU,
        )
        cache_manager = KVCacheManager(model.kinds, (pages, pages), page_tokens=PAGE_TOKENS)
        self.scheduler = Scheduler(cache_manager, slots=slots, step_tokens=step_tokens)
        self.depth = depth
        self.results: dict[str, list[Sampled]] = {}

    def run(self, *requests: GenerationRequest) -> list[list[int]]:
        """The tokens of the answers."""
        sequences = [self.scheduler.add(request) for request in requests]
        flying: deque = deque()
        while self.scheduler.waiting or self.scheduler.running:
            plan = self.scheduler.plan()
            if plan is not None:
                flying.append((plan, self.runner.launch(plan)))
            if plan is None or len(flying) >= self.depth:
                self._retire(*flying.popleft())
        return [s.tokens[len(s.request.prompt) :] for s in sequences]

    def _retire(self, plan, launched) -> None:
        for advance in self.scheduler.retire(plan, self.runner.collect(launched)):
            self.results.setdefault(advance.sequence.request.id, []).append(advance.outcome)


def request(
    name: str, prompt: list[int], count: int, sampling: SamplingParams = GREEDY
) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), StopRules(count), sampling)


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_answer(model: TinyModel, asked: GenerationRequest) -> list[int]:
    """A dense pass for each token: repeat penalty, then argmax or the inverse CDF."""
    tokens, sampling = list(asked.prompt), asked.sampling
    for _ in range(asked.stop.max_tokens):
        logits = model.plain_logits(tokens)
        for token in set(tokens[-(sampling.repeat_last_n or len(tokens)) :]):
            scale = sampling.repeat_penalty
            logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        if sampling.temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        values, ids = logits.sort(descending=True)
        sums = (values[: sampling.top_k] / sampling.temperature).softmax(0).double().cumsum(0)
        noise = uniforms(torch.tensor([sampling.seed]), torch.tensor([len(tokens)]))
        tokens.append(int(ids[int((sums <= noise * sums[-1]).sum())]))
    return tokens[len(asked.prompt) :]


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.mark.parametrize("step_tokens", [4, 5, 17, 64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_equals_that_of_a_single_pass_over_the_prompt(model, step_tokens, depth):
    asked = request("r", prompt_of(1, 30), 12)
    [answer] = Bench(model, step_tokens=step_tokens, depth=depth).run(asked)
    assert answer == plain_answer(model, asked)
    assert len(set(answer)) > 3, "an answer that says nothing about the past"


MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, top_k=20, top_p=1.0, seed=3),
    replace(GREEDY, repeat_penalty=1.7, repeat_last_n=None),
    SamplingParams(temperature=0.7, top_k=5, top_p=1.0, seed=8, repeat_penalty=1.4),
    replace(GREEDY, repeat_penalty=3.0, repeat_last_n=6),
]


def crowd() -> list[GenerationRequest]:
    return [
        request(f"r{n}", prompt_of(n, 5 + 6 * (n % 5)), 10 + n, MIXED[n % len(MIXED)])
        for n in range(9)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_concurrent_requests_get_the_answers_of_single_passes(model, depth):
    requests = crowd()
    answers = Bench(model, depth=depth, step_tokens=16).run(*requests)
    assert answers == [plain_answer(model, asked) for asked in requests]


def test_answers_survive_preemption(model):
    requests = crowd()
    bench = Bench(model, depth=2, step_tokens=16, pages=24)
    answers = bench.run(*requests)
    assert bench.scheduler.preemptions > 0
    assert answers == [plain_answer(model, asked) for asked in requests]


def test_penalties_see_the_part_of_the_prompt_that_came_from_the_prefix_cache(model):
    prompt = prompt_of(2, 41)
    asked = request("b", prompt, 15, replace(GREEDY, repeat_penalty=2.5, repeat_last_n=None))
    bench = Bench(model)
    bench.run(request("a", prompt, 3))
    before = len(model.batches)
    [answer] = bench.run(asked)
    assert model.batches[before][0] < 41 // 2, "the prefix was computed again"
    assert answer == plain_answer(model, asked)
    assert answer != plain_answer(model, replace(asked, sampling=GREEDY))


def test_log_probabilities_belong_to_their_request(model):
    requests = [
        request("none", prompt_of(3, 9), 4),
        request("two", prompt_of(4, 12), 4, replace(GREEDY, logprobs=2)),
        request("own", prompt_of(5, 7), 4, SamplingParams(logprobs=0, seed=4)),
    ]
    bench = Bench(model)
    bench.run(*requests)
    assert all(s.logprob is None and s.top == () for s in bench.results["none"])
    for asked in requests[1:]:
        tokens = list(asked.prompt)
        for sampled in bench.results[asked.id]:
            expected = model.plain_logits(tokens).log_softmax(0)
            assert sampled.logprob == pytest.approx(float(expected[sampled.token]), abs=1e-4)
            logprobs, ids = expected.topk(asked.sampling.logprobs or 0)
            assert [best.token for best in sampled.top] == ids.tolist()
            got = [best.logprob for best in sampled.top]
            assert got == pytest.approx(logprobs.tolist(), abs=1e-4)
            tokens.append(sampled.token)


def test_chunks_that_do_not_draw_have_no_result(model):
    bench = Bench(model, step_tokens=8)
    bench.scheduler.add(request("r", prompt_of(6, 20), 2))
    plans = [bench.scheduler.plan() for _ in range(3)]
    results = [bench.runner.collect(bench.runner.launch(plan)) for plan in plans]
    assert results[:2] == [(None,), (None,)]
    assert isinstance(results[2][0], Sampled)


def test_logits_that_are_not_numbers_fail_their_own_request_alone(model):
    sane = [n % 7 for n in range(9)]
    neighbours = [request("sane", sane, 6), request("other", sane[::-1], 6, SamplingParams(seed=3))]
    expected = Bench(model).run(*neighbours)
    model.embedding[7] = torch.nan
    bench = Bench(model)
    broken = request("broken", [*sane, 7], 3, SamplingParams(seed=1, logprobs=2))
    answers = bench.run(neighbours[0], broken, neighbours[1])
    assert answers == [expected[0], [], expected[1]]
    [outcome] = bench.results["broken"]
    assert isinstance(outcome, DrawFailure) and "not finite" in outcome.reason


def test_a_model_without_finite_numbers_is_refused_at_start(model):
    model.embedding[:] = torch.nan
    with pytest.raises(ModelFileError, match="not finite"):
        Bench(model).runner.warm_up()


def test_warming_up_runs_the_largest_step_and_leaves_no_trace(model):
    bench = Bench(model, slots=3, step_tokens=40)
    bench.runner.warm_up()
    assert model.batches == [(40, 3), (3, 3), (1, 1)]
    for index in range(2):
        pages = bench.pool.layer(index)
        assert pages.keys[:-1].abs().sum() == pages.values[:-1].abs().sum() == 0
    requests = crowd()
    assert bench.run(*requests) == [plain_answer(model, asked) for asked in requests]


def test_warming_up_draws_as_many_rows_as_proposals_may_need(model):
    bench = Bench(model, slots=2, step_tokens=40, proposed_tokens=6)
    bench.runner.warm_up()
    assert model.batches == [(40, 7), (7, 7), (1, 1)]
    requests = crowd()
    assert bench.run(*requests) == [plain_answer(model, asked) for asked in requests]


def test_warming_up_reaches_the_end_of_the_context_with_every_slot(model):
    seen = []

    class Watching(TinyModel):
        def states(self, batch: Batch, cache: KVCache) -> Tensor:
            ends = {span.slot: span.start + span.end - span.begin for span in batch.plans[0].spans}
            seen.append(ends)
            return super().states(batch, cache)

    Bench(Watching(), slots=4, step_tokens=64).runner.warm_up()
    Bench(Watching(), slots=2, step_tokens=3 * CONTEXT).runner.warm_up()
    ends = [dict.fromkeys(range(slots), CONTEXT - 1) for slots in (4, 4, 1, 2, 2, 1)]
    assert seen == ends


def test_warming_up_may_allocate_the_memory_of_the_largest_step_instead_of_running_it(model):
    bench = Bench(model, slots=3, step_tokens=40)
    with recorded_memory() as recorded:
        bench.runner.warm_up(workspace_bytes=50_000_000)
    assert model.batches == [(1, 1)] and peak_bytes(recorded) >= 50_000_000
    with pytest.raises(DoesNotFitError, match=r"allocate.*step_tokens"):
        bench.runner.warm_up(workspace_bytes=2**52)


@pytest.mark.parametrize("workspace_bytes", [None, 1000])
def test_images_are_in_the_largest_step_of_the_warm_up_only(workspace_bytes):
    """A decode step with an image could not be recorded."""
    seen = []

    class Watching(TinyModel):
        def states(self, batch: Batch, cache: KVCache) -> Tensor:
            seen.append(batch.image_features is not None)
            return super().states(batch, cache)

    limits = ImageLimits(4, ImageOutline((4,), (1, 4), 4), 8, torch.float32)
    Bench(Watching()).runner.warm_up(limits, workspace_bytes=workspace_bytes)
    assert seen == ([True, False, False] if workspace_bytes is None else [False])


@pytest.mark.parametrize("bytes_wanted", [None, 2**52])
def test_too_little_memory_for_the_largest_step_is_refused_at_start(bytes_wanted):
    class Greedy(TinyModel):
        def states(self, batch: Batch, cache: KVCache) -> Tensor:
            if bytes_wanted is not None:
                return torch.empty(bytes_wanted, dtype=torch.uint8)
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    with pytest.raises(DoesNotFitError, match=r"allocate.*step_tokens"):
        Bench(Greedy()).runner.warm_up()


def test_other_failures_at_warm_up_are_not_replaced():
    class Broken(TinyModel):
        def states(self, batch: Batch, cache: KVCache) -> Tensor:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        Bench(Broken()).runner.warm_up()


def test_warming_up_after_a_step_is_a_bug(model):
    bench = Bench(model)
    bench.run(request("r", [1, 2, 3], 2))
    with pytest.raises(AssertionError):
        bench.runner.warm_up()


def test_a_sequence_may_fill_its_context_to_the_last_token(model):
    asked = request("r", prompt_of(7, CONTEXT - 5), 5)
    bench = Bench(model, depth=2)
    assert bench.run(asked) == [plain_answer(model, asked)]


def test_sequence_in_a_reused_slot_does_not_see_the_one_before(model):
    bench = Bench(model, slots=1)
    requests = [request("long", prompt_of(8, 50), 20), request("short", prompt_of(9, 3), 20)]
    assert bench.run(*requests) == [plain_answer(model, asked) for asked in requests]
