"""A draft model changes no token and no log-probability, whatever it proposes, to the bit on a CPU.

Drafts of the model itself are right, even if they are drawn at random; drafts of a model with other
weights are mostly wrong, and some drafts of a rounded copy are right.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.grammars.token_grammar import TokenGrammars
from model_zoo.registry import load
from runtime.engine.assembly import plan_engine_memory
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import MemoryPlan
from runtime.engine.request import ContextShift, FinishReason, GenerationRequest, StopRules
from runtime.errors import ConfigurationError, DoesNotFitError
from tests.families.engine_runs import CPU, answers, mixed_requests, running
from tests.families.text_families import TEXT_MODELS
from tests.parity.test_speculation import (
    PROPOSED,
    STATEFUL,
    check,
    loaded,
    requests_for,
)
from tests.tiny_models import write_tiny
from tests.unit.runtime.engine.flat_costs import Costs

# Those with one kind of cache, with windows, and with chunks.
FAMILIES = ("llama", "gemma3", "llama4")


@dataclass(frozen=True)
class Drafted:
    """An engine with a draft model, whose drafts always pay."""

    engine: AsyncEngine

    @property
    def counts(self) -> tuple[int, int]:
        """Drafted tokens: those that were right, and those that were wrong."""
        totals = self.engine._engine.statistics()
        assert totals.drafted_tokens_total == totals.proposed_tokens_total
        assert totals.accepted_drafts_total == totals.accepted_tokens_total
        accepted = totals.accepted_drafts_total
        return accepted, totals.drafted_tokens_total - accepted


@contextmanager
def drafting(model: ChatModel, draft: ChatModel, **options) -> Iterator[Drafted]:
    options = {"proposed_tokens": PROPOSED, "ngram": False, **options}
    with running(model, draft=draft, **options) as engine:
        scheduler = engine._engine._scheduler
        speculation = scheduler.speculation
        drafter = speculation._drafts.drafter
        speculation._costs, drafter.costs = Costs(1.0), Costs(0.0)
        yield Drafted(engine)


def plain_answers(model: ChatModel, requests: Sequence[GenerationRequest], **options):
    with running(model, **options) as engine:
        return answers(engine, requests, together=True)


def other(family: str, folder: Path, *, seed: int = 7, **options) -> ChatModel:
    """A model of the family with other random weights, or with options of `write_tiny`."""
    path = folder / "other.gguf"
    row = TEXT_MODELS[family]
    write_tiny(path, row.config(), seed=seed, **{**row.options, **options})
    return load(path, device=CPU, dtype=torch.float32)


# Steps overlap; with more sequences, drafts would then not pay.
WAYS = {"one at a time": {"depth": 1, "max_sequences": 5}, "two": {"depth": 2, "max_sequences": 2}}
# How steps overlap is the same for all families, so that each has one way, and one has both.
FAMILIES_AND_WAYS = [("llama", "two"), *zip(FAMILIES, cycle(WAYS), strict=False)]


@pytest.mark.parametrize(("family", "way"), FAMILIES_AND_WAYS)
def test_answers_are_those_without_drafts(family: str, way: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    requests = requests_for(model.tokenizer.vocab_size)
    plain = plain_answers(model, requests)
    for draft, right in ((model, True), (other(family, tmp_path), False)):
        with drafting(model, draft, **WAYS[way]) as drafted:
            check(answers(drafted.engine, requests, together=True), plain)
            accepted, wrong = drafted.counts
        assert accepted > 20 * wrong if right else wrong > 5, (accepted, wrong, right)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> ChatModel:
    return loaded("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def rounded(tmp_path_factory) -> ChatModel:
    """The same weights, in fewer bits."""
    return other("llama", tmp_path_factory.mktemp("rounded"), seed=0, type="bf16")


@pytest.mark.parametrize(
    "options",
    [
        {"max_sequences": 3, "cache_tokens": 256, "page_tokens": 8},  # preemption
        {"max_sequences": 3, "cache_tokens": 256, "prefix_cache": False},
        {"max_sequences": 2, "step_tokens": 9},  # chunks of prompts, of both models
        {"max_sequences": 2, "depth": 3},
        {"max_sequences": 2, "ngram": True},
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_drafts_survive_what_happens_to_sequences(options, llama, rounded) -> None:
    """Shared prefixes, prompts in chunks, few pages, and every way to sample."""
    count = 24 if "page_tokens" in options else 12  # fewer fit into few pages
    requests = mixed_requests(llama.tokenizer.vocab_size)[:count]
    plain = plain_answers(llama, requests)
    with drafting(llama, rounded, **options) as drafted:
        check(answers(drafted.engine, requests, together=True), plain)
        totals = drafted.engine._engine.statistics()
    assert totals.accepted_drafts_total > 30
    assert totals.preemptions_total > 0 or "cache_tokens" not in options


def test_the_budget_of_steps_contains_drafts(llama, rounded) -> None:
    requests = requests_for(llama.tokenizer.vocab_size)
    with drafting(llama, rounded, target_gap_ms=5.0) as drafted:
        budget = drafted.engine._engine._scheduler.step_budget
        noted, note = [], budget.note_drafts
        budget.note_drafts = lambda took_ns: (noted.append(took_ns), note(took_ns))
        answers(drafted.engine, requests, together=True)
    assert noted and min(noted) > 0


def test_answers_end_and_follow_grammars_as_without_drafts(llama, rounded) -> None:
    lark = 'start: "[" item ("," item)* "]"\nitem: /"[a-z ]{2,9}"/ | /[1-9][0-9]{0,3}/'
    compiled, ends = TokenGrammars(llama.tokenizer).compile(lark), llama.tokenizer.end_tokens
    asked = requests_for(llama.tokenizer.vocab_size)
    whole = plain_answers(llama, asked)
    requests = []
    for request, delta in zip(asked, whole, strict=True):
        last = llama.tokenizer.token_bytes(delta.tokens[7]).decode(errors="replace")[-1:] or "?"
        stop = replace(request.stop, strings=(last,), min_tokens=4)
        free = replace(request.sampling, allowed=b"")
        constrained = replace(request, sampling=free, stop=StopRules(40, ends), grammar=compiled)
        ended = replace(request.stop, end_tokens=frozenset([delta.tokens[9]]))
        requests += [
            replace(request, stop=stop),
            replace(constrained, id=f"g{request.id}"),
            replace(request, id=f"e{request.id}", stop=ended),
        ]
    plain = plain_answers(llama, requests)
    assert sum(delta.finish is FinishReason.STOP for delta in plain) > 2 * len(asked)
    for draft in (llama, rounded):
        with drafting(llama, draft, max_sequences=3) as drafted:
            check(answers(drafted.engine, requests, together=True), plain)
            assert min(drafted.counts) > 5


def test_contexts_shift_as_without_drafts(llama, rounded) -> None:
    requests = [
        replace(
            request,
            stop=StopRules(90),
            shift=ContextShift(40, keep=4),
            sampling=replace(request.sampling, logprobs=0),
        )
        for request in requests_for(llama.tokenizer.vocab_size)
    ]
    plain = plain_answers(llama, requests)
    with drafting(llama, rounded, max_sequences=3) as drafted:
        check(answers(drafted.engine, requests, together=True), plain)
        assert drafted.counts[0] > 50


def test_tokens_that_only_one_of_the_models_has_are_not_shared(llama, tmp_path) -> None:
    """Vocabularies may end with padding of different lengths."""
    wider = other("llama", tmp_path, seed=0, padding_rows=30)
    requests = requests_for(llama.tokenizer.vocab_size)
    for model, draft in ((llama, wider), (wider, llama)):
        plain = plain_answers(model, requests)
        with drafting(model, draft, max_sequences=3) as drafted:
            check(answers(drafted.engine, requests, together=True), plain)
            assert drafted.engine._engine.statistics().drafted_tokens_total > 0


def test_memory_is_planned_for_both_models(llama, rounded) -> None:
    def plan(draft: ChatModel | None, memory_bytes: int | None = None) -> MemoryPlan:
        options = EngineOptions(
            context_tokens=256, max_sequences=4, proposed_tokens=4, memory_bytes=memory_bytes
        )
        decoder = None if draft is None else draft.decoder
        return plan_engine_memory(llama.decoder, device=CPU, options=options, draft=decoder)

    alone, both = plan(None), plan(rounded)
    assert both.draft_bytes > rounded.decoder.weight_bytes
    assert both.reserved_bytes == alone.reserved_bytes + both.draft_bytes
    enough = both.reserved_bytes
    assert plan(rounded, enough).cache_tokens == both.cache_tokens
    assert plan(rounded, enough - 1).cache_tokens < both.cache_tokens
    with pytest.raises(DoesNotFitError, match=r"[0-9,]+ for the draft model"):
        plan(rounded, both.draft_bytes)


@pytest.mark.parametrize("family", STATEFUL[:1])
def test_recurrent_models_neither_draft_nor_have_drafts(family, llama, tmp_path) -> None:
    recurrent = loaded(family, tmp_path)
    for model, draft in ((recurrent, llama), (llama, recurrent)):
        with (
            pytest.raises(ConfigurationError, match="recurrent layers"),
            running(model, draft=draft, proposed_tokens=4),
        ):
            pass
