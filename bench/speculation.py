"""Decoding with and without prompt lookup, in turn in one process.

The cases are copied text, edited code, prose, and unpredictable tokens. The model is real, since a
random one does not copy.
"""

import asyncio
import inspect
import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from bench.machine import describe_machine
from bench.real_model import real_model, real_text
from bench.report import with_spread
from bench.sections import SPECULATION
from model_zoo.chat_model import ChatModel
from model_zoo.registry import LoadOptions, load
from runtime.engine.assembly import EngineOptions, assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.kv.cache_types import default_cache_type
from serve_app.config.sections import SpeculationSettings
from serve_app.replica.machine import compute_type, tiling_options

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


class Contender:
    """An engine with the model."""

    def __init__(self, engine: AsyncEngine, tokenizer) -> None:
        self.engine, self._tokenizer = engine, tokenizer
        self._ids = map(str, itertools.count())

    def answer(self, case: Case, count: int, round: int) -> tuple[float, list[tuple[int, ...]]]:
        """The tokens per second after the first tokens, and the answers."""
        return asyncio.run(self._answer(case, count, round))

    async def _answer(
        self, case: Case, count: int, round: int
    ) -> tuple[float, list[tuple[int, ...]]]:
        firsts: list[float] = []

        async def one(number: int) -> tuple[int, ...]:
            sampling = replace(case.sampling, seed=1000 * round + number)
            prompt = self._tokenizer.encode_document(f"{number}. {case.prompt}")
            stop = StopRules(case.tokens)
            request = GenerationRequest(next(self._ids), tuple(prompt), stop, sampling)
            tokens: tuple[int, ...] = ()
            async with aclosing(self.engine.stream(request)) as deltas:
                async for delta in deltas:
                    assert delta.error is None, delta.error
                    if not tokens and delta.tokens:
                        firsts.append(time.perf_counter())
                    tokens += delta.tokens
            return tokens

        answers = await asyncio.gather(*(one(number) for number in range(count)))
        seconds = time.perf_counter() - max(firsts)
        return sum(len(tokens) - 1 for tokens in answers) / seconds, answers


def contenders(
    path: Path, threads: int, stack: ExitStack, draft: Path | None = None
) -> list[Contender]:
    """An engine with proposals, by prompt lookup or of a draft model, and one without."""
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    model, drafting = _loaded(path), draft and _loaded(draft).decoder
    found = []
    for proposed in (SpeculationSettings().proposed_tokens, 0):
        options = EngineOptions(
            context_tokens=CONTEXT_TOKENS,
            max_sequences=SLOTS,
            step_tokens=STEP_TOKENS,
            cache_tokens=max(COUNTS) * CONTEXT_TOKENS,
            kv_dtype=default_cache_type(device, generates=True),
            proposed_tokens=proposed,
            ngram=draft is None,
        )
        token_bytes = model.tokenizer.token_bytes
        engine, _ = assemble(
            model.decoder,
            token_bytes,
            device=device,
            options=options,
            draft=drafting if proposed else None,
        )
        engine.start()
        stack.callback(engine.close)
        found.append(Contender(engine, model.tokenizer))
    return found


def _loaded(path: Path) -> ChatModel:
    loading = LoadOptions(compute=compute_type("auto"), tiling=tiling_options("auto"))
    return load(path, device=torch.device("cpu"), dtype=torch.float32, options=loading)


def speculation_section(source: str | None, threads: int, rounds: int) -> str:
    """The section of bench/RESULTS.md."""
    path = real_model(source)
    machine = describe_machine(threads)
    with ExitStack() as stack:
        engines = contenders(path, threads, stack)
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


def measured_row(engines: Sequence[Contender], case: Case, count: int, rounds: int) -> str:
    """`engines`: as of `contenders`."""
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
        pairs.append((with_it, without))
    after = engines[0].engine.statistics()
    proposed = after.proposed_tokens_total - before.proposed_tokens_total
    accepted = after.accepted_tokens_total - before.accepted_tokens_total
    yielded = rounds * count * (case.tokens - 1)
    share = f"{accepted / proposed:.0%}" if proposed else "–"
    measured = " | ".join(with_spread(column) for column in zip(*pairs, strict=True))
    ratio = median(first / second for first, second in pairs)
    per_step = yielded / max(1, yielded - accepted)
    return f"| {case.name} | {count} | {measured} | {ratio:.2f} | {share} | {per_step:.2f} |"
