"""Dialogues with a tool that adds two numbers, for training the demo model; held-out questions.

Without the tool, the model adds numbers up to 99 itself. With the tool, it calls it for every sum,
and states the result that the tool returns. Names, descriptions and the schema of the tool vary.
This module needs only the standard library.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo_dialogues import (
    ADD,
    LARGEST_TERM,
    SYSTEM_MESSAGES,
    draw_exchange,
    is_held_out,
    sum_key,
    worded,
)

NAMES = "add add add sum plus add_numbers calculate_sum adder".split()
PARAMETERS = ("a b", "a b", "a b", "x y", "first second", "left right", "number1 number2")
DESCRIPTIONS = (
    "Add two numbers.|Adds two numbers.|Add two integers.|Returns the sum of two numbers.|"
    "Add a and b.|Calculate the sum of two integers.|Adds two numbers and returns the result.|"
).split("|")
PROPERTY_DESCRIPTIONS = "The {} number|The {} number.|The {} integer to add".split("|")
MORE_ADD = (
    "Please add {a} and {b}.|Add {a} to {b}.|Use the tool: {a} + {b}|What do {a} and {b} make?|"
    "I need the sum of {a} and {b}.|Can you add {a} and {b}?"
).split("|")
# The text that precedes the tools in the system message, and the texts around a call in a reply.
TOOLS_BEGIN = "# Tools\n"
CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolDialogue:
    """Messages as chat templates take them, with `tool_calls` in those of the assistant."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ToolQuestion:
    """A dialogue that ends before a reply of the assistant, and its only right text."""

    skill: str
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    answer: str


SKILLS = ("calling", "result", "other")


def held_out(seed: int = 0, *, per_skill: int = 60) -> list[ToolQuestion]:
    """Sums that training contains neither with nor without the tool: questions for which to call
    the tool, and results to state; and questions that need no tool."""
    rng = random.Random(f"held out tools {seed}")
    questions = []
    for skill in SKILLS:
        for _ in range(per_skill):
            tool = _tool(rng)
            messages = _opening(rng)
            if skill == "other":
                messages += draw_exchange(rng, held=True)
            else:
                messages += _sum(rng, tool, held=True)[: 2 if skill == "calling" else 4]
            [answer] = as_text(messages[-1:])
            questions.append(ToolQuestion(skill, messages[:-1], (tool,), answer["content"]))
    return questions


def training_dialogues(seed: int | str) -> Iterator[ToolDialogue]:
    """An infinite iterator of dialogues of one to three questions without held-out sums."""
    rng = random.Random(f"training tools {seed}")
    while True:
        tool = _tool(rng)
        messages = _opening(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.25:
                messages += draw_exchange(rng, held=False)
            else:
                messages += _sum(rng, tool, held=False)
        yield ToolDialogue(messages, (tool,))


def as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, str]]:
    """Messages of role and content, as the chat template renders tools and calls."""
    rendered = [{"role": each["role"], "content": _content(each)} for each in messages]
    if not tools:
        return rendered
    listed = TOOLS_BEGIN + "\n".join(json.dumps(tool) for tool in tools)
    if rendered and rendered[0]["role"] == "system":
        listed = rendered.pop(0)["content"] + "\n\n" + listed
    return [{"role": "system", "content": listed}, *rendered]


def _content(message: Message) -> str:
    calls = [
        CALL_BEGIN + json.dumps(each["function"]) + CALL_END
        for each in message.get("tool_calls", ())
    ]
    return str(message["content"]) + "\n".join(calls)


def _opening(rng: random.Random) -> list[Message]:
    if rng.random() > 0.3:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}]


def _tool(rng: random.Random) -> dict[str, Any]:
    names = rng.choice(PARAMETERS).split()
    kind = rng.choice(("integer", "integer", "number"))
    described, titled = rng.random() < 0.3, rng.random() < 0.15
    wording = rng.choice(PROPERTY_DESCRIPTIONS)
    properties: dict[str, Any] = {}
    for name, place in zip(names, ("first", "second"), strict=True):
        properties[name] = {"type": kind}
        if titled:
            properties[name] = {"title": name.title(), "type": kind}
        if described:
            properties[name]["description"] = wording.format(place)
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": names}
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function = {
        "name": rng.choice(NAMES),
        "description": rng.choice(DESCRIPTIONS),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _sum(rng: random.Random, tool: Mapping[str, Any], *, held: bool) -> list[Message]:
    """The messages of a sum: the question, the call, its result, and the answer."""
    function = tool["function"]
    while True:
        a, b = (rng.randint(0, 10 ** rng.choice((1, 2, 3, 4, 4)) - 1) for _ in range(2))
        if all(is_held_out(key) == held for key in _keys(a, b)):
            break
    wording = rng.choice(ADD + MORE_ADD)
    arguments = dict(zip(function["parameters"]["required"], (a, b), strict=True))
    call = {"name": function["name"], "arguments": arguments}
    result = rng.choice(("{}", "{}", '{{"result": {}}}', '{{"sum": {}}}')).format(a + b)
    return [
        {"role": "user", "content": worded(rng, wording, a=a, b=b)},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"{a} + {b} = {a + b}."},
    ]


def _keys(a: int, b: int) -> list[str]:
    """Those of a sum with the tool, and of the same sum without it where the model is trained to
    add it itself. A sum that is held out with one of them alone is never drawn."""
    keys = [f"add {min(a, b)} {max(a, b)}"]
    return keys if max(a, b) > LARGEST_TERM else [*keys, sum_key(a, b)]
