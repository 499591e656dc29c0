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
from model_zoo.chat.formats.scanner import Malformed, Scanner, Steps

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


def mistral(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `[TOOL_CALLS]`: a JSON list; or a name, optionally `[CALL_ID]ID`, `[ARGS]` and JSON."""
    yield from scanner.space()
    if (yield from scanner.peek()) in ("[", "{"):
        following = yield from scanner.starts_with(("[ARGS]", "[CALL_ID]"))
        if following is not None:
            raise Malformed  # the name is missing
        yield from json_calls(scanner, calls)
        return
    name = (yield from scanner.while_in(lambda char: char not in "[{")).strip()
    identity: list[str] = []
    marker = yield from scanner.starts_with(("[CALL_ID]", "[ARGS]"))
    if marker == "[CALL_ID]":
        yield from scanner.until(("[ARGS]",), identity.append)
    yield from arguments_of(scanner, calls, name, "".join(identity).strip())


def tool_call_tag(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<tool_call>`: JSON (Hermes, Qwen 2.5 and 3), or one parameter at a time (Qwen 3 Coder,
    Qwen 3.5). Small models write more closing braces than opening ones."""
    yield from scanner.space()
    if (yield from scanner.peek()) == "<":
        yield from QWEN.read(scanner, calls)
        return
    yield from json_sequence(scanner, calls)
    excess = yield from scanner.while_in(lambda char: char == "}" or char.isspace())
    closer = yield from scanner.closing(("</tool_call>",))
    if excess and closer is None and (yield from scanner.peek()):
        raise Malformed  # the braces are text


def unmarked_function(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After a `<function=` without `<tool_call>` before it: calls of declared tools (Qwen 3 Coder,
    Qwen 3.5)."""
    calls.declared_only = True
    try:
        yield from QWEN.read_begun(scanner, calls)
    finally:
        calls.declared_only = False


def deepseek(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<｜tool▁calls▁begin｜>`: names with JSON, for R1 and V3 in a Markdown block."""
    expected: tuple[str, ...] = (DEEPSEEK_CALL,)
    while True:
        yield from scanner.space()
        if (yield from scanner.expect(*expected)) == DEEPSEEK_END:
            return
        expected = (DEEPSEEK_CALL, DEEPSEEK_END)
        first = yield from _up_to(scanner, DEEPSEEK_SEPARATOR)
        if (yield from scanner.peek()) == "{" or first.strip() != "function":
            yield from arguments_of(scanner, calls, first.strip())
        else:
            yield from _markdown_call(scanner, calls)
        yield from scanner.space()
        if (yield from scanner.peek()):
            yield from scanner.expect(DEEPSEEK_CALL_END)
        else:
            return


def hunyuan(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<tool_calls>`: names with JSON in a Markdown block, each within `<tool_call>`; or JSON
    alone, as Hunyuan A13B writes it."""
    if (yield from scanner.peek()) != "<":
        yield from json_sequence(scanner, calls)
        return
    yield from scanner.expect(HUNYUAN_CALL)
    while True:
        yield from _markdown_call(scanner, calls)
        yield from scanner.space()
        yield from scanner.closing((HUNYUAN_CALL_END,))
        yield from scanner.space()
        if (yield from scanner.starts_with((HUNYUAN_CALL,))) is None:
            return


def kimi(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<|tool_calls_section_begin|>`: ids such as `functions.NAME:0` with JSON."""
    yield from scanner.space()
    yield from scanner.expect(KIMI_CALL)
    while True:
        identity = (yield from _up_to(scanner, KIMI_ARGUMENTS)).strip()
        name = identity.removeprefix("functions.").rsplit(":", 1)[0]
        yield from arguments_of(scanner, calls, name, identity)
        yield from scanner.space()
        yield from scanner.closing((KIMI_CALL_END,))
        yield from scanner.space()
        if (yield from scanner.peek()) != "<":
            return
        if (yield from scanner.expect(KIMI_CALL, KIMI_END)) == KIMI_END:
            return


def solar(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<|tool_calls|>`: ids, names and JSON, each after its own marker."""
    yield from scanner.space()
    yield from scanner.expect(SOLAR_CALL)
    while True:
        identity = (yield from _up_to(scanner, SOLAR_NAME)).strip()
        name = (yield from _up_to(scanner, SOLAR_ARGUMENTS)).strip()
        yield from arguments_of(scanner, calls, name, identity)
        yield from scanner.space()
        yield from scanner.closing((SOLAR_CALL_END,))
        yield from scanner.space()
        if (yield from scanner.starts_with((SOLAR_CALL,))) is None:
            return


def function_tag(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<function=`: a name, `>` and JSON (Functionary 3.1)."""
    name = yield from scanner.while_in(lambda char: char not in "> \n")
    yield from scanner.expect(">")
    yield from arguments_of(scanner, calls, name)
    yield from scanner.space()
    yield from scanner.closing(("</function>",))


def llama4(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<|python_start|>` or `<|python_end|>`: calls in Python or JSON, or none."""
    yield from scanner.space()
    first = yield from scanner.peek()
    if first == "[":
        yield from pythonic.call_list(scanner, calls)
    elif first == "{":
        yield from json_calls(scanner, calls)


def tool_code(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `` ```tool_code ``: one call of Python or a list of them."""
    yield from scanner.space()
    first = yield from scanner.peek()
    yield from (pythonic.call_list if first == "[" else pythonic.call)(scanner, calls)
    yield from scanner.space()
    yield from scanner.closing(("```",))


def python_block(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `<|tool_call_start|>`: lines of calls in Python, in a Markdown block (MiniCPM 3)."""
    if (yield from scanner.starts_with(("```",))):
        yield from scanner.starts_with(("python",))
    yield from scanner.space()
    yield from pythonic.call_lines(scanner, calls)
    yield from scanner.closing(("```",))


def command_r(scanner: Scanner, calls: Calls) -> Steps[None]:
    """After `Action:`: a JSON list in a Markdown block. The template tells the model to call a tool
    that it makes up when no other is needed."""
    calls.ignored = DIRECT_ANSWERS
    yield from scanner.space()
    yield from scanner.expect("```json")
    yield from scanner.space()
    yield from json_list(scanner, calls)
    yield from scanner.space()
    yield from scanner.closing(("```",))


def _markdown_call(scanner: Scanner, calls: Calls) -> Steps[None]:
    """A line with a name, then JSON in a Markdown block."""
    name = yield from _up_to(scanner, "\n")
    yield from scanner.space()
    yield from scanner.starts_with(("```json",))
    yield from arguments_of(scanner, calls, name.strip())
    yield from scanner.space()
    yield from scanner.closing(("```",))


def _up_to(scanner: Scanner, marker: str) -> Steps[str]:
    pieces: list[str] = []
    if (yield from scanner.until((marker,), pieces.append)) is None:
        raise Malformed
    return "".join(pieces)
