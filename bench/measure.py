"""Measures the rows of the tables: two contenders run the same tasks in turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from bench.contender import Contender, Inspectable, Prompts, Setting, in_turns, isolated
from bench.ours import Caravan
from bench.peer import LlamaCpp
from bench.report import Row, SamplerShare
from bench.rest import Served
from bench.sampling import sampling_ms
from bench.vocabulary import SIZE
from runtime.quant.weight import Compute

PREFILL_TOKENS = 512
SHORT_PROMPT_TOKENS = 32
ANSWER_TOKENS = {1: 48, 4: 32, 16: 24}  # sequences -> tokens each
SHORT_PROMPTS = 5
COMPARED_TOKENS = 20
LONG_PROMPT_TOKENS = 8192
LONG_ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of rounds of each task, and the sizes of tasks."""

    rounds: int
    setting: Setting
    prompts: Prompts


@dataclass(frozen=True, slots=True)
class Task:
    """What a contender does, and the unit of its value."""

    name: str
    unit: str
    value: Callable[[Contender], float]


def against_peer(path: Path, label: str, plan: Plan) -> tuple[list[Row], float]:
    """Rows of this engine against llama.cpp, and the largest difference of log-probabilities."""
    print(f"{label}: this engine and llama.cpp", flush=True)
    with _both(path, plan.setting) as (ours, peer):
        distance = _distance(ours, peer, plan.prompts.draw(SHORT_PROMPT_TOKENS))
        return _speed_rows(label, ours, peer, plan), distance


def speed_rows(path: Path, label: str, plan: Plan, compute: Compute) -> list[Row]:
    """Rows of this engine against llama.cpp."""
    print(f"{label}: this engine and llama.cpp", flush=True)
    with _both(path, plan.setting, compute) as (ours, peer):
        for contender in (ours, peer):
            contender.prefill(plan.prompts.draw(SHORT_PROMPT_TOKENS))
        return _speed_rows(label, ours, peer, plan)


def long_context_row(path: Path, label: str, plan: Plan) -> Row:
    """A row measured in a single round, since the prompts take a minute."""
    print(f"{label}: {LONG_PROMPT_TOKENS:,} tokens of context", flush=True)
    context_tokens = LONG_PROMPT_TOKENS + 2 * LONG_ANSWER_TOKENS
    setting = replace(plan.setting, context_tokens=context_tokens, sequences=1)

    def speed(contender: Contender) -> float:
        prompts = [plan.prompts.draw(LONG_PROMPT_TOKENS)]
        return contender.decode(prompts, LONG_ANSWER_TOKENS).tokens_per_second

    with _both(path, setting) as (ours, peer):
        pairs = in_turns(speed, ours, peer, 1)
    task = f"decode, 1 sequence after {LONG_PROMPT_TOKENS:,} tokens"
    return Row(label, task, "tokens/s", *pairs)


def against_rest(path: Path, label: str, plan: Plan) -> list[Row]:
    """Rows of this engine behind HTTP against the engine alone. In each round both start anew, one
    after the other has ended, because an idle Ray takes processor time too."""
    print(f"{label}: this engine through HTTP and bare", flush=True)
    tasks = [_first_token_task(plan), *_speed_tasks(plan)]

    def values(start: Callable[[], Contender]) -> list[float]:
        with closing(start()) as contender:
            contender.prefill(plan.prompts.draw(SHORT_PROMPT_TOKENS))
            return [task.value(contender) for task in tasks]

    rest: Callable[[], Contender] = partial(Served, path, plan.setting)
    bare: Callable[[], Contender] = partial(isolated, Caravan, path, plan.setting)
    sides = (zip(*each, strict=True) for each in in_turns(values, rest, bare, plan.rounds))
    return [
        Row(label, task.name, task.unit, *pair) for task, *pair in zip(tasks, *sides, strict=True)
    ]


def sampler_shares(rows: Sequence[Row], plan: Plan) -> list[SamplerShare]:
    """The sampler's shares of the fastest measured decode step, which is the strictest
    comparison."""
    shares = []
    for count in ANSWER_TOKENS:
        fastest = max(max(row.first) for row in rows if row.task == _decoding(count))
        spent = sampling_ms(count, SIZE, plan.setting.threads)
        shares.append(SamplerShare(count, spent, 1000 * count / fastest))
    return shares


@contextmanager
def _both(
    path: Path, setting: Setting, compute: Compute = Compute.AUTO
) -> Iterator[tuple[Inspectable, Inspectable]]:
    """This engine and llama.cpp, each in its own process."""
    with (
        closing(isolated(Caravan, path, setting, compute)) as ours,
        closing(isolated(LlamaCpp, path, setting)) as peer,
    ):
        yield ours, peer


def _speed_rows(label: str, first: Contender, second: Contender, plan: Plan) -> list[Row]:
    return [
        Row(label, task.name, task.unit, *in_turns(task.value, first, second, plan.rounds))
        for task in _speed_tasks(plan)
    ]


def _speed_tasks(plan: Plan) -> list[Task]:
    return [_prefill_task(plan), *(_decode_task(plan, count) for count in ANSWER_TOKENS)]


def _first_token_task(plan: Plan) -> Task:
    def milliseconds(contender: Contender) -> float:
        prompts = [plan.prompts.draw(SHORT_PROMPT_TOKENS) for _ in range(SHORT_PROMPTS)]
        return 1000 * median(map(contender.prefill, prompts))

    return Task(f"first token, {SHORT_PROMPT_TOKENS}-token prompt", "ms", milliseconds)


def _prefill_task(plan: Plan) -> Task:
    def speed(contender: Contender) -> float:
        return PREFILL_TOKENS / contender.prefill(plan.prompts.draw(PREFILL_TOKENS))

    return Task(f"prefill, {PREFILL_TOKENS} tokens", "tokens/s", speed)


def _decode_task(plan: Plan, count: int) -> Task:
    def speed(contender: Contender) -> float:
        prompts = [plan.prompts.draw(SHORT_PROMPT_TOKENS) for _ in range(count)]
        return contender.decode(prompts, ANSWER_TOKENS[count]).tokens_per_second

    return Task(_decoding(count), "tokens/s", speed)


def _decoding(count: int) -> str:
    return f"decode, {count} sequence{'s' if count > 1 else ''}"


def _distance(first: Inspectable, second: Inspectable, prompt: Sequence[int]) -> float:
    """The largest difference of log-probabilities, over the most likely tokens of both engines."""
    ours, theirs = (contender.most_likely(prompt, COMPARED_TOKENS) for contender in (first, second))
    common = ours.keys() & theirs.keys()
    if len(common) < COMPARED_TOKENS / 2:
        raise SystemExit(f"The engines disagree on the next token: {ours} and {theirs}")
    return max(abs(ours[token] - theirs[token]) for token in common)
