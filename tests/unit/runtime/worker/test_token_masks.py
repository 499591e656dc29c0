"""Masks of a grammar: which tokens are drawn, and that other rows are not affected."""

import itertools
import random
import threading
from collections.abc import Sequence as Several
from concurrent import futures
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.engine.request import DrawFailure, SamplingParams
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk
from runtime.errors import GenerationFailedError
from runtime.kernels.draws import draw_top_twin, forbid_twin
from runtime.worker import mask_worker, sampler
from runtime.worker.mask_worker import MaskWorker
from runtime.worker.sampler import Drawn, Sampler, TokenMasks, path_of
from tests.patience import HANG_S
from tests.unit.runtime.engine.random_proposals import RandomProposals
from tests.unit.runtime.worker.loaded_slots import load_slots
from tests.unit.runtime.worker.test_runner import GREEDY, VOCAB, Bench, TinyModel, prompt_of
from tests.unit.runtime.worker.test_runner import request as request_of
from tests.unit.runtime.worker.test_sampler import CPU, draws_of

# One of each path, and the ways to change logits.
SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(top_k=0, top_p=0.9, repeat_penalty=1.3, frequency_penalty=-2.0),
    SamplingParams(temperature=3.0, top_k=0, top_p=1.0, logprobs=3),
]
CONTEXT = 16


@pytest.fixture(autouse=True, params=["native", "torch"])
def drawing(request, monkeypatch) -> None:
    """Both ways to draw the most likely tokens, and to forbid others."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "draw_top", draw_top_twin)
        monkeypatch.setattr(sampler, "forbid", forbid_twin)


def packed(allowed: Tensor) -> Tensor:
    """allowed [rows, vocab] bool -> the words of `TokenMasks`, by numpy."""
    padded = np.pad(allowed.numpy(), ((0, 0), (0, -allowed.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def drawn(
    logits: Tensor, sampling: list[SamplingParams], order: list[int], masks: TokenMasks | None
) -> Drawn:
    """Row r belongs to slot r and draws the token after its first one."""
    rows, vocab = logits.shape
    drawing = Sampler(slots=rows, context_tokens=CONTEXT, vocab_size=vocab, device=CPU)
    load_slots(drawing, sampling, tokens=[[slot] for slot in range(rows)])
    return drawing.sample(logits[order], draws_of(sampling, [1] * rows, order, vocab), masks)


@pytest.mark.parametrize("vocab", [31, 64, 1000])
def test_only_allowed_tokens_are_drawn_and_other_rows_do_not_change(vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    rows = len(SAMPLING)
    for seed in range(40):
        sampling = [replace(each, seed=seed) for each in SAMPLING]
        order = sorted(range(rows), key=lambda row: path_of(sampling[row], vocab))
        logits = torch.randn(rows, vocab, generator=draw) * 8
        masked = torch.randperm(rows, generator=draw)[: 1 + seed % rows].sort().values
        allowed = torch.rand(len(masked), vocab, generator=draw) < 0.1
        allowed[:, seed % vocab] = True
        masks = TokenMasks(masked, packed(allowed), len(masked))
        free, bound = (drawn(logits, sampling, order, each) for each in (None, masks))
        for row in range(rows):
            token = int(bound.tokens[row])
            place = (masked == row).nonzero().flatten()
            if len(place):
                assert allowed[place[0], token]
            else:
                assert token == int(free.tokens[row])
        assert bool(bound.finite.all())
        assert torch.equal(bound.scores.top_logprobs, free.scores.top_logprobs)  # of the raw logits
        scored = logits[3].log_softmax(0)
        assert bound.scores.logprobs[0] == pytest.approx(
            float(scored[bound.tokens[order.index(3)]]), abs=1e-4
        )


@pytest.mark.parametrize("path", range(len(SAMPLING)))
def test_the_number_of_allowed_tokens_may_be_anything(path: int) -> None:
    """The tokens are those of the allowed logits alone; forbidden ones may be NaN."""
    vocab = 200
    sampling = [replace(SAMPLING[path], seed=seed, logprobs=None) for seed in range(4)]
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(path))
    allowed = torch.rand(4, vocab, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[:2] = False
    allowed[1, 77] = True
    masks = TokenMasks(torch.arange(4), packed(allowed), 4)
    forbidden = logits.where(allowed, -torch.inf)
    expected = drawn(forbidden, sampling, [0, 1, 2, 3], None)
    got = drawn(logits.where(allowed, torch.nan), sampling, [0, 1, 2, 3], masks)
    assert got.finite.tolist() == [False, True, True, True]
    assert torch.equal(got.tokens, expected.tokens)
    assert got.tokens[1] == 77


class Ascending:
    """Allows tokens above the last one, modulo the vocabulary's size, by at most ten."""

    free = 0

    def __init__(self, fails_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.fails_at = fails_at

    def matcher(self) -> "Ascending":
        return Ascending(self.fails_at)

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def tokens_allowed(self) -> list[int]:
        last = self.tokens[-1] if self.tokens else 0
        return [(last + step) % VOCAB for step in range(1, 11)]

    def acceptable(self, tokens: Several[int]) -> int:
        return len(tokens)  # whatever they are

    def look_ahead(self, tokens: Several[int], masks: Several[memoryview]) -> None:
        ahead = Ascending()
        ahead.tokens = list(self.tokens)
        for token, mask in zip(tokens, masks, strict=True):
            if token not in ahead.tokens_allowed():
                break
            ahead.accept(token)
            ahead.allowed(mask)

    def allowed(self, mask: memoryview) -> None:
        if len(self.tokens) == self.fails_at:
            raise GenerationFailedError("too hard")
        allowed = torch.zeros(1, 32 * len(mask), dtype=torch.bool)
        allowed[0, self.tokens_allowed()] = True
        mask[:] = packed(allowed).numpy()[0].data


def masked_answer(model: TinyModel, prompt: list[int], count: int) -> list[int]:
    tokens, grammar = list(prompt), Ascending()
    for _ in range(count):
        logits = model.plain_logits(tokens)
        best = max(grammar.tokens_allowed(), key=lambda token: float(logits[token]))
        tokens.append(best)
        grammar.accept(best)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_answers_follow_their_grammars_beside_free_ones(depth: int) -> None:
    model = TinyModel()
    free = request_of("free", prompt_of(2, 11), 12)
    bound = [
        replace(request_of(f"bound{n}", prompt_of(n, 9 + n), 12), grammar=Ascending())
        for n in range(2)
    ]
    answers = Bench(model, depth=depth).run(free, *bound)
    assert answers[0] == Bench(model).run(free)[0]
    for answer, asked in zip(answers[1:], bound, strict=True):
        assert answer == masked_answer(model, list(asked.prompt), 12)


def test_a_grammar_that_fails_ends_its_sequence_only() -> None:
    model = TinyModel()
    bench = Bench(model, depth=2)
    failing = replace(request_of("bad", prompt_of(1, 5), 9), grammar=Ascending(fails_at=3))
    free = request_of("free", prompt_of(2, 5), 9, GREEDY)
    answers = bench.run(failing, free)
    assert answers == [masked_answer(model, prompt_of(1, 5), 3), Bench(model).run(free)[0]]
    assert bench.results["bad"][-1] == DrawFailure("too hard")


def test_a_grammar_without_a_possible_token_ends_its_sequence_only() -> None:
    class Nothing(Ascending):
        def matcher(self) -> "Nothing":
            return Nothing()

        def allowed(self, mask: memoryview) -> None:
            pass

    model = TinyModel()
    bench = Bench(model, depth=2)
    free = request_of("free", prompt_of(2, 5), 9, GREEDY)
    answers = bench.run(replace(request_of("none", prompt_of(1, 5), 9), grammar=Nothing()), free)
    assert answers == [[], Bench(model).run(free)[0]]
    assert isinstance(bench.results["none"][-1], DrawFailure)


class Slow(Ascending):
    """Its third mask takes until `released`."""

    def __init__(self, released: threading.Event) -> None:
        super().__init__()
        self.released = released

    def matcher(self) -> "Slow":
        return Slow(self.released)

    def allowed(self, mask: memoryview) -> None:
        if len(self.tokens) == 2:
            assert self.released.wait(HANG_S)
        super().allowed(mask)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slow_mask_holds_up_its_own_sequence_only(depth: int) -> None:
    """The other ones end before it is known, also one whose masks are behind it."""
    model, released = TinyModel(), threading.Event()
    bench = Bench(model, depth=depth)
    slow = replace(request_of("slow", prompt_of(1, 9), 12), grammar=Slow(released))
    bound = replace(request_of("bound", prompt_of(2, 10), 12), grammar=Ascending())
    free = request_of("free", prompt_of(3, 11), 12)
    retire = bench._retire

    def noted(plan, launched) -> None:
        retire(plan, launched)
        ended = all(len(bench.results.get(name, ())) == 12 for name in ("bound", "free"))
        if ended and not released.is_set():
            assert len(bench.results["slow"]) == 2
            released.set()

    bench._retire = noted  # type: ignore[method-assign]
    answers = bench.run(slow, bound, free)
    assert answers == [
        masked_answer(model, prompt_of(1, 9), 12),
        masked_answer(model, prompt_of(2, 10), 12),
        Bench(model).run(free)[0],
    ]


def test_a_model_that_computes_no_position_twice_waits_for_slow_masks(monkeypatch) -> None:
    released = threading.Event()

    def wait(works, timeout=None, **options):
        if timeout is None:
            released.set()
        return futures.wait(works, timeout, **options)

    monkeypatch.setattr(mask_worker, "wait", wait)
    sequence = Sequence(replace(request_of("slow", [1], 3), grammar=Slow(released)), [1, 2, 3])
    chunk = Chunk(sequence, 0, 0, 2, 1, (3,), feedback=False, samples=True)
    for waits in (False, True):
        worker = MaskWorker(rows=2, vocab_size=VOCAB, device=CPU, waits=waits)
        pending = worker.begin({0: chunk}, step_chunks=2)
        assert pending is not None
        masks, unmasked = pending.uploaded()
        assert (masks.count, len(unmasked)) == ((1, 0) if waits else (0, 1))


class Periodic:
    """Allows token 7 only in every fourth place, and any token elsewhere."""

    def __init__(self) -> None:
        self.accepted = self.masks = 0

    @property
    def free(self) -> int:
        return 3 - self.accepted % 4

    def matcher(self) -> "Periodic":
        return self

    def accept(self, token: int) -> None:
        assert token == 7 or self.free
        self.accepted += 1

    def allowed(self, mask: memoryview) -> None:
        self.masks += 1
        self._write(mask, self.accepted)

    def acceptable(self, tokens: Several[int]) -> int:
        return len(tokens)

    def look_ahead(self, tokens: Several[int], masks: Several[memoryview]) -> None:
        for place, mask in enumerate(masks, self.accepted + 1):
            self._write(mask, place)

    def _write(self, mask: memoryview, place: int) -> None:
        allowed = torch.zeros(1, 32 * len(mask), dtype=torch.bool)
        allowed[0, 7 if place % 4 == 3 else slice(None)] = True
        mask[:] = packed(allowed).numpy()[0].data


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("proposes", [False, True])
def test_tokens_that_need_no_mask_have_none(depth: int, proposes: bool) -> None:
    model, count = TinyModel(), 24
    grammars = [Periodic() for _ in range(3)]
    requests = [
        replace(request_of(f"r{n}", prompt_of(n, 9 + n), count), grammar=grammar)
        for n, grammar in enumerate(grammars)
    ]
    answers = {}
    for asked in requests:
        tokens = list(asked.prompt)
        for place in range(count):
            best = int(model.plain_logits(tokens).argmax())
            tokens.append(7 if place % 4 == 3 else best)
        answers[asked.id] = tokens[len(asked.prompt) :]
    bench = Bench(model, depth=depth, slots=12)
    if proposes:
        bench.scheduler.speculation = RandomProposals(
            random.Random(1), draws=12, right=lambda r: answers[r.id]
        )
    assert bench.run(*requests) == list(answers.values())
    masks = [grammar.masks for grammar in grammars]
    assert masks == [count // 4] * 3 or (proposes and max(masks) < count)


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_follow_their_grammars_with_proposals(depth: int) -> None:
    """Also while a mask is late: its sequence then has neither its token nor the proposed ones."""
    model, released = TinyModel(), threading.Event()
    requests = [
        replace(request_of(f"r{n}", prompt_of(n, 9 + n), 25), grammar=Ascending()) for n in range(2)
    ]
    requests.append(replace(request_of("slow", prompt_of(5, 9), 25), grammar=Slow(released)))
    answers = {r.id: masked_answer(model, list(r.prompt), 25) for r in requests}
    bench = Bench(model, depth=depth, slots=12)
    bench.scheduler.speculation = RandomProposals(
        random.Random(3), draws=12, right=lambda r: answers[r.id]
    )
    steps = itertools.count()
    retire = bench._retire

    def noted(plan, launched) -> None:
        retire(plan, launched)
        if next(steps) == 5:
            released.set()

    bench._retire = noted  # type: ignore[method-assign]
    assert bench.run(*requests) == [answers[r.id] for r in requests]
    scheduler = bench.scheduler
    assert 20 < scheduler.accepted_tokens < scheduler.proposed_tokens - 5
