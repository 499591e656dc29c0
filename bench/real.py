"""`make bench-real`: the speed and accuracy of this engine and of llama.cpp with a real file."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from bench.accuracy import Accuracy, Reference, accuracy
from bench.contender import Inspectable, Prompts, Setting, isolated
from bench.first_token import first_token_rows
from bench.machine import describe_machine, describe_peer
from bench.measure import Plan, speed_rows
from bench.ours import Caravan
from bench.peer import LlamaCpp, system_info
from bench.real_model import TEXT, real_model, real_text
from bench.report import Row, comparison
from bench.sections import REAL, publish
from model_zoo.registry import load
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.host_limits import usable_cpus
from runtime.quant.weight import Compute

PEER = "llama.cpp"
SETTINGS = {compute.name.lower(): compute for compute in Compute}  # of this engine
TEXT_TOKENS = 2048
ALTERNATIVES = 20
INTRODUCTION = """\
Written by `make bench-real` (`BENCH="--source PATH"` or hf://… for another file): {name}.
The contenders are measured in turn, as in the tables of `make bench`. Accuracy: log-probabilities
of the first {tokens:,} tokens of a text ({text}), and of
the {alternatives} most likely tokens at each place, against `transformers` in float32 with the
weights of the same file, in nats; the perplexity of the text, which is {expected:.3f} in
`transformers`; and the share of places with the same most likely token. Start: a process that loads
the model with {context:,} tokens of context for {sequences} sequences and answers one prompt;
there, lower is better."""


def main() -> None:
    arguments = _arguments()
    path = real_model(arguments.source)
    setting = Setting(arguments.threads, context_tokens=1024, sequences=16, step_tokens=512)
    machine = f"{describe_machine(setting.threads)}\n{describe_peer(system_info())}"
    plan = Plan(arguments.rounds, setting, Prompts(_tokenizer(path).vocab_size))
    rows: list[Row] = []
    for name in arguments.settings:
        rows += speed_rows(path, name, plan, SETTINGS[name])
    starts = first_token_rows("start", path, setting, arguments.rounds, Caravan, LlamaCpp)
    accuracies = _accuracies(path, setting, arguments.settings)
    section = _section(path, setting, machine, (rows, starts), accuracies)
    complete = {*arguments.settings} == {*SETTINGS}
    publish(REAL, section, write=complete and not arguments.quick)


def text_tokens(path: Path) -> list[int]:
    """The first tokens of the text, from the file's tokenizer."""
    return _tokenizer(path).encode_document(real_text())[:TEXT_TOKENS]


def contender(name: str, path: Path, setting: Setting) -> Inspectable:
    """An engine in another process."""
    if name == PEER:
        return isolated(LlamaCpp, path, setting)
    return isolated(Caravan, path, setting, SETTINGS[name])


def _tokenizer(path: Path) -> Tokenizer:
    return load(path, device=torch.device("cpu"), dtype=torch.float32).tokenizer


def _accuracies(path: Path, setting: Setting, names: list[str]) -> dict[str, Accuracy]:
    text = text_tokens(path)
    one = replace(setting, context_tokens=TEXT_TOKENS + 1, sequences=1)
    scored = {}
    for name in (*names, PEER):
        print(f"{name}: log-probabilities of a text", flush=True)
        with closing(contender(name, path, one)) as engine:
            scored[name] = engine.score(text, ALTERNATIVES)
    reference = Reference(path)
    return {name: accuracy(places, text, reference) for name, places in scored.items()}


def _section(
    path: Path,
    setting: Setting,
    machine: str,
    tables: Sequence[Sequence[Row]],
    accuracies: Mapping[str, Accuracy],
) -> str:
    introduction = INTRODUCTION.format(
        name=path.name,
        tokens=TEXT_TOKENS,
        text=TEXT,
        alternatives=ALTERNATIVES,
        expected=accuracies[PEER].expected,
        context=setting.context_tokens,
        sequences=setting.sequences,
    )
    lines = [
        "| engine | worst difference | mean difference | same first choice | perplexity |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {found.worst:.5f} | {found.mean:.6f} | {found.same_choices:.2%} "
        f"| {found.perplexity:.3f} |"
        for name, found in accuracies.items()
    ]
    measured = [comparison(rows, "caravan", PEER) for rows in tables]
    return "\n\n".join([REAL, introduction, machine, *measured, "\n".join(lines)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.real", description=__doc__)
    parser.add_argument("--source", help="a path or hf:// source; default: Gemma 3 270M Q4_K_M")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        help="measure these alone, and write nothing",
    )
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="measure one round, and write nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    return arguments


if __name__ == "__main__":
    main()
