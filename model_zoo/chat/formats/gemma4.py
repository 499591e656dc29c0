"""Gemma 4's tool calls: `call:NAME{key:value,...}`, with strings between `<|"|>` marks."""

import json
from typing import Any

from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.source import Malformed, Source, Steps

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def read_call(source: Source, calls: Calls) -> Steps[None]:
    yield from source.expect("call:")
    name = yield from source.while_in(lambda char: char not in "{<")
    calls.begin(name)
    arguments = yield from _object(source)
    calls.arguments(json.dumps(arguments, ensure_ascii=False))
    calls.end()
    yield from source.starts_with((CLOSE,))


def _object(source: Source) -> Steps[dict[str, Any]]:
    result: dict[str, Any] = {}
    yield from source.expect("{")
    if (yield from source.starts_with(("}",))):
        return result
    while True:
        key = yield from _key(source)
        result[key] = yield from _value(source)
        if (yield from source.expect(",", "}")) == "}":
            return result


def _key(source: Source) -> Steps[str]:
    if (yield from source.starts_with((QUOTE,))):
        key = yield from _quoted(source)
        yield from source.expect(":")
        return key
    key = yield from source.while_in(lambda char: char not in ":{}[],<")
    yield from source.expect(":")
    return key.strip()


def _value(source: Source) -> Steps[Any]:
    if (yield from source.starts_with((QUOTE,))):
        return (yield from _quoted(source))
    first = yield from source.peek()
    if first == "{":
        return (yield from _object(source))
    if first == "[":
        return (yield from _list(source))
    text = yield from source.while_in(lambda char: char not in ",}]<")
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed from None


def _list(source: Source) -> Steps[list[Any]]:
    result: list[Any] = []
    yield from source.expect("[")
    if (yield from source.starts_with(("]",))):
        return result
    while True:
        result.append((yield from _value(source)))
        if (yield from source.expect(",", "]")) == "]":
            return result


def _quoted(source: Source) -> Steps[str]:
    pieces: list[str] = []
    if (yield from source.until((QUOTE,), pieces.append)) is None:
        raise Malformed
    return "".join(pieces)
