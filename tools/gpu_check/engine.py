"""Checks engines on the device against the CPU: every way to sample, proposals, copies of pages in
host memory, moved keys, scores of prompts and their vectors."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from runtime.engine.engine_statistics import EngineStatistics
from runtime.engine.request import (
    ContextShift,
    Delta,
    GenerationRequest,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.worker.model import DecoderModel
from tests.families.engine_runs import RECURRENT, answers
from tests.tiny_models import tiny_tokenizer
from tools.gpu_check.comparison import largest
from tools.gpu_check.models import CPU, TOLERANCE, files_of, load_decoder, started
from tools.gpu_check.report import Check, Task

# Full attention, sliding windows, recurrent layers, experts and compressed keys.
FAMILIES = ("llama", "gemma3", "qwen35moe", "deepseek2")
_CLASSES = 3
# Slots and proposed tokens, so that steps sample odd and even numbers of rows.
_SLOTS = ((4, 8), (6, 5), (3, 0), (8, 0))
_PAGES = 40  # of the device, fewer than the prompts have


def run(task: Task) -> None:
    task.make(_checks(task))


def _checks(task: Task) -> Iterator[Check]:
    for family in FAMILIES[: 1 if task.dry else None]:
        model = _Model(task, family)
        for slots, proposed in _SLOTS[: 1 if task.dry else None]:
            name = f"{family}, ways to sample, {slots} slots, {proposed} proposed"
            yield name, partial(_check_sampling, model, name, slots, proposed)
        scenes = [_check_host_copies, _check_shifts, _check_scores, _check_vectors]
        if family not in RECURRENT:  # states cannot be taken back
            scenes.append(_check_proposals)
        for scene in scenes:
            name = f"{family}, {scene.__name__.removeprefix('_check_').replace('_', ' ')}"
            yield name, partial(scene, model, name)


@dataclass(frozen=True)
class _Model:
    """A family's tiny model, loaded once it is needed."""

    task: Task
    family: str

    @cached_property
    def decoders(self) -> tuple[DecoderModel, DecoderModel]:
        """On the device and on the CPU."""
        path = self.task.folder / f"{self.family}.gguf"
        _, write = next(files_of(self.family))
        write(path)
        there, here = (load_decoder(path, d, torch.float32) for d in (self.task.device, CPU))
        return there, here

    def both(
        self, requests: Sequence[GenerationRequest], *, together: bool = True, **options: Any
    ) -> tuple[list[Delta], list[Delta], EngineStatistics]:
        """The answers of the device and those of the CPU, which has none of the options."""
        there, here = self.decoders
        requests = list(requests)[:: 4 if self.task.dry else 1]
        given = {"depth": 2, "cuda_graphs": True} | options
        with started(there, self.task.device, **given) as (engine, _):
            found = answers(engine, requests, together=together)
            statistics = engine.statistics()
        with started(here, CPU, depth=1) as (engine, _):
            return found, answers(engine, requests, together=together), statistics

    def check_tokens(self, name: str, found: list[Delta], expected: list[Delta]) -> None:
        pairs = list(zip(found, expected, strict=True))
        different = [n for n, (a, b) in enumerate(pairs) if a.tokens != b.tokens or not a.tokens]
        errors = [delta.error for delta in (*found, *expected) if delta.error]
        self.task.report.check(name, not different and not errors, different=different[:9],
                               requests=len(pairs), errors=errors[:1])  # fmt: skip


def _ways(vocabulary: int) -> list[SamplingParams]:
    numbers = np.arange(-(-vocabulary // 32) * 32)
    bits = (numbers % 3 == 1) & (numbers < vocabulary)
    allowed = np.packbits(bits, bitorder="little").tobytes()
    breakers = np.packbits(np.roll(bits, 1) & (numbers < 30), bitorder="little")
    dry = SamplingParams(dry_multiplier=0.8, dry_base=1.5, dry_breakers=breakers.tobytes())
    greedy = SamplingParams(temperature=0)
    return [
        replace(dry, top_k=9, seed=4),
        replace(greedy, logit_bias=((3, 2.0), (60, -30.0)), barred=(5, 7), barred_until=99),
        SamplingParams(top_k=7, seed=8, allowed=allowed),
        replace(greedy, bad_words=((1, 2), (3,), (5,), tuple(range(9, 20)))),
        SamplingParams(typical_p=0.7, seed=5, logprobs=1),
        SamplingParams(xtc_probability=0.5, xtc_threshold=0.05, seed=10, top_n_sigma=2.0),
        SamplingParams(top_k=8, seed=9, presence_penalty=0.5, frequency_penalty=0.3),
        replace(dry, temperature=0, dry_allowed_length=1, repeat_penalty=1.2),
        SamplingParams(dynatemp_range=0.5, seed=11, min_p=0.05),
        greedy,
    ]


def _tokens(draw: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocabulary) for _ in range(count))


def _check_sampling(model: _Model, name: str, slots: int, proposed: int) -> None:
    """Also with proposals; half of the requests have a grammar besides."""
    vocabulary, draw = tiny_tokenizer().get_vocab_size(), random.Random(3)
    base, requests = _tokens(draw, 20, vocabulary), list[GenerationRequest]()
    for number, way in enumerate(_ways(vocabulary) * 2):
        prompt = (*base[: draw.choice((8, 16, 20))], *_tokens(draw, draw.randint(1, 8), vocabulary))
        requests.append(
            GenerationRequest(
                f"{number}", prompt + base[:5], StopRules(draw.randint(4, 24)), way,
                grammar=_Classes(vocabulary) if number % 4 > 1 and not way.allowed else None,
            )
        )  # fmt: skip
    found, expected, _ = model.both(requests, max_sequences=slots, proposed_tokens=proposed)
    model.check_tokens(name, found, expected)


def _check_proposals(model: _Model, name: str) -> None:
    """Answers that repeat a token, which is proposed then, one after the other."""
    vocabulary, draw = tiny_tokenizer().get_vocab_size(), random.Random(4)
    sampling = SamplingParams(temperature=0, logit_bias=((11, 30.0),))
    requests = [
        GenerationRequest(f"{n}", _tokens(draw, 30, vocabulary), StopRules(90), sampling)
        for n in range(4)
    ]
    found, expected, statistics = model.both(requests, together=False, proposed_tokens=8)
    model.check_tokens(name, found, expected)
    made, accepted = statistics.proposed_tokens_total, statistics.accepted_tokens_total
    enough = made > 0 or model.task.dry  # it depends on measured times
    model.task.report.check(f"{name}, are made", enough, proposed=made, accepted=accepted)


@dataclass
class _Classes:
    """A grammar and its state. In turn, three tokens are free, and three must each be of another
    class than the token before."""

    vocabulary: int
    last: int = 0
    place: int = 0

    @property
    def free(self) -> int:
        return max(0, 3 - self.place % 6)

    def matcher(self) -> "_Classes":
        return _Classes(self.vocabulary)

    def accept(self, token: int) -> None:
        self.last, self.place = token, self.place + 1

    def allowed(self, mask: memoryview) -> None:
        numbers = np.arange(mask.nbytes * 8)
        bits = numbers < self.vocabulary
        if not self.free:
            bits &= numbers % _CLASSES != self.last % _CLASSES
        mask.cast("B")[:] = np.packbits(bits, bitorder="little").tobytes()

    def acceptable(self, tokens: Sequence[int]) -> int:
        state = replace(self)
        for count, token in enumerate(tokens):
            if not state.free and token % _CLASSES == state.last % _CLASSES:
                return count
            state.accept(token)
        return len(tokens)

    def look_ahead(self, tokens: Sequence[int], masks: Sequence[memoryview]) -> None:
        state, count = replace(self), self.acceptable(tokens)
        for token, mask in zip(tokens[:count], masks, strict=False):
            state.accept(token)
            state.allowed(mask)


def _check_host_copies(model: _Model, name: str) -> None:
    """Prompts that come again when their pages have left the device."""
    vocabulary, draw = tiny_tokenizer().get_vocab_size(), random.Random(5)
    prompts = [_tokens(draw, 150, vocabulary) for _ in range(8)]
    greedy = SamplingParams(temperature=0)
    requests = [
        GenerationRequest(f"{n}", prompt, StopRules(9), greedy)
        for n, prompt in enumerate(prompts * 2)
    ]
    found, expected, statistics = model.both(
        requests, together=False, max_sequences=2, cache_tokens=16 * _PAGES,
        host_cache_bytes=1 << 26,
    )  # fmt: skip
    model.check_tokens(name, found, expected)
    restored = statistics.host_pages_restored_total
    stored = statistics.host_pages_stored_total
    model.task.report.check(
        f"{name}, are restored", restored > 0 or model.task.dry, stored=stored, restored=restored
    )


def _check_shifts(model: _Model, name: str) -> None:
    """Answers that fill their context several times."""
    vocabulary, draw = tiny_tokenizer().get_vocab_size(), random.Random(6)
    requests = [
        GenerationRequest(
            f"{n}", _tokens(draw, 9 + 5 * n, vocabulary), StopRules(12 if model.task.dry else 90),
            SamplingParams(temperature=0.8 * (n % 2), seed=n), shift=ContextShift(40, keep=4),
        )
        for n in range(6)
    ]  # fmt: skip
    found, expected, statistics = model.both(requests)
    model.check_tokens(name, found, expected)
    shifts = statistics.shifts_total
    model.task.report.check(f"{name}, happen", shifts > 0 or model.task.dry, shifts=shifts)


def _check_scores(model: _Model, name: str) -> None:
    """Log-probabilities of prompts and answers."""
    vocabulary, draw = tiny_tokenizer().get_vocab_size(), random.Random(7)
    sampling = SamplingParams(temperature=0, logprobs=2)
    requests = [
        GenerationRequest(
            f"{n}", _tokens(draw, 20 + 9 * n, vocabulary), StopRules(n), sampling,
            prompt_logprobs=2,
        )
        for n in range(5)
    ]  # fmt: skip
    found, expected, _ = model.both(requests)
    both = [
        [each.logprob for each in (*one.prompt_logprobs, *one.logprobs) if each.logprob is not None]
        for one in (*found, *expected)
    ]
    half = len(both) // 2
    counts = [len(each) for each in both]
    worst = largest(
        abs(a - b)
        for one, other in zip(both[:half], both[half:], strict=True)
        for a, b in zip(one, other, strict=False)
    )
    whole = counts[:half] == counts[half:] and all(counts)
    model.task.report.check(name, whole and worst <= TOLERANCE, error=worst, counts=counts)


def _check_vectors(model: _Model, name: str) -> None:
    vocabulary, draw = tiny_tokenizer().get_vocab_size(), random.Random(8)
    requests = [
        GenerationRequest(
            f"{n}", _tokens(draw, 5 + 17 * n, vocabulary), StopRules(1),
            pooling=list(Pooling)[n % 3],
        )
        for n in range(6)
    ]  # fmt: skip
    found, expected, _ = model.both(requests)
    vectors = [
        torch.frombuffer(bytearray(delta.vector or b"\0" * 4), dtype=torch.float32)
        for delta in (*found, *expected)
    ]
    half = len(vectors) // 2
    errors = [
        (a - b).norm().item() / max(b.norm().item(), 1e-9) if a.shape == b.shape else float("inf")
        for a, b in zip(vectors[:half], vectors[half:], strict=True)
    ]
    worst, messages = largest(errors), [each.error for each in (*found, *expected) if each.error]
    passed = worst <= TOLERANCE and not messages
    model.task.report.check(name, passed, error=worst, errors=messages[:1])
