"""`make bench`: the same model in this engine, in llama.cpp, and in this engine behind HTTP; and
the sections of other modules."""

import argparse
from collections.abc import Callable, Mapping

from bench.cache import CACHE
from bench.contender import Prompts, Setting
from bench.drafts import drafts_section
from bench.first_token import first_token_rows
from bench.gaps import gaps_section
from bench.host import host_section
from bench.machine import describe_machine, describe_peer
from bench.make_model import LABELS, MOE, MOE_SHAPE, Shape, ensure_model
from bench.measure import Plan, against_peer, against_rest, long_context_row, sampler_shares
from bench.ours import Caravan
from bench.peer import LlamaCpp, system_info
from bench.report import Results, Row, results_page
from bench.sections import DRAFTS, GAPS, HOST, MODELS, SPECULATION, TURNS, publish
from bench.speculation import speculation_section
from bench.start import start_rows
from bench.streams import stream_rows
from bench.turns import turns_section
from bench.vocabulary import SIZE, find_vocabulary
from runtime.host_limits import usable_cpus
from tests.checkout import DEMO_MODEL

ALL_TYPES = [*LABELS, MOE]


def main() -> None:
    arguments = _arguments()
    for name in arguments.only:
        heading, measure = SECTIONS[name]
        write = not arguments.quick and (name != "models" or _is_complete(arguments))
        publish(heading, measure(arguments), write=write)


def _is_complete(arguments: argparse.Namespace) -> bool:
    """Whether the tables of models would have all their rows."""
    return {*arguments.types} == {*ALL_TYPES} and arguments.served_type in arguments.types


def _models_section(arguments: argparse.Namespace) -> str:
    setting = Setting(arguments.threads, context_tokens=1024, sequences=16, step_tokens=512)
    return results_page(_measure(arguments, Plan(arguments.rounds, setting, Prompts(SIZE))))


# The heading of each section, and what measures it, in this order.
SECTIONS: Mapping[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
    "models": (MODELS, _models_section),
    "host": (HOST, lambda a: host_section(a.rounds)),
    "speculation": (SPECULATION, lambda a: speculation_section(a.source, a.threads, a.rounds)),
    "drafts": (DRAFTS, lambda a: drafts_section(a.threads, a.rounds)),
    "gaps": (GAPS, lambda a: gaps_section(a.source, a.threads, a.rounds)),
    "turns": (TURNS, lambda a: turns_section(LlamaCpp, _peer(), a.threads, a.rounds)),
}


def _peer() -> str:
    return describe_peer(system_info())


def _measure(arguments: argparse.Namespace, plan: Plan) -> Results:
    machine = f"{describe_machine(plan.setting.threads)}\n{_peer()}"
    vocabulary = find_vocabulary()
    rows: list[Row] = []
    served: list[Row] = []
    starts: list[Row] = []
    alone: list[Row] = []
    agreement: dict[str, float] = {}
    for label in arguments.types:
        shape = MOE_SHAPE if label == MOE else Shape()
        path = ensure_model(CACHE, label, vocabulary, shape)
        found, agreement[label] = against_peer(path, label, plan)
        rows += found
        for row in found:
            print(f"  {row.task}: {row.ratio:.2f} times llama.cpp's speed", flush=True)
        if label == arguments.served_type:
            rows.append(long_context_row(path, label, plan))
            served = against_rest(path, label, plan)
            alone = first_token_rows(label, path, plan.setting, plan.rounds, Caravan, LlamaCpp)
            starts = start_rows(label, path, plan.setting.threads, plan.rounds)
        if not arguments.keep:
            path.unlink()
    streams = stream_rows(plan.setting.threads, plan.rounds)
    starts = start_rows("demo", DEMO_MODEL, plan.setting.threads, plan.rounds) + starts
    sampler = sampler_shares(rows, plan)
    return Results(machine, rows, served, streams, starts, alone, sampler, agreement)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help="measure these sections alone; the others stay as they are",
    )
    parser.add_argument(
        "--source",
        help="a path or hf:// source, for speculation and gaps; default: Gemma 3 270M Q4_K_M",
    )
    parser.add_argument(
        "--types",
        nargs="+",
        choices=ALL_TYPES,
        default=ALL_TYPES,
        help="measure these models alone, and write nothing about models",
    )
    parser.add_argument(
        "--served-type",
        choices=ALL_TYPES,
        default="Q4_0",
        help="also measure HTTP, and 8k tokens of context",
    )
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--keep", action="store_true", help=f"keep the models in {CACHE}")
    parser.add_argument(
        "--quick", action="store_true", help="of the models measure Q4_0 alone, and write nothing"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.types, arguments.served_type = ["Q4_0"], "Q4_0"
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    return arguments
