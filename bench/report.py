"""The results as a Markdown page: medians, and ratios of contenders that were measured in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.sections import MODELS

INTRODUCTION = """\
Written by `make bench`. A random model of Llama-3.2-1B's shape with a vocabulary of 128k;
sampling with top_k 40, top_p 0.9, temperature 0.8. The two contenders of a row are measured in
turn, and take turns at being first. Each figure is the median over the rounds (of two, the mean),
± the round farthest from it; a ratio is the median of the rounds' ratios."""
AGAINST_PEER = """\
Tokens per second of all sequences together; above 1.00 this engine is faster. Both read the same
blocks, except that this engine reads F16, and BF16 where the processor does not multiply bfloat16,
as integers of 14 bits (`Q16_0`), and a cache in float16; this engine computes with `compute: auto`,
llama.cpp rounds activations to 8 bits, unless the weights are F16 or BF16."""
AGAINST_BARE = """\
The same engine behind `caravan serve`, with one HTTP client process, against the engine alone. In
each round both start anew, one after the other has ended, so no Ray runs beside the bare engine.
The time to the first token is the median of five prompts in each round; for it, lower is better."""
STREAMS = """\
The demo model behind `caravan serve` and behind plain uvicorn, the same ingress and the same
replica in one process: streams that start at the same time, 64 tokens each, from one client process
on the same cores. In each round both start anew, one after the other has ended. The steps of this
model are short, so the figures show the cost around them. For the time to the first token, lower is
better, for tokens per second, higher."""
FROM_START = """\
Seconds from the start of `caravan serve` to the first token that a client receives, and the parts
of this time, from the server's log (`configured`, `starting`, `device`, `ready`, and two lines of
Ray's). The first part also contains the check of settings and files that `caravan serve` makes
before it starts Ray. Behind plain uvicorn the first part is the interpreter and all imports.
Settings are the defaults, files are in the page cache, and kernels were compiled by an earlier
start."""
START_ALONE = """\
The engine alone, in one process, and llama.cpp with the same context: from process start to the
first token, and the largest resident memory, mapped weights included. Lower is better."""
SAMPLER = """\
top_k 40 over 128,256 tokens, relative to the fastest decode step above. The limit is 5%."""


# The goals of ratios to llama.cpp: block type -> prefill, decode of one sequence, of several.
_GOALS = {
    **dict.fromkeys(("Q4_0", "Q4_K", "Q4_K_M"), (1.3, 1.0, 1.2)),
    **dict.fromkeys(("Q5_K", "Q6_K"), (1.2, 1.0, 1.1)),
    "Q8_0": (1.8, 1.0, 1.5),
    **dict.fromkeys(("F16", "BF16"), (1.5, 1.0, 1.2)),
    **dict.fromkeys(("IQ4_XS", "MXFP4", "MoE Q4_K"), (1.0, 1.0, 1.0)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A task: its value in each round for two contenders that are measured in turn."""

    model: str
    task: str
    unit: str
    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios, since a disturbance affects both halves of a round."""
        return median(a / b for a, b in zip(self.first, self.second, strict=True))


@dataclass(frozen=True, slots=True)
class SamplerShare:
    """The time to sample the rows of one step, and the time of the whole step."""

    rows: int
    sampling_ms: float
    step_ms: float

    @property
    def share(self) -> float:
        return self.sampling_ms / self.step_ms


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run. `agreement`: model -> largest difference of log-probabilities to the
    peer."""

    machine: str
    against_peer: Sequence[Row]
    against_bare: Sequence[Row]
    streams: Sequence[Row]
    starts: Sequence[Row]
    starts_alone: Sequence[Row]
    sampler: Sequence[SamplerShare]
    agreement: Mapping[str, float]


def results_page(results: Results) -> str:
    agreement = ", ".join(f"{label} {value:.3f}" for label, value in results.agreement.items())
    sections = [
        MODELS,
        INTRODUCTION,
        results.machine,
        "## Against llama.cpp",
        AGAINST_PEER,
        with_goals(results.against_peer),
        "Largest difference between the two engines' log-probabilities of the most likely next "
        f"tokens, in nats: {agreement}.",
        "## What HTTP and Ray cost",
        AGAINST_BARE,
        comparison(results.against_bare, "REST", "bare engine"),
        "## What Ray costs a stream",
        STREAMS,
        comparison(results.streams, "through Ray", "plain uvicorn"),
        "## From process start to the first token",
        FROM_START,
        parts_table(results.starts, "through Ray", "plain uvicorn"),
        START_ALONE,
        comparison(results.starts_alone, "caravan", "llama.cpp"),
        "## The sampler's share of a decode step",
        SAMPLER,
        sampler_table(results.sampler),
    ]
    return "\n\n".join(sections) + "\n"


def comparison(rows: Sequence[Row], first: str, second: str) -> str:
    lines = [
        f"| model | task | unit | rounds | {first} | {second} | {first} / {second} |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.model} | {row.task} | {row.unit} | {len(row.first)} "
        f"| {with_spread(row.first)} | {with_spread(row.second)} | {row.ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def with_goals(rows: Sequence[Row]) -> str:
    """The comparison with llama.cpp, with a column for the goal of each ratio."""
    head, line, *body = comparison(rows, "caravan", "llama.cpp").splitlines()
    goals = [
        f"{each} {goal(row.model, row.task):.1f} |" for each, row in zip(body, rows, strict=True)
    ]
    return "\n".join([f"{head} goal |", f"{line}---:|", *goals])


def goal(model: str, task: str) -> float:
    """The least ratio to llama.cpp of a row."""
    prefill, one, several = _GOALS[model]
    if task.startswith("prefill"):
        return prefill
    return one if task.startswith("decode, 1 sequence") else several


def parts_table(rows: Sequence[Row], first: str, second: str) -> str:
    """The parts of both contenders in the unit of the rows; "–" if a contender lacks a part."""
    lines = [
        f"| model | part | unit | {first} | {second} |",
        "|---|---|---|---:|---:|",
    ]
    lines += [
        f"| {row.model} | {row.task} | {row.unit} | {_part(row.first)} | {_part(row.second)} |"
        for row in rows
    ]
    return "\n".join(lines)


def sampler_table(shares: Sequence[SamplerShare]) -> str:
    lines = [
        "| sequences | sampling, ms | decode step, ms | share |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {share.rows} | {share.sampling_ms:.2f} | {share.step_ms:.1f} | {share.share:.1%} |"
        for share in shares
    ]
    return "\n".join(lines)


def _part(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else "–"


def with_spread(values: Sequence[float]) -> str:
    """The median, and the largest distance of a round from it."""
    middle = median(values)
    spread = max(abs(value - middle) for value in values) / middle
    return f"{middle:.1f} ±{spread:.0%}" if len(values) > 1 else f"{middle:.1f}"
