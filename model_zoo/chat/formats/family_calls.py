"""Grammars of the calls of single families."""

from model_zoo.chat.formats import pythonic
from model_zoo.chat.formats.calls import (
    Calls,
    arguments_of,
    json_calls,
    json_list,
    json_sequence,
)
from model_zoo.chat.formats.family_parameters import QWEN
from model_zoo.chat.formats.source import Malformed, Source, Steps

DEEPSEEK_CALL, DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DEEPSEEK_CALL_END, DEEPSEEK_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_MARKERS = (DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, DEEPSEEK_END)
HUNYUAN_CALL, HUNYUAN_CALL_END = "<tool_call>", "</tool_call>"
KIMI_CALL, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_CALL_END, KIMI_END = "<|tool_call_end|>", "<|tool_calls_section_end|>"
KIMI_MARKERS = (KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END, KIMI_END)
DIRECT_ANSWERS = frozenset(("directly-answer", "directly_answer"))
SOLAR_CALL, SOLAR_NAME = "<|tool_call:begin|>", "<|tool_call:name|>"
SOLAR_ARGUMENTS, SOLAR_CALL_END = "<|tool_call:args|>", "<|tool_call:end|>"
SOLAR_MARKERS = (SOLAR_CALL, SOLAR_NAME, SOLAR_ARGUMENTS, SOLAR_CALL_END)


def mistral(source: Source, calls: Calls) -> Steps[None]:
    """After `[TOOL_CALLS]`: a JSON list; or a name, optionally `[CALL_ID]ID`, `[ARGS]` and JSON."""
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
    """After `<tool_call>`: JSON (Hermes, Qwen 2.5 and 3), or one parameter at a time (Qwen 3 Coder,
    Qwen 3.5). Small models write more closing braces than opening ones."""
    yield from source.space()
    if (yield from source.peek()) == "<":
        yield from QWEN.read(source, calls)
        return
    yield from json_sequence(source, calls)
    excess = yield from source.while_in(lambda char: char == "}" or char.isspace())
    closer = yield from source.closing(("</tool_call>",))
    if excess and closer is None and (yield from source.peek()):
        raise Malformed  # the braces are text


def unmarked_function(source: Source, calls: Calls) -> Steps[None]:
    """After a `<function=` without `<tool_call>` before it: calls of declared tools (Qwen 3 Coder,
    Qwen 3.5)."""
    calls.declared_only = True
    try:
        yield from QWEN.read_begun(source, calls)
    finally:
        calls.declared_only = False


def deepseek(source: Source, calls: Calls) -> Steps[None]:
    """After `<｜tool▁calls▁begin｜>`: names with JSON, for R1 and V3 in a Markdown block."""
    expected: tuple[str, ...] = (DEEPSEEK_CALL,)
    while True:
        yield from source.space()
        if (yield from source.expect(*expected)) == DEEPSEEK_END:
            return
        expected = (DEEPSEEK_CALL, DEEPSEEK_END)
        first = yield from _up_to(source, DEEPSEEK_SEPARATOR)
        if (yield from source.peek()) == "{" or first.strip() != "function":
            yield from arguments_of(source, calls, first.strip())
        else:
            yield from _markdown_call(source, calls)
        yield from source.space()
        if (yield from source.peek()):
            yield from source.expect(DEEPSEEK_CALL_END)
        else:
            return


def hunyuan(source: Source, calls: Calls) -> Steps[None]:
    """After `<tool_calls>`: names with JSON in a Markdown block, each within `<tool_call>`; or JSON
    alone, as Hunyuan A13B writes it."""
    if (yield from source.peek()) != "<":
        yield from json_sequence(source, calls)
        return
    yield from source.expect(HUNYUAN_CALL)
    while True:
        yield from _markdown_call(source, calls)
        yield from source.space()
        yield from source.closing((HUNYUAN_CALL_END,))
        yield from source.space()
        if (yield from source.starts_with((HUNYUAN_CALL,))) is None:
            return


def kimi(source: Source, calls: Calls) -> Steps[None]:
    """After `<|tool_calls_section_begin|>`: ids such as `functions.NAME:0` with JSON."""
    yield from source.space()
    yield from source.expect(KIMI_CALL)
    while True:
        identity = (yield from _up_to(source, KIMI_ARGUMENTS)).strip()
        name = identity.removeprefix("functions.").rsplit(":", 1)[0]
        yield from arguments_of(source, calls, name, identity)
        yield from source.space()
        yield from source.closing((KIMI_CALL_END,))
        yield from source.space()
        if (yield from source.peek()) != "<":
            return
        if (yield from source.expect(KIMI_CALL, KIMI_END)) == KIMI_END:
            return


def solar(source: Source, calls: Calls) -> Steps[None]:
    """After `<|tool_calls|>`: ids, names and JSON, each after its own marker."""
    yield from source.space()
    yield from source.expect(SOLAR_CALL)
    while True:
        identity = (yield from _up_to(source, SOLAR_NAME)).strip()
        name = (yield from _up_to(source, SOLAR_ARGUMENTS)).strip()
        yield from arguments_of(source, calls, name, identity)
        yield from source.space()
        yield from source.closing((SOLAR_CALL_END,))
        yield from source.space()
        if (yield from source.starts_with((SOLAR_CALL,))) is None:
            return


def function_tag(source: Source, calls: Calls) -> Steps[None]:
    """After `<function=`: a name, `>` and JSON (Functionary 3.1)."""
    name = yield from source.while_in(lambda char: char not in "> \n")
    yield from source.expect(">")
    yield from arguments_of(source, calls, name)
    yield from source.space()
    yield from source.closing(("</function>",))


def llama4(source: Source, calls: Calls) -> Steps[None]:
    """After `<|python_start|>` or `<|python_end|>`: calls in Python or JSON, or none."""
    yield from source.space()
    first = yield from source.peek()
    if first == "[":
        yield from pythonic.call_list(source, calls)
    elif first == "{":
        yield from json_calls(source, calls)


def tool_code(source: Source, calls: Calls) -> Steps[None]:
    """After `` ```tool_code ``: one call of Python or a list of them."""
    yield from source.space()
    first = yield from source.peek()
    yield from (pythonic.call_list if first == "[" else pythonic.call)(source, calls)
    yield from source.space()
    yield from source.closing(("```",))


def python_block(source: Source, calls: Calls) -> Steps[None]:
    """After `<|tool_call_start|>`: lines of calls in Python, in a Markdown block (MiniCPM 3)."""
    if (yield from source.starts_with(("```",))):
        yield from source.starts_with(("python",))
    yield from source.space()
    yield from pythonic.call_lines(source, calls)
    yield from source.closing(("```",))


def command_r(source: Source, calls: Calls) -> Steps[None]:
    """After `Action:`: a JSON list in a Markdown block. The template tells the model to call a tool
    that it makes up when no other is needed."""
    calls.ignored = DIRECT_ANSWERS
    yield from source.space()
    yield from source.expect("```json")
    yield from source.space()
    yield from json_list(source, calls)
    yield from source.space()
    yield from source.closing(("```",))


def _markdown_call(source: Source, calls: Calls) -> Steps[None]:
    """A line with a name, then JSON in a Markdown block."""
    name = yield from _up_to(source, "\n")
    yield from source.space()
    yield from source.starts_with(("```json",))
    yield from arguments_of(source, calls, name.strip())
    yield from source.space()
    yield from source.closing(("```",))


def _up_to(source: Source, marker: str) -> Steps[str]:
    pieces: list[str] = []
    if (yield from source.until((marker,), pieces.append)) is None:
        raise Malformed
    return "".join(pieces)
