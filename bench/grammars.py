"""`python -m bench.grammars`: the cost of a JSON schema for its sequence and for the others.

Engine steps of the benchmark model with and without a schema, in turn in one process.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from bench.cache import CACHE
from bench.machine import describe_machine
from bench.make_model import Shape, ensure_model
from bench.ours import SAMPLING, load_model, start_engine
from bench.sections import GRAMMARS, publish
from bench.vocabulary import find_vocabulary
from model_zoo.grammars.json_schema import compilable
from model_zoo.grammars.token_grammar import TokenGrammars
from runtime.engine.assembly import EngineOptions
from runtime.engine.request import FinishReason, GenerationRequest, Grammar, StopRules
from runtime.host_limits import usable_cpus

LABEL = "Q4_0"
PROMPT_TOKENS, ANSWER_TOKENS = 16, 24
# The number of sequences of a step, and how many of them have the schema.
CASES = {1: (1,), 4: (4, 1)}
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
SCHEMA = {"type": "array", "items": _RECORD, "minItems": 100}
INTRODUCTION = f"""{GRAMMARS}

Written by `python -m bench.grammars`: decode steps of the model of `make bench` ({LABEL}), with a
JSON schema for some of the sequences and without one, in turn in one process. Milliseconds of
processor time of all threads per step; the ratios are medians of the rounds' ratios. The goal is at
most 1.03 where all sequences have the schema, and 1.02 where one does, for the others.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a decode step: processor time, and wall time."""

    busy: float
    wall: float


class Decoder:
    """An engine with the benchmark model, and the grammar of `SCHEMA`."""

    def __init__(self, path: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        model = load_model(path)
        options = EngineOptions(context_tokens=128, max_sequences=max(CASES), step_tokens=128)
        self._engine = start_engine(model, options)
        listed = {"grammars": [{"json_schema": compilable(SCHEMA)}]}
        self._grammar = TokenGrammars(model.tokenizer).compile(json.dumps(listed))
        self._random, self._ids = random.Random(1), map(str, itertools.count())

    def step(self, sequences: int, *, constrained: int) -> Step:
        """The mean step while all sequences decode; `constrained` of them have the schema."""
        grammars = [self._grammar] * constrained + [None] * (sequences - constrained)
        return asyncio.run(self._decode(grammars))

    def close(self) -> None:
        self._engine.close()

    async def _decode(self, grammars: Sequence[Grammar | None]) -> Step:
        arrivals: list[list[tuple[float, float]]] = [[] for _ in grammars]

        async def answer(grammar: Grammar | None, times: list[tuple[float, float]]) -> None:
            async with aclosing(self._engine.stream(self._request(grammar))) as deltas:
                async for delta in deltas:
                    assert delta.finish is not FinishReason.FAILED, delta.error
                    now = (time.process_time(), time.perf_counter())
                    times += [now] * len(delta.tokens)

        await asyncio.gather(*(answer(*each) for each in zip(grammars, arrivals, strict=True)))
        begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        steps = sum(begin < each <= end for each in arrivals[0])
        return Step((end[0] - begin[0]) / steps, (end[1] - begin[1]) / steps)

    def _request(self, grammar: Grammar | None) -> GenerationRequest:
        prompt = tuple(self._random.randrange(256, 100_000) for _ in range(PROMPT_TOKENS))
        name = next(self._ids)
        sampling = replace(SAMPLING, seed=int(name))
        return GenerationRequest(name, prompt, StopRules(ANSWER_TOKENS), sampling, grammar=grammar)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grammars", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--write", action="store_true", help="write bench/RESULTS.md")
    parser.add_argument("--keep", action="store_true", help=f"keep the model in {CACHE}")
    arguments = parser.parse_args()
    machine = describe_machine(arguments.threads, ("torch", "llguidance"))
    path = ensure_model(CACHE, LABEL, find_vocabulary(), Shape())
    with closing(Decoder(path, arguments.threads)) as decoder:
        rows = [_row(decoder, *case, arguments.rounds) for case in _cases()]
    if not arguments.keep:
        path.unlink()
    publish(GRAMMARS, _page(rows, machine, arguments.rounds), write=arguments.write)


def _cases() -> list[tuple[int, int]]:
    return [(count, constrained) for count, some in CASES.items() for constrained in some]


def _row(decoder: Decoder, count: int, constrained: int, rounds: int) -> str:
    decoder.step(count, constrained=constrained)  # computes the first lexer states
    pairs = [
        (decoder.step(count, constrained=0), decoder.step(count, constrained=constrained))
        for _ in range(rounds)
    ]
    free, bound = (1000 * median(step.busy for step in steps) for steps in zip(*pairs, strict=True))
    busy = median(second.busy / first.busy for first, second in pairs)
    wall = median(second.wall / first.wall for first, second in pairs)
    return f"| {count} | {constrained} | {free:.1f} | {bound:.1f} | {busy:.3f} | {wall:.3f} |"


def _page(rows: list[str], machine: str, rounds: int) -> str:
    return "\n".join(
        [
            INTRODUCTION,
            machine,
            f"- {rounds} rounds of {ANSWER_TOKENS} tokens",
            "",
            "| sequences | with the schema | free, ms | with it, ms | ratio | by the clock |",
            "|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
