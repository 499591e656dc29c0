"""Decoding with and without prompt lookup, in turn in one process.

The cases are copied text, edited code, prose, and unpredictable tokens. The model is real, since a
random one does not copy.
"""

import asyncio
import inspect
import itertools
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from bench.contender import Clock, Decoding
from bench.machine import describe_machine
from bench.ours import load_model, start_engine
from bench.real_model import real_model, real_text
from bench.report import with_spread
from bench.sections import SPECULATION
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from serve_app.config.sections import SpeculationSettings

ANSWER_TOKENS, CONTEXT_TOKENS, STEP_TOKENS = 256, 2048, 512
SLOTS = 16
COUNTS = (1, 4)
GREEDY = SamplingParams(temperature=0.0)
INTRODUCTION = f"""\
{SPECULATION}

Written by `make bench` and `python -m bench --only speculation` (`--source` for another file):
{{name}}.
Tokens per second of answers of {ANSWER_TOKENS} tokens, all sequences together, with
`speculation` as by default and without it, in turn in one process: the median over the rounds,
± the round farthest from it; the ratio is the median of the rounds' ratios. Both sample the same
tokens. The goals are 1.5 for copied text and 0.98 for tokens that nothing foretells, for one
sequence. Accepted: the share of the proposed tokens that were right, and tokens per step and
sequence.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of text: the prompt, and the sampling and the length of the answer."""

    name: str
    prompt: str
    sampling: SamplingParams
    tokens: int = ANSWER_TOKENS


def cases() -> list[Case]:
    text, code = real_text(), inspect.getsource(inspect.getargvalues)
    source = inspect.getsource(inspect.formatargvalues)
    part = text[:1500]
    return [
        Case("copied text", f"{part}\n\n{part}\n\n{part[:100]}", GREEDY),
        Case(
            "edited code",
            f"{code}{source}\n# The same two functions with other names:\n\n"
            + code[:60].replace("getargvalues", "argument_values"),
            GREEDY,
        ),
        Case("prose", text[2000:3000], SamplingParams(temperature=0.8, top_k=40, top_p=0.9)),
        Case("nothing foretold", text[:600], SamplingParams(temperature=3.0, top_k=0, top_p=1.0)),
    ]


class AnsweringEngine:
    """An engine with the model, with or without proposals."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
        self.engine, self._tokenizer = engine, tokenizer
        self._ids = map(str, itertools.count())

    def answer(self, case: Case, count: int, round: int) -> tuple[Decoding, list[tuple[int, ...]]]:
        """The tokens since all sequences decode, and the answers."""
        return asyncio.run(self._answer(case, count, round))

    async def _answer(
        self, case: Case, count: int, round: int
    ) -> tuple[Decoding, list[tuple[int, ...]]]:
        clock = Clock(count)

        async def one(number: int) -> tuple[int, ...]:
            sampling = replace(case.sampling, seed=1000 * round + number)
            prompt = self._tokenizer.encode_document(f"{number}. {case.prompt}")
            stop = StopRules(case.tokens)
            request = GenerationRequest(next(self._ids), tuple(prompt), stop, sampling)
            tokens: tuple[int, ...] = ()
            async with aclosing(self.engine.stream(request)) as deltas:
                async for delta in deltas:
                    assert delta.error is None, delta.error
                    if delta.tokens:
                        clock.saw(number, len(delta.tokens))
                    tokens += delta.tokens
            return tokens

        answers = await asyncio.gather(*(one(number) for number in range(count)))
        return clock.stop(), answers


def start_engines(
    path: Path, threads: int, stack: ExitStack, draft: Path | None = None
) -> list[AnsweringEngine]:
    """An engine with proposals, by prompt lookup or of a draft model, and one without."""
    torch.set_num_threads(threads)
    model, drafting = load_model(path), None if draft is None else load_model(draft)
    engines = []
    for proposed in (SpeculationSettings().proposed_tokens, 0):
        options = EngineOptions(
            context_tokens=CONTEXT_TOKENS,
            max_sequences=SLOTS,
            step_tokens=STEP_TOKENS,
            cache_tokens=max(COUNTS) * CONTEXT_TOKENS,
            proposed_tokens=proposed,
            ngram=draft is None,
        )
        engine = start_engine(model, options, draft=drafting if proposed else None)
        stack.callback(engine.close)
        engines.append(AnsweringEngine(engine, model.tokenizer))
    return engines


def speculation_section(source: str | None, threads: int, rounds: int) -> str:
    """The section of bench/RESULTS.md."""
    path = real_model(source)
    machine = describe_machine(threads)
    with ExitStack() as stack:
        engines = start_engines(path, threads, stack)
        rows = [measured_row(engines, case, n, rounds) for case in cases() for n in COUNTS]
    return as_section(INTRODUCTION.format(name=path.name), machine, rounds, rows)


def as_section(introduction: str, machine: str, rounds: int, rows: Sequence[str]) -> str:
    return "\n".join(
        [
            introduction,
            machine,
            f"- rounds: {rounds}",
            "",
            "| text | sequences | with, tokens/s | without | ratio | accepted | per step |",
            "|:---|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def measured_row(engines: Sequence[AnsweringEngine], case: Case, count: int, rounds: int) -> str:
    """`engines`: as of `start_engines`."""
    print(f"{case.name}: {count} sequences", flush=True)
    for engine in engines:
        engine.answer(case, count, 0)  # fills the prompt's pages
    before = engines[0].engine.statistics()
    pairs = []
    for round in range(1, rounds + 1):
        # The engines take turns at being first.
        order = engines if round % 2 else engines[::-1]
        found = {engine: engine.answer(case, count, round) for engine in order}
        (with_it, same), (without, tokens) = (found[engine] for engine in engines)
        assert same == tokens, "other tokens than without proposals"
        pairs.append((with_it.tokens_per_second, without.tokens_per_second))
    after = engines[0].engine.statistics()
    proposed = after.proposed_tokens_total - before.proposed_tokens_total
    accepted = after.accepted_tokens_total - before.accepted_tokens_total
    yielded = rounds * count * (case.tokens - 1)
    share = f"{accepted / proposed:.0%}" if proposed else "–"
    measured = " | ".join(with_spread(column) for column in zip(*pairs, strict=True))
    ratio = median(first / second for first, second in pairs)
    per_step = yielded / max(1, yielded - accepted)
    return f"| {case.name} | {count} | {measured} | {ratio:.2f} | {share} | {per_step:.2f} |"
