"""`python -m bench.templates FOLDER`: the time of chat templates here and in `transformers`.

Each template in the folder renders a short and a long conversation, here and there in turn.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from bench.machine import describe_machine
from bench.sections import TEMPLATES, publish
from model_zoo.chat.messages import ChatTemplate, Message, ToolCall
from runtime.errors import RequestError

ROUNDS, SECONDS = 15, 1.0
TURNS, TOOLS = 100, 50  # numbers in the long conversation
SHOWN = 12
BOS, EOS = "<s>", "</s>"
TEXT = "The quick brown fox jumps over the lazy dog. " * 5
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Which city"}},
    "required": ["city"],
}
INTRODUCTION = f"""{TEMPLATES}

Written by `python -m bench.templates FOLDER`, of {{count}} published templates. Milliseconds of
processor time of `ChatTemplate.render`, which sends the conversation to the template's own
process and receives the text, in both processes, and of `transformers`' `render_jinja_template`:
medians of at least {ROUNDS} renderings, measured in turn. Short: a system message, a tool and a
question. Long: {TURNS} questions, each with a call, a result and an answer, and {TOOLS} tools;
fewer if a template refuses these. The table has the templates that take longest in
`transformers`.
"""
Values = dict[str, Any]
Conversation = tuple[list[Message], list[Values] | None]


@dataclass(frozen=True, slots=True)
class Timing:
    """The median milliseconds of a rendering; `waited`: our shortest time from call to text."""

    ours: float
    theirs: float
    waited: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    def __str__(self) -> str:
        return f"{self.ours:.2f} | {self.theirs:.2f} | {self.ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.templates", description=__doc__)
    parser.add_argument("folder", type=Path, help="with templates in files *.jinja")
    parser.add_argument("--write", action="store_true", help="write bench/RESULTS.md")
    arguments = parser.parse_args()
    sources = {path.stem: path.read_text("utf-8") for path in arguments.folder.glob("*.jinja")}
    machine = describe_machine(packages=("jinja2", "transformers"))
    found = {name: _timed(source) for name, source in sorted(sources.items())}
    page = _page({name: timings for name, timings in found.items() if timings}, machine)
    publish(TEMPLATES, page, write=arguments.write)


def _timed(source: str) -> tuple[Timing, Timing] | None:
    """The timings of the short and the long conversation; None if it refuses one of them."""
    template = ChatTemplate(source, bos_token=BOS, eos_token=EOS)
    short = _timing(template, _conversations(1, 1))
    long = _timing(template, _conversations(TURNS, TOOLS))
    return (short, long) if short and long else None


def _timing(template: ChatTemplate, conversations: Iterator[Conversation]) -> Timing | None:
    for messages, tools in conversations:
        sides = _sides(template, messages, tools)
        try:
            assert sides[0]() == sides[1]()
        except (RequestError, TemplateError, TypeError):
            continue
        return _interleaved(*sides)
    return None


def _sides(
    template: ChatTemplate, messages: list[Message], tools: list[Values] | None
) -> tuple[Callable[[], str], Callable[[], str]]:
    chat = template.values(messages)

    def ours() -> str:
        return template.render(messages, tools=tools)

    def theirs() -> str:
        (text,), _ = render_jinja_template(
            [chat], tools, chat_template=template.source, add_generation_prompt=True,
            bos_token=BOS, eos_token=EOS,
        )  # fmt: skip
        return text

    return ours, theirs


def _interleaved(ours: Callable[[], str], theirs: Callable[[], str]) -> Timing:
    taken: tuple[list[float], list[float]] = [], []
    waited: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(waited) < ROUNDS or time.perf_counter() < end:
        called = time.perf_counter()
        ours()
        waited.append(time.perf_counter() - called)
        for render, seconds in zip((ours, theirs), taken, strict=True):
            seconds += _processor_seconds(render)
    return Timing(1000 * median(taken[0]), 1000 * median(taken[1]), 1000 * min(waited))


def _processor_seconds(render: Callable[[], str]) -> list[float]:
    """[seconds] of processor time of the call, in this process and its descendants; [] if one of
    them has ended, since its clock is gone."""
    clocks = _clocks()
    try:
        began = sum(map(time.clock_gettime, clocks))
        render()
        return [sum(map(time.clock_gettime, clocks)) - began]
    except OSError:
        return []


def _clocks() -> list[int]:
    """Linux's ids of the processor-time clocks of this process and its descendants."""
    pids = [os.getpid()]
    for pid in pids:  # the loop appends to the list
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return [~pid << 3 | 2 for pid in pids]


def _conversations(turns: int, tools: int) -> Iterator[Conversation]:
    """Variants of the conversation, each with fewer elements that a template may refuse."""
    functions = [
        {"name": f"f{number}", "description": "Tells facts", "parameters": PARAMETERS}
        for number in range(tools)
    ]
    offered = [{"type": "function", "function": function} for function in functions]
    call = ToolCall("f0", {"city": "Bern"}, "call00001")
    called = [
        Message("assistant", tool_calls=(call,)),
        Message("tool", '{"sky": "blue"}', tool_name="f0", tool_call_id="call00001"),
    ]
    system, answer = Message("system", "You are a helpful assistant."), Message("assistant", TEXT)
    *asked, last = [Message("user", f"{number}: {TEXT}") for number in range(turns)]
    talked = list(chain.from_iterable((ask, answer) for ask in asked))
    yield [system, *chain.from_iterable((ask, *called, answer) for ask in asked), last], offered
    yield [system, *talked, last], offered
    yield [system, *talked, last], None
    yield [*talked, last], None


def _page(found: dict[str, tuple[Timing, Timing]], machine: str) -> str:
    ratios = [sorted(timings[size].ratio for timings in found.values()) for size in (0, 1)]
    (short, long) = (f"{median(each):.2f} (at most {each[-1]:.2f})" for each in ratios)
    slowest = sorted(found.items(), key=lambda each: -each[1][1].theirs)[:SHOWN]
    waited = min(short.waited for short, _ in found.values())
    return "\n".join(
        [
            INTRODUCTION.format(count=len(found)),
            machine,
            f"- ratio, the median over the templates: short {short}, long {long}",
            f"- the shortest time from call to text here: {waited:.3f} ms",
            "",
            "| template | short, ms | transformers | ratio | long, ms | transformers | ratio |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(f"| {name} | {short} | {long} |" for name, (short, long) in slowest),
            "",
        ]
    )


if __name__ == "__main__":
    main()
