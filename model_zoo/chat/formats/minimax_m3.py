"""MiniMax M3's tool calls: XML in which a name space token precedes each tag, and the arguments'
names are tags.

`<invoke name="NAME"><KEY>text</KEY><KEY><item>text</item></KEY></invoke>`: an element contains
text, items of a list, or members of an object.
"""

import itertools
import json
from typing import Any

from model_zoo.chat.formats.calls import Calls
from model_zoo.chat.formats.parameter_calls import reader_of
from model_zoo.chat.formats.schema_place import Place, Reading
from model_zoo.chat.formats.source import MAX_DEPTH, Emit, Malformed, Source, Steps

TOKEN = "]<]minimax[>["
OPEN, CLOSE = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
ITEM = "item"
TAG, _INVOKE = f"{TOKEN}<", 'invoke name="'


def read_calls(source: Source, calls: Calls) -> Steps[None]:
    """After the opener: one or more calls and the closer, which may be missing."""
    yield from source.space()
    yield from source.expect(TAG)
    yield from source.expect(_INVOKE)
    while True:
        name = yield from source.while_in(lambda char: char not in '"<>\n')
        yield from source.expect('">')
        calls.begin(name)
        yield from source.space()
        yield from source.expect(TAG)
        if (yield from _ends(source)):
            calls.arguments("{}")
        else:
            schema = Place.whole(calls.tools.get(name, {}))
            yield from _children(source, calls.arguments, schema, 0)
        calls.end()
        yield from source.space()
        if (yield from source.starts_with((TAG,))) is None:
            return
        if (yield from source.expect("/tool_call>", _INVOKE)) != _INVOKE:
            return


def _children(source: Source, emit: Emit, schema: Place, depth: int) -> Steps[None]:
    """The elements of a list or an object, after the first tag's token, and the end of the element
    that contains them."""
    if depth == MAX_DEPTH:
        raise Malformed
    tag = yield from _tag(source)
    is_list = tag == ITEM and depth > 0
    emit("[" if is_list else "{")
    for index in itertools.count():
        if not is_list:
            emit(json.dumps(tag, ensure_ascii=False) + ": ")
        within = schema.item(index) if is_list else schema.member(tag)
        yield from _element(source, emit, within, depth)
        yield from source.space()
        yield from source.expect(TAG)
        if (yield from _ends(source)):
            emit("]" if is_list else "}")
            return
        emit(", ")
        tag = yield from _tag(source)
        if is_list and tag != ITEM:
            raise Malformed


def _element(source: Source, emit: Emit, schema: Place, depth: int) -> Steps[None]:
    """The content of an element after its tag, and its end."""
    text = _Text(emit, schema)
    if (yield from source.until((TAG,), text.add)) is None:
        raise Malformed
    if (yield from _ends(source)):
        text.finish()
    elif text.begun or text.held.strip():
        raise Malformed
    else:
        yield from _children(source, emit, schema, depth + 1)


class _Text:
    """The text of an element. It is emitted as it arrives if the value is a text by its schema."""

    def __init__(self, emit: Emit, schema: Place) -> None:
        self.begun = False
        self.held = ""
        self._emit = emit
        self._schema = schema
        self._is_value = reader_of(schema) is None

    def add(self, piece: str) -> None:
        self.held += piece
        if self._is_value and (self.begun or self.held.strip()):
            quote = "" if self.begun else '"'
            self._emit(quote + json.dumps(self.held, ensure_ascii=False)[1:-1])
            self.begun, self.held = True, ""

    def finish(self) -> None:
        value = (
            '"' if self.begun else json.dumps(_value(self._schema, self.held), ensure_ascii=False)
        )
        self._emit(value)


def _value(schema: Place, text: str) -> Any:
    """The value of an element that contains only text."""
    if schema.reading() is Reading.JSON and not text.strip():
        types = schema.types() or ()
        return [] if "array" in types else {} if "object" in types else text
    convert = reader_of(schema) or str
    return convert(text)


def _tag(source: Source) -> Steps[str]:
    tag = yield from source.while_in(lambda char: char not in "<>/ \n")
    yield from source.expect(">")
    if not tag:
        raise Malformed
    return tag


def _ends(source: Source) -> Steps[bool]:
    """Whether an end tag follows, which is consumed. It ends the innermost element, whatever its
    name is."""
    if (yield from source.peek()) != "/":
        return False
    yield from source.expect("/")
    yield from _tag(source)
    return True
