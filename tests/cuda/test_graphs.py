"""Steps give the same tokens with CUDA graphs as without, on a device that computes as late as
possible; and operations that cannot be captured are refused."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from runtime.engine.assembly import assemble
from runtime.engine.engine import Engine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import Delta, GenerationRequest, SamplingParams, StopRules
from runtime.engine.step_plan import StepPlan
from runtime.kernels import attention
from runtime.kv.cache_kinds import CacheKind, Full, Sliding
from runtime.kv.cache_layout import LayerCache
from runtime.kv.cache_types import CacheType
from runtime.vision.encoder import LocalEncoder
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import AttentionPlan, Batch, KVCache, LayerPages, RowForm
from runtime.worker.pinned_buffer import PinnedBuffer
from runtime.worker.step_graphs import (
    GraphRecorder,
    graph_sizes,
    padded_rows,
    padded_span,
    span_sizes,
)
from runtime.worker.step_results import Launched
from tests.cuda.computing_device import ComputingCuda
from tests.cuda.fake_device import DEVICE, CaptureError, FakeCuda, fake_cuda
from tests.cuda.test_masks import Only
from tests.unit.runtime.engine.flat_costs import Costs

VOCABULARY, WIDTH, CONTEXT, SLOTS = 61, 8, 96, 6
ONE_SPAN = RowForm.ONE_SPAN
WITHOUT_KERNELS = (7, 0)  # a capability for which the torch twins compute


def attention_by_rows(
    queries: Tensor, pages: LayerPages, plan: AttentionPlan, scoring: attention.Scoring
) -> Tensor:
    """As the twin, but without the spans of rows on the host."""
    row = torch.arange(len(queries), device=queries.device).unsqueeze(1)
    width = plan.page_table.shape[1]
    indices = torch.arange(width, device=queries.device).expand(len(queries), width)
    return attention._attend(queries[row], pages, plan, row, indices, scoring)[:, 0]


@pytest.fixture(autouse=True)
def without_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "paged_attention_twin", attention_by_rows)


@pytest.fixture
def fake() -> Iterator[ComputingCuda]:
    with fake_cuda(ComputingCuda(), WITHOUT_KERNELS) as device:
        assert isinstance(device, ComputingCuda)
        yield device


class TinyModel:
    """Two attention layers, one of them with a window."""

    vocab_size, hidden_size, context_length, position_axes = VOCABULARY, WIDTH, CONTEXT, 1
    causal = generates = True
    weight_bytes = 1000
    kinds: tuple[CacheKind, ...] = (Full(), Sliding(7))
    cache_layers = tuple(LayerCache(kind, 1, WIDTH, WIDTH) for kind in kinds)
    cache_devices = layer_devices = key_rotations = None
    source_layers = (0, 1)

    def __init__(self, seed: int = 9) -> None:
        draw = torch.Generator().manual_seed(seed)
        sizes = (VOCABULARY, WIDTH), (CONTEXT, WIDTH), (WIDTH, VOCABULARY)
        parts = [torch.randn(*size, generator=draw).to(DEVICE) for size in sizes]
        self.embedding, self.places, self.head = parts

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        x = self.embedding[batch.tokens] + self.places[batch.positions]
        for index in range(2):
            pages = cache.layer(index)
            plan = batch.plans[pages.group]
            heads = x.unsqueeze(1)
            attention.write_cache_twin(heads, heads.roll(1, dims=2), pages, plan)
            x = x + attention_by_rows(heads, pages, plan, attention.Scoring(0.5))[:, 0]
        return x[batch.output_rows]

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.head

    def weight_bytes_on(self, device: torch.device) -> int:
        return self.weight_bytes

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        return 1000 * (tokens + outputs)


@dataclass
class Answers:
    """By request; and what the schedule was like."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cached: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, name: str, delta: Delta) -> None:
        assert delta.error is None
        self.tokens[name] = self.tokens.get(name, ()) + delta.tokens
        if delta.finish is not None:
            self.cached += delta.usage.cached_tokens


def engine_of(model, *, graphs: bool, depth: int = 2, draft=None, **options) -> Engine:
    given = {
        "context_tokens": CONTEXT, "max_sequences": SLOTS, "step_tokens": 24, "page_tokens": 4,
        "cache_tokens": CONTEXT, "memory_bytes": 1 << 34, "kv_dtype": CacheType.FLOAT32,
        "host_cache_bytes": 0,
    }  # fmt: skip
    engine, memory = assemble(
        model, lambda token: b"t", device=DEVICE,
        options=EngineOptions(**given | options, depth=depth, cuda_graphs=graphs), draft=draft,
    )  # fmt: skip
    assert (memory.recorded_bytes > 0) == graphs
    return engine._engine


def requests_of(count: int, vocabulary: int) -> list[GenerationRequest]:
    """Prompts that share prefixes, and every path of the sampler."""
    draw = random.Random(5)
    ways = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, seed=1, logprobs=2),
        SamplingParams(top_k=0, top_p=0.8, seed=2, repeat_penalty=1.2),
        SamplingParams(top_k=0, top_p=1.0, seed=3),
    ]
    shared = [draw.randrange(vocabulary) for _ in range(20)]
    made = []
    for number in range(count):
        own = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 8))]
        prompt = (*shared[: draw.choice([0, 8])], *own)
        stop = StopRules(draw.randint(1, 24))
        made.append(GenerationRequest(f"{number}", prompt, stop, draw.choice(ways)))
    return made


def run(engine: Engine, requests: list[GenerationRequest]) -> Answers:
    """The requests arrive while others are answered, in bursts."""
    draw, found, waiting = random.Random(11), Answers(), list(requests)
    launch = engine._runner.launch

    def noted(plan: StepPlan) -> Launched:
        found.rows.append(sum(chunk.length for chunk in plan.chunks))
        return launch(plan)

    engine._runner.launch = noted
    while engine.unfinished or waiting:
        for _ in range(draw.choice([0, 0, 0, 1, 4]) if engine.unfinished else 3):
            if waiting:
                request = waiting.pop()
                deliver = lambda delta, name=request.id: found.add(name, delta)  # noqa: E731
                engine.add(request, deliver, arrived=0)
        engine.step()
    return found


@cache
def without_graphs(count: int) -> Answers:
    """What several tests expect: of the model, which the device of the first of them computes."""
    return run(engine_of(TinyModel(), graphs=False), requests_of(count, VOCABULARY))


def test_tokens_are_those_without_graphs(fake: ComputingCuda) -> None:
    """With sequences that join, end, are preempted and have cached prefixes."""
    requests, expected = requests_of(9, VOCABULARY), without_graphs(9)
    assert not fake.graphs
    engine = engine_of(TinyModel(), graphs=True)
    # The warm-up's: the largest prompt, whose memory the others use, all slots, and one.
    recorded = engine._runner._recorded._recordings
    assert [(key.form is ONE_SPAN, key.rows) for key in recorded] == [
        (True, 24),
        (False, 6),
        (False, 1),
    ]
    assert not any(graph.replays for graph in fake.graphs)
    found = run(engine, requests)
    assert found.tokens == expected.tokens and len(found.tokens) == len(requests)
    assert found.cached == expected.cached > 0 and engine.statistics().preemptions_total > 0
    _, *graphs = fake.graphs  # no prompt is alone
    assert len(graphs) == len(graph_sizes(SLOTS)) == 4  # each size once
    assert all(graph.replays for graph in graphs)
    assert len({graph.pool for graph in fake.graphs}) == 1
    assert {3, 5} <= set(found.rows)  # steps with a row of padding


def test_prompts_alone_are_captured_with_padding(fake: ComputingCuda) -> None:
    """Also those that begin behind a cached prefix, or take several steps. A graph is used again
    for any number of rows that is not above its own."""
    model, requests = TinyModel(), requests_of(9, VOCABULARY)
    long = tuple(number % VOCABULARY for number in range(62))  # in steps of 24, 24 and 14
    requests.append(GenerationRequest("long", long, StopRules(9), SamplingParams(temperature=0)))

    def apart(engine: Engine) -> Answers:
        found = Answers()
        for request in requests:
            engine.add(request, lambda delta, of=request: found.add(of.id, delta), arrived=0)
            while engine.unfinished:
                engine.step()
        return found

    expected = apart(engine_of(model, graphs=False))
    engine = engine_of(model, graphs=True)
    recorded = engine._runner._recorded._recordings
    assert apart(engine) == expected and expected.cached > 0
    spans = {key.rows: each._graph for key, each in recorded.items() if key.form is ONE_SPAN}
    assert {*spans} == {16, 24} and all(graph.replays for graph in spans.values())


@pytest.mark.parametrize(("graphs", "seed"), [(True, 9), (False, 2)])
def test_tokens_are_those_without_a_draft_model(
    graphs: bool, seed: int, fake: ComputingCuda
) -> None:
    """The steps of both models are on one stream. With the seed of the model, drafts are right."""
    requests, expected = requests_of(3, VOCABULARY), without_graphs(3)
    engine = engine_of(
        TinyModel(), graphs=graphs, draft=TinyModel(seed), ngram=False, proposed_tokens=5,
        max_sequences=2,
    )  # fmt: skip
    speculation = engine._scheduler.speculation
    drafter = speculation._drafts.drafter
    speculation._costs, drafter.costs = Costs(1.0), Costs(0.0)
    assert run(engine, requests).tokens == expected.tokens
    totals = engine.statistics()
    accepted, drafted = totals.accepted_drafts_total, totals.drafted_tokens_total
    assert accepted > 0.9 * drafted > 9 if seed == 9 else drafted > 2 * accepted


@pytest.mark.parametrize("slots", [SLOTS, 16])
def test_answers_follow_a_grammar(slots: int, fake: ComputingCuda) -> None:
    """Whose masks have rows for some proposed tokens, too: an odd number, and an even one."""
    engine = engine_of(TinyModel(), graphs=True, max_sequences=slots, proposed_tokens=8)
    greedy, last = SamplingParams(temperature=0), VOCABULARY - 1
    request = GenerationRequest("0", (1, 2, 3), StopRules(6), greedy, grammar=Only(last))
    assert run(engine, [request]).tokens == {"0": (last,) * 6}


@pytest.mark.unfinished("a step may read a page that does not exist, and fail")
def test_a_device_that_is_late_shows_inputs_that_are_overwritten(
    fake: ComputingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing waits for the uploads of earlier steps: the test above can fail."""
    model, requests = TinyModel(), requests_of(3, VOCABULARY)
    expected = run(engine_of(model, graphs=True, depth=3), requests)
    monkeypatch.setattr(PinnedBuffer, "wait", lambda buffer: None)
    try:
        found = run(engine_of(model, graphs=True, depth=3), requests)
    except IndexError:  # a page that does not exist
        return
    assert found.tokens != expected.tokens


def test_a_computation_that_reads_host_memory_is_not_captured(
    fake: ComputingCuda, caplog: pytest.LogCaptureFixture
) -> None:
    model, requests, expected = TinyModel(), requests_of(3, VOCABULARY), without_graphs(3)
    states, one = model.states, torch.ones(1)
    model.states = lambda batch, cache: states(batch, cache) * one.to(DEVICE, non_blocking=True)
    caplog.set_level("INFO")
    assert run(engine_of(model, graphs=True), requests).tokens == expected.tokens
    assert not any(graph.replays for graph in fake.graphs)
    assert [record.message for record in caplog.records if "host memory" in record.message]


def test_a_capture_without_memory_costs_no_request(
    fake: ComputingCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool may be too small for a number of rows that the warm-up has not captured."""
    model, requests, expected = TinyModel(), requests_of(9, VOCABULARY), without_graphs(9)
    engine = engine_of(model, graphs=True)
    states = model.states

    def lacking(batch: Batch, cache: KVCache) -> Tensor:
        if fake.captures and len(batch.positions) == 4:
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")
        return states(batch, cache)

    model.states = lacking
    caplog.set_level("INFO")
    assert run(engine, requests).tokens == expected.tokens
    assert engine._runner.recorded_rows == {1, 2, 6}
    assert [record.message for record in caplog.records if "7 GiB" in record.message]


def test_captures_are_on_no_stream_that_encoders_of_other_models_use(
    fake: ComputingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hands out 32 streams of each priority in turn, so some of many models share one."""
    numbers, entered = Counter[int](), list[tuple[int, int]]()

    def next_stream(device: torch.device, priority: int = 0) -> tuple[int, int]:
        numbers[priority] += 1
        return priority, numbers[priority] % 32

    monkeypatch.setattr(torch.cuda, "Stream", next_stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda of: entered.append(of) or nullcontext())
    recorder = GraphRecorder(StepLimits(2, 2, 4), DEVICE)
    streams = {LocalEncoder(None, device=DEVICE, weight_bytes=0)._stream for _ in range(40)}
    graph, _ = recorder.record(lambda: torch.ones(4, device=DEVICE))
    assert graph is not None and len(streams) == 32
    assert entered and streams.isdisjoint(entered)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.add_(torch.ones(4).to(DEVICE)),
        lambda x: x.copy_(torch.ones(4, pin_memory=True), non_blocking=True),
    ],
)
def test_the_fake_device_captures_no_copies_and_no_waiting(forbidden) -> None:
    with fake_cuda() as device, torch.inference_mode():
        x, graph = torch.ones(4, device=DEVICE), torch.cuda.CUDAGraph()
        graph.capture_begin(torch.cuda.graph_pool_handle(), "thread_local")
        with pytest.raises((CaptureError, AssertionError)):
            forbidden(x)
        graph.capture_end()
        assert isinstance(device, FakeCuda)


def test_graphs_exist_for_few_numbers_of_rows_close_to_any_number() -> None:
    assert graph_sizes(1) == (1,) and graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    for slots in (1, 16, 100, 256, 1000):
        sizes = graph_sizes(slots)
        for count in range(1, max(sizes) + 1):
            rows = padded_rows(count, slots)
            assert rows is not None and count <= rows < count + 8 and rows in sizes
            assert padded_rows(rows, slots) == rows
    assert padded_rows(257, 1000) is None and len(graph_sizes(1000)) == 35


def test_graphs_of_prompts_have_no_row_of_padding_that_is_alone() -> None:
    assert span_sizes(1) == () and span_sizes(2) == (2,) and span_sizes(20) == (16, 20)
    assert span_sizes(100) == (16, 32, 64, 100)
    assert span_sizes(2048) == (16, 32, *range(64, 513, 64))
    for most in (2, 20, 100, 512, 2048):
        for count in range(2, most + 1):
            rows = padded_span(count, most)
            padding = 0 if rows is None else rows - count
            assert padding == 0 or (padding > 1 and rows in span_sizes(most))
            assert rows is not None or count > 512 or count + 1 == min(most, 512)
