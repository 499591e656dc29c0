"""The first token of a conversation's second turn."""

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from bench.cache import CACHE, written_once
from bench.contender import Contender, Setting, isolated
from bench.machine import describe_machine
from bench.ours import Caravan
from bench.report import Row, comparison
from bench.sections import TURNS
from tests.tiny_models import write_tiny

CONTEXT_TOKENS, STEP_TOKENS = 2048, 512
INTRODUCTION = f"""{TURNS}

Written by `make bench` and `python -m bench --only turns`: the time to the first token of a
conversation's second turn relative to that of its first, in random models in Q8_0: one whose
layers have attention, and one with recurrent layers in three of four, whose states are restored
from a checkpoint. llama.cpp continues the sequence of the first turn. Lower is better; without
reuse it would be above 1.
"""


@dataclass(frozen=True, slots=True)
class Turns:
    """The numbers of tokens of the first prompt, of its answer, and of the second turn's
    message."""

    prompt: int = 512
    answer: int = 70
    more: int = 32


def configurations(*, layers: int = 12, hidden: int = 1024) -> Mapping[str, PreTrainedConfig]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": hidden // 8,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
    }
    return {"attention": Qwen3Config(**sizes), "recurrent": Qwen3_5TextConfig(**sizes)}


def ensure_model(path: Path, config: PreTrainedConfig) -> Path:
    """The path of a random model, which is written if it does not exist."""
    return written_once(path, lambda file: write_tiny(file, config, type="q8_0"))


class Conversing(Contender, Protocol):
    """A contender that also continues conversations."""

    def turns(
        self, prompt: Sequence[int], answer_tokens: int, more: Sequence[int]
    ) -> tuple[float, float]:
        """See `Caravan.turns`."""
        ...


def turn_row(label: str, contender: Conversing, turns: Turns, rounds: int) -> Row:
    r = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [r.randrange(1, 250) for _ in range(count)]

    contender.turns(tokens(turns.prompt), turns.answer, tokens(turns.more))  # warms up
    pairs = [
        contender.turns(tokens(turns.prompt), turns.answer, tokens(turns.more))
        for _ in range(rounds)
    ]
    first, second = ([1000 * each for each in times] for times in zip(*pairs, strict=True))
    return Row(label, "first token", "ms", tuple(second), tuple(first))


def turn_rows(
    folder: Path, turns: Turns, peer: type[Conversing], threads: int, rounds: int
) -> list[Row]:
    setting = Setting(threads, CONTEXT_TOKENS, sequences=4, step_tokens=STEP_TOKENS)
    rows = []
    for name, config in configurations().items():
        path = ensure_model(folder / f"turns-{name}.gguf", config)
        with closing(isolated(Caravan, path, setting)) as ours:
            rows.append(turn_row(name, ours, turns, rounds))
        if name == "attention":
            with closing(isolated(peer, path, setting)) as theirs:
                rows.append(turn_row(f"{name}, in llama.cpp", theirs, turns, rounds))
    return rows


def turns_section(peer: type[Conversing], build: str, threads: int, rounds: int) -> str:
    """The section of bench/RESULTS.md. `peer` is llama.cpp and `build` the line about it; they are
    given by the caller, so that the rest of this module can be tested where llama.cpp is not
    installed."""
    machine, turns = describe_machine(threads), Turns()
    rows = turn_rows(CACHE, turns, peer, threads, rounds)
    parts = [
        INTRODUCTION,
        machine,
        build,
        f"- prompt of {turns.prompt} tokens, answer of {turns.answer}, then {turns.more} more",
        "",
        comparison(rows, "second turn", "first turn"),
        "",
    ]
    return "\n".join(parts)
