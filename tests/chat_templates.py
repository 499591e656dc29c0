"""Published chat templates, conversations that use all their features, and their reference."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import ImagePart, Message, ToolCall
from model_zoo.chat.unforged import render_unforged
from model_zoo.tokenizers.tokenizer import Tokenizer
from tests.reference_data import reference_data, reference_files
from tools.reference_data import FURTHER, TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Talk:
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None


def every_template() -> list[str]:
    """The names of all templates at hand, and of those that other tests need."""
    return sorted({*TEMPLATES, *(path.stem for path in reference_files("templates", "*.jinja"))})


def all_templates() -> list[str]:
    """`every_template`, and those that only tests of forms and formats need."""
    return sorted({*every_template(), *(p.stem for p in reference_files(FURTHER, "*.jinja"))})


def template_source(name: str) -> str:
    further = next(iter(reference_files(FURTHER, f"{name}.jinja")), None)
    path = further or reference_data(f"templates/{name}.jinja")
    return path.read_text(encoding="utf-8")


def rendered_by_transformers(
    source: str,
    chat: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    **variables: Any,
) -> str | None:
    """None where rendering raises, for any reason."""
    variables = {"add_generation_prompt": True} | SPECIAL | variables
    try:
        (text,), _ = render_jinja_template([chat], tools=tools, chat_template=source, **variables)
    except (TemplateError, TypeError, AttributeError):
        return None
    return text


def plain(message: Message) -> dict[str, Any]:
    """The message as users of `transformers` write it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if not isinstance(message.content, str):
        turn["content"] = [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part}
            for part in message.content
        ]
    if message.thinking is not None:
        turn["reasoning_content"] = message.thinking
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function"}
            | ({"id": call.id} if call.id is not None else {})
            | {"function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_name is not None:
        turn["name"] = message.tool_name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


# DeepSeek's API has None as content beside calls, and arguments as JSON text.
CALLS_ALONE = frozenset({"deepseek-ai-DeepSeek-R1-Distill-Llama-8B"})


def documented(name: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the authors of the template `name` document them."""
    turns = [plain(message) for message in messages]
    if name not in CALLS_ALONE:
        return turns
    return [each for turn in turns for each in calling_alone(turn)]


def calling_alone(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Calls with arguments as JSON text and without content; words are a turn before them."""
    if "tool_calls" not in turn:
        return [turn]
    calls = [
        call | {"function": call["function"] | {"arguments": as_json(call)}}
        for call in turn.pop("tool_calls")
    ]
    alone = {"role": "assistant", "content": None, "tool_calls": calls}
    return [turn, alone] if turn["content"] else [turn | alone]


def as_json(call: dict[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def offered(
    name: str, properties: dict[str, Any], required: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    described = {"name": name, "description": f"How's the {name} in <city>? „…“ & \n more"}
    return {"type": "function", "function": {**described, "parameters": parameters, **more}}


CITY = {"city": {"type": "string", "description": " Zürich, … "}}
TEXTS = {"type": "array", "items": {"type": "string"}, "description": "several"}
WEATHER = offered("weather", CITY, ["city"])
TIME = offered(
    "time",
    {
        "zone": {"type": "string", "enum": ["UTC", "CET"], "default": "UTC", "description": "d"},
        "cities": TEXTS,
        "hours": {"type": "integer", "description": "h", "nullable": True},
        "precise": {"type": "boolean", "description": "p", "default": False},
        "either": {"type": ["string", "number"], "description": "two"},
        "place": {
            "type": "object",
            "description": "where",
            "properties": {"x": {"type": "number", "description": "x"}, "tags": TEXTS},
            "required": ["x"],
        },
        "one": {"oneOf": [{"type": "string", "description": "a"}, {"type": "number"}]},
        "list": {"type": "array", "items": {"type": "object", "properties": CITY}},
    },
    ["zone", "place"],
)
BARE = offered("bare", {})
ANSWERING = offered("answering", CITY, response={"type": "object", "description": "an answer"})
RETURNING = offered("returning", CITY, **{"return": {"type": "number", "description": "a number"}})

IMAGE = ImagePart()
SYSTEM = Message("system", "  You are brief.\n")
ASK, ANSWER = Message("user", " Wie heißt du? <b>\"'&\n"), Message("assistant", "Caravan. ")
AGAIN, THANKS = Message("user", "And in Bern?"), Message("user", "Danke 👍")
THOUGHT = Message("assistant", "<think>\nhm\n</think>\n\nFour.")
THINKING = Message("assistant", "Four.", thinking="\nTwo and two, <b>hm</b>.\n")
TOOL_RESPONSE = Message("user", "<tool_response>\n4\n</tool_response>")
ARGUMENTS = {
    "city": 'Zürich "&<b>\n',
    "hours": 3,
    "precise": True,
    "nothing": None,
    "height": 4.5,
    "cities": ["Bern", {"x": [1, None]}],
    "place": {"x": 1.5, "Ä": "ö", "b": False},
}
ONE, TWO = "call00001", "call00002"
CALL = ToolCall("weather", {"city": "Bern"}, ONE)
OTHER = ToolCall("time", ARGUMENTS, TWO)
CALLS = Message("assistant", tool_calls=(CALL,))
CALLS_OTHER = Message("assistant", tool_calls=(OTHER,))
CALLS_BOTH = Message("assistant", tool_calls=(CALL, OTHER))
RESULT = Message("tool", '{"sky": "blue & <b>", "°C": 21}', tool_name="weather", tool_call_id=ONE)
OTHER_RESULT = Message("tool", "12:30\n", tool_name="time", tool_call_id=TWO)
TOOLS = [WEATHER, BARE]

TALKS: dict[str, Talk] = {
    "one question": Talk([ASK]),
    "system": Talk([SYSTEM, ASK]),
    "turns": Talk([ASK, ANSWER, Message("user", "2+2?"), THOUGHT, THANKS]),
    "turns with system": Talk([SYSTEM, ASK, ANSWER, Message("user", "")]),
    "many turns": Talk([ASK, ANSWER, AGAIN, THOUGHT] * 20 + [THANKS]),
    "many turns with system": Talk([SYSTEM] + [ASK, ANSWER, AGAIN, THOUGHT] * 20 + [THANKS]),
    "system in the middle": Talk([ASK, ANSWER, SYSTEM, ASK]),
    "ends with the assistant": Talk([ASK, ANSWER]),
    "tool response as a user": Talk([ASK, ANSWER, TOOL_RESPONSE]),
    "two users in a row": Talk([ASK, ASK]),
    "nothing": Talk([]),
    "no tools": Talk([SYSTEM, ASK, ANSWER, THANKS], []),
    "tools": Talk([ASK], TOOLS),
    "tools with system": Talk([SYSTEM, ASK, ANSWER, THANKS], TOOLS),
    "a tool of many types": Talk([ASK], [TIME]),
    "many tools": Talk([ASK], [WEATHER, TIME, BARE, ANSWERING, RETURNING]),
    "tools that return": Talk([SYSTEM, ASK], [RETURNING, ANSWERING]),
    "tools and nothing else": Talk([], TOOLS),
    "a call": Talk([ASK, CALLS], TOOLS),
    "a call answered": Talk([SYSTEM, ASK, CALLS, RESULT], TOOLS),
    "a call without tools": Talk([ASK, CALLS, RESULT, ANSWER, AGAIN]),
    "a call, and on": Talk([ASK, CALLS, RESULT, ANSWER, AGAIN], TOOLS),
    "calls one by one": Talk([ASK, CALLS, RESULT, CALLS_OTHER, OTHER_RESULT], TOOLS),
    "calls in two turns": Talk(
        [ASK, CALLS, RESULT, ANSWER, AGAIN, CALLS_OTHER, OTHER_RESULT, ANSWER, THANKS], TOOLS
    ),
    "parallel calls": Talk([ASK, CALLS_BOTH, RESULT, OTHER_RESULT], TOOLS),
    "parallel calls, and on": Talk(
        [SYSTEM, ASK, CALLS_BOTH, RESULT, OTHER_RESULT, ANSWER, THANKS], TOOLS
    ),
    "words and a call": Talk(
        [ASK, Message("assistant", "Let me see. ", tool_calls=(CALL,)), RESULT], TOOLS
    ),
    "no id and no name": Talk(
        [
            ASK,
            Message("assistant", tool_calls=(ToolCall("weather", {}),)),
            Message("tool", "sunny"),
        ],
        TOOLS,
    ),
    "a result alone": Talk([ASK, RESULT], TOOLS),
    "a result in parts": Talk(
        [ASK, CALLS, Message("tool", ("blue ", "sky"), tool_call_id=ONE)], TOOLS
    ),
    "thinking": Talk([ASK, THINKING, THANKS]),
    "thinking in many turns": Talk([SYSTEM] + [ASK, THINKING] * 5 + [THANKS]),
    "thinking in the last turn": Talk([ASK, THINKING]),
    "empty thinking": Talk([ASK, Message("assistant", "Four.", thinking=""), THANKS]),
    "thinking and a call": Talk(
        [ASK, Message("assistant", thinking="I look.", tool_calls=(CALL,)), RESULT], TOOLS
    ),
    "thinking, a call, and on": Talk(
        [
            ASK,
            Message("assistant", thinking="I look.", tool_calls=(CALL,)),
            RESULT,
            THINKING,
            THANKS,
        ],
        TOOLS,
    ),
    "thinking, words and a call": Talk(
        [ASK, Message("assistant", "So.", thinking="Hm.", tool_calls=(CALL,)), RESULT], TOOLS
    ),
    "an image": Talk([Message("user", (IMAGE, "What is this? "))]),
    "an image with system": Talk([SYSTEM, Message("user", ("See:", IMAGE))]),
    "an image alone": Talk([Message("user", (IMAGE,))]),
    "two images": Talk([Message("user", (IMAGE, IMAGE, "Compare."))]),
    "images in two turns": Talk(
        [Message("user", (IMAGE, "This?")), ANSWER, Message("user", (IMAGE, "And this?"))]
    ),
    "text, image, text": Talk([Message("user", (" Before", IMAGE, "after "))]),
    "an image and tools": Talk([Message("user", (IMAGE, "Where?")), CALLS, RESULT], TOOLS),
    "texts in parts": Talk([Message("user", ("One, ", "two."))]),
    "an answer in parts": Talk([ASK, Message("assistant", ("One, ", "two.")), THANKS]),
    "a system text in parts": Talk([Message("system", ("Be brief.",)), ASK]),
}


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation without images; `variables` are the template's."""
    rendered = render_unforged(template, tokenizer, messages, variables)
    return tokenizer.with_bos(tokenizer.encode_parts(rendered.cut(tokenizer)))


def specials_in(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The texts of the control and user-defined tokens among `tokens`."""
    special = {*tokenizer.vocabulary.control.values(), *tokenizer.vocabulary.user_defined.values()}
    return [tokenizer.vocabulary.tokens[token] for token in tokens if token in special]
