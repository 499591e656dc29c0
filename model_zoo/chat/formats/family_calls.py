"""Grammars of the calls of single families."""

import json
from collections.abc import Mapping
from typing import Any

from model_zoo.chat.formats.calls import Calls, arguments_of, json_calls, json_list
from model_zoo.chat.formats.source import Malformed, Source, Steps

DEEPSEEK_CALL, DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DEEPSEEK_CALL_END, DEEPSEEK_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


def mistral(source: Source, calls: Calls) -> Steps[None]:
    """After `[TOOL_CALLS]`: a JSON list, or a name, perhaps `[CALL_ID]ID`, `[ARGS]` and JSON."""
    yield from source.space()
    if (yield from source.peek()) in ("[", "{"):
        following = yield from source.starts_with(("[ARGS]", "[CALL_ID]"))
        if following is not None:
            raise Malformed  # the name is missing
        yield from json_calls(source, calls)
        return
    name = (yield from source.while_in(lambda char: char not in "[{")).strip()
    identity: list[str] = []
    marker = yield from source.starts_with(("[CALL_ID]", "[ARGS]"))
    if marker == "[CALL_ID]":
        yield from source.until(("[ARGS]",), identity.append)
    yield from arguments_of(source, calls, name, "".join(identity).strip())


def tool_call_tag(source: Source, calls: Calls) -> Steps[None]:
    """After `<tool_call>`: JSON (Hermes, Qwen 2.5 and 3), or `<function=NAME>` with one
    `<parameter=KEY>` for each argument (Qwen 3 Coder, Qwen 3.5)."""
    yield from source.space()
    if (yield from source.starts_with(("<function=",))):
        yield from _parameters(source, calls)
    else:
        yield from json_calls(source, calls)
    yield from source.space()
    yield from source.starts_with(("</tool_call>",))


def _parameters(source: Source, calls: Calls) -> Steps[None]:
    name = yield from _up_to(source, ">")
    calls.begin(name.strip())
    schema = calls.tools.get(name.strip(), {})
    separator = "{"
    while True:
        yield from source.space()
        if (yield from source.expect("<parameter=", "</function>")) == "</function>":
            break
        key = (yield from _up_to(source, ">")).strip()
        text = yield from _up_to(source, "</parameter>")
        value = _typed(text.removeprefix("\n").removesuffix("\n"), schema, key)
        member = json.dumps({key: value}, ensure_ascii=False)[1:-1]
        calls.arguments(separator + member)
        separator = ", "
    calls.arguments("{}" if separator == "{" else "}")
    calls.end()


def _typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """The value of a parameter that is written without quotes: a string, unless the schema says
    otherwise and the text is JSON."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    kind = declared.get("type") if isinstance(declared, Mapping) else None
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def deepseek(source: Source, calls: Calls) -> Steps[None]:
    """After `<｜tool▁calls▁begin｜>`: names with JSON, for R1 and V3 in a Markdown block."""
    while True:
        yield from source.space()
        if (yield from source.expect(DEEPSEEK_CALL, DEEPSEEK_END)) == DEEPSEEK_END:
            return
        first = yield from _up_to(source, DEEPSEEK_SEPARATOR)
        if (yield from source.peek()) == "{" or first.strip() != "function":
            yield from arguments_of(source, calls, first.strip())
        else:
            name = yield from _up_to(source, "\n")
            yield from source.space()
            yield from source.starts_with(("```json",))
            yield from arguments_of(source, calls, name.strip())
            yield from source.space()
            yield from source.starts_with(("```",))
        yield from source.space()
        if (yield from source.peek()):
            yield from source.expect(DEEPSEEK_CALL_END)
        else:
            return


def command_r(source: Source, calls: Calls) -> Steps[None]:
    """After `Action:`: a JSON list in a Markdown block."""
    yield from source.space()
    yield from source.expect("```json")
    yield from source.space()
    yield from json_list(source, calls)
    yield from source.space()
    yield from source.starts_with(("```",))


def _up_to(source: Source, marker: str) -> Steps[str]:
    pieces: list[str] = []
    if (yield from source.until((marker,), pieces.append)) is None:
        raise Malformed
    return "".join(pieces)
