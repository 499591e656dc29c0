"""Decoding with and without a draft model, in turn in one process.

The models are random. The draft model is the target's first layers; how much the target's other
layers add decides how often it is right.
"""

from contextlib import ExitStack
from dataclasses import replace

from bench.cache import CACHE
from bench.machine import describe_machine
from bench.make_model import Shape, ensure_model
from bench.sections import DRAFTS
from bench.speculation import COUNTS, GREEDY, Case, as_section, measured_row, start_engines
from bench.vocabulary import find_vocabulary

LABEL = "Q4_0"
DRAFT = Shape(name="draft", layers=2)
LAYERS = 28  # of the target
ANSWER_TOKENS = 96
# Text -> what the norms of the target's further layers multiply by, and the seed of the draft.
TEXTS = {
    "draft always right": (0.0, 1),
    "draft often right": (0.02, 1),
    "draft always wrong": (0.0, 2),
}
INTRODUCTION = f"""\
{DRAFTS}

Written by `make bench` and `python -m bench --only drafts`. Random {LABEL} models of the width of
Llama-3.2-1B, with {LAYERS} layers, and with {DRAFT.layers} for the draft model, which are the
first ones of the target unless it is always wrong. What the others add decides how often it is
right. Answers of {ANSWER_TOKENS} tokens, without prompt lookup. Columns as above; the goal is 0.98
where the draft is always wrong.
"""


def drafts_section(threads: int, rounds: int) -> str:
    """The section of bench/RESULTS.md; writes and removes its models."""
    machine, vocabulary, rows = describe_machine(threads), find_vocabulary(), []
    for text, (further, seed) in TEXTS.items():
        name = f"target-{further}"
        shape = replace(DRAFT, name=name, layers=LAYERS, first=DRAFT.layers, further=further)
        drafting = replace(DRAFT, name=f"draft-{seed}", seed=seed)
        target, draft = (ensure_model(CACHE, LABEL, vocabulary, each) for each in (shape, drafting))
        with ExitStack() as stack:
            engines = start_engines(target, threads, stack, draft)
            case = Case(text, "The caravan left the city before dawn.", GREEDY, ANSWER_TOKENS)
            rows += [measured_row(engines, case, count, rounds) for count in COUNTS]
        target.unlink()
        draft.unlink()
    return as_section(INTRODUCTION, machine, rounds, rows)
