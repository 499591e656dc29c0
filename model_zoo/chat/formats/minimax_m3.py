"""MiniMax M3's tool calls: XML in which a name space token precedes each tag, and the arguments'
names are tags.

`<invoke name="NAME"><KEY>text</KEY><KEY><item>text</item></KEY></invoke>`: an element contains
text, items of a list, or members of an object.
"""

import json
from collections.abc import Mapping
from typing import Any

from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.parameters import reader_of
from model_zoo.chat.formats.source import Emit, Malformed, Source, Steps

TOKEN = "]<]minimax[>["
OPEN, CLOSE = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
MAX_DEPTH = 32  # of elements within each other
_TAG, _INVOKE, _ITEM = f"{TOKEN}<", 'invoke name="', "item"

Schema = Mapping[str, Any]


def read_calls(source: Source, calls: Calls) -> Steps[None]:
    """After the opener: one or more calls and the closer, which may be missing."""
    yield from source.space()
    yield from source.expect(_TAG)
    yield from source.expect(_INVOKE)
    while True:
        name = yield from source.while_in(lambda char: char not in '"<>\n')
        yield from source.expect('">')
        calls.begin(name)
        yield from source.space()
        yield from source.expect(_TAG)
        if (yield from _ends(source, "invoke")):
            calls.arguments("{}")
        else:
            yield from _children(source, calls.arguments, calls.tools.get(name, {}), "invoke", 0)
        calls.end()
        yield from source.space()
        if (yield from source.starts_with((_TAG,))) is None:
            return
        if (yield from source.expect("/tool_call>", _INVOKE)) != _INVOKE:
            return


def _children(source: Source, emit: Emit, schema: Schema, parent: str, depth: int) -> Steps[None]:
    """The elements of a list or an object, after the first tag's token, and the end of `parent`."""
    if depth == MAX_DEPTH:
        raise Malformed
    tag = yield from _tag(source)
    is_list = tag == _ITEM and depth > 0
    emit("[" if is_list else "{")
    while True:
        if not is_list:
            emit(json.dumps(tag, ensure_ascii=False) + ": ")
        yield from _element(source, emit, _within(schema, None if is_list else tag), tag, depth)
        yield from source.space()
        yield from source.expect(_TAG)
        if (yield from _ends(source, parent)):
            emit("]" if is_list else "}")
            return
        emit(", ")
        tag = yield from _tag(source)
        if is_list and tag != _ITEM:
            raise Malformed


def _element(source: Source, emit: Emit, schema: Schema, tag: str, depth: int) -> Steps[None]:
    """The content of an element after its tag, and its end."""
    pieces: list[str] = []
    if (yield from source.until((_TAG,), pieces.append)) is None:
        raise Malformed
    text = "".join(pieces)
    if (yield from _ends(source, tag)):
        convert = reader_of(schema) or str
        emit(json.dumps(convert(text), ensure_ascii=False))
    elif text.strip():
        raise Malformed
    else:
        yield from _children(source, emit, schema, tag, depth + 1)


def _tag(source: Source) -> Steps[str]:
    tag = yield from source.while_in(lambda char: char not in "<>/ \n")
    yield from source.expect(">")
    if not tag:
        raise Malformed
    return tag


def _ends(source: Source, tag: str) -> Steps[bool]:
    if (yield from source.peek()) != "/":
        return False
    yield from source.expect(f"/{tag}>")
    return True


def _within(schema: Schema, key: str | None) -> Schema:
    """The schema of a member, or of the items if `key` is None; empty if it does not say."""
    found = schema.get("items") if key is None else _mapping(schema.get("properties")).get(key)
    return _mapping(found)


def _mapping(value: object) -> Schema:
    return value if isinstance(value, Mapping) else {}
