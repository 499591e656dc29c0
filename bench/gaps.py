"""Gaps of streams while images and prompts arrive, and first tokens."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

from bench.cache import CACHE
from bench.contender import isolated
from bench.gap_replica import MOST_ARRIVALS, STREAMS, EncoderProcess, GapReplica, Waits
from bench.machine import describe_machine
from bench.percentiles import percentile
from bench.real_model import real_model
from bench.report import Row, comparison
from bench.sections import GAPS
from bench.vision_model import VisionModelShape, ensure_vision_model

TARGET_GAP_MS = 100.0
CLIENTS, PROMPTS_EACH, PROMPT_TOKENS = 2, 12, 1000
# Tokens of a prompt with an image, without those of the image.
QUESTION_TOKENS = 16
ALONE_S = 3.0
INTRODUCTION = f"""{GAPS}

Written by `make bench` and `python -m bench --only gaps`: {STREAMS} streams of text, and the
longest gap between two outputs of one of them.

Images: large pictures arrive at a random Gemma 3 with vision (a decoder of 0.2 billion weights
behind SigLIP's base tower, 1024 patches per image), one, or {MOST_ARRIVALS} at the same time. The
gap is relative to that beside as many prompts of as many tokens, and to that beside nothing; the
goal is at most 1.1 beside prompts. With an encoder in another process, each process has half of
the processors. Medians of the rounds, ± the round farthest from it.
"""
LONG_PROMPTS = """\
Long prompts: {clients} clients send {each} prompts of {tokens} tokens each, one after the other,
to {name}. Milliseconds, of all rounds together.
"""


def gaps_section(source: str | None, threads: int, rounds: int) -> str:
    """The section of bench/RESULTS.md. `source`: the source of the model for long prompts."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    shape, path = VisionModelShape(), real_model(source)
    machine = describe_machine(len(cpus))
    vision = ensure_vision_model(CACHE / "random-vision.gguf", shape)
    rows = image_rows(vision, shape, cpus, rounds)
    vision.unlink()
    names = {"clients": CLIENTS, "each": PROMPTS_EACH, "tokens": f"{PROMPT_TOKENS:,}"}
    parts = [
        INTRODUCTION,
        machine,
        f"- {rounds} rounds",
        "",
        comparison(rows, "beside images", "otherwise"),
        "",
        LONG_PROMPTS.format(**names, name=path.name),
        long_prompts_table(path, cpus, rounds),
        "",
    ]
    return "\n".join(parts)


def image_rows(path: Path, shape: VisionModelShape, cpus: Sequence[int], rounds: int) -> list[Row]:
    """Rows of an engine that encodes images itself and, with several processors, of an engine with
    a separate encoder."""
    print("gaps of streams beside images", flush=True)
    half = len(cpus) // 2
    with closing(isolated(GapReplica, path, cpus)) as replica:
        rows = _image_rows("own encoder", replica, shape, rounds)
    if not half:
        return rows
    with ExitStack() as stack:
        encoder = stack.enter_context(closing(isolated(EncoderProcess, path, cpus[half:])))
        other = isolated(GapReplica, path, cpus[:half], None, encoder.address())
        replica = stack.enter_context(closing(other))
        return rows + _image_rows("encoder process", replica, shape, rounds)


def _image_rows(label: str, replica: GapReplica, shape: VisionModelShape, rounds: int) -> list[Row]:
    rows = []
    for count in (1, MOST_ARRIVALS):
        images, prompts, nothing = [], [], []
        for _ in range(rounds):
            images.append(_longest_ms(replica.beside_images(count, shape.image_side)))
            tokens = shape.rows_per_image + QUESTION_TOKENS
            prompts.append(_longest_ms(replica.beside_prompts(count, tokens)))
            nothing.append(_longest_ms(replica.alone(ALONE_S)))
        for name, others in (("as many prompts", prompts), ("nothing", nothing)):
            task = f"longest gap, {count} image{'s' * (count > 1)}, otherwise {name}"
            rows.append(Row(label, task, "ms", tuple(images), tuple(others)))
    return rows


def long_prompts_table(path: Path, cpus: Sequence[int], rounds: int) -> str:
    print("gaps of streams beside long prompts", flush=True)
    targets = (None, TARGET_GAP_MS)
    with ExitStack() as stack:
        replicas = {
            target: stack.enter_context(closing(isolated(GapReplica, path, cpus, target)))
            for target in targets
        }
        found: dict[float | None, list[Waits]] = {target: [] for target in targets}
        for _ in range(rounds):
            for target, replica in replicas.items():
                load = replica.beside_clients(CLIENTS, PROMPTS_EACH, PROMPT_TOKENS)
                found[target].append(load)
    lines = [
        "| `target_gap_ms` | first token p50 | p99 | gap p50 | p99 | longest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for target, waits in found.items():
        firsts = list(chain.from_iterable(each.first_tokens for each in waits))
        gaps = list(chain.from_iterable(each.gaps for each in waits))
        figures = [percentile(each, share) for each in (firsts, gaps) for share in (0.5, 0.99)]
        figures.append(max(gaps))
        shown = " | ".join(f"{1000 * figure:.0f}" for figure in figures)
        lines.append(f"| {'null' if target is None else f'{target:.0f}'} | {shown} |")
    return "\n".join(lines)


def _longest_ms(waits: Waits) -> float:
    return 1000 * max(waits.gaps)
