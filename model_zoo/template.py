"""Running a model file's Jinja template: in a sandbox, as `transformers` does, and bounded."""

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from runtime.errors import ModelFileError, RequestError

MAX_CHARACTERS = 32 * 1024 * 1024
TIME_LIMIT_S = 10.0
_WIDE_FORMAT = re.compile(r"\d{5}|\*")


def compile_template(source: str) -> Template:
    """The template, ready to render; ModelFileError where it is not Jinja."""
    try:
        return _ENVIRONMENT.from_string(source)
    except (TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise ModelFileError(f"The file's chat template is broken{where}: {error}.") from error


def render_bounded(template: Template, variables: Mapping[str, Any]) -> str:
    """The text; RequestError where the template refuses, fails, or writes without end."""
    pieces = []
    size, deadline = 0, time.monotonic() + TIME_LIMIT_S
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_CHARACTERS or time.monotonic() > deadline:
                raise RequestError("The chat template writes too much text for this conversation.")
            pieces.append(piece)
    except RequestError:
        raise
    except TemplateError as error:
        raise RequestError(f"The chat template refuses the conversation: {error}") from error
    except Exception as error:  # a template is a program: it can fail in any way
        raise RequestError(f"The chat template fails on the conversation: {error!r}") from error
    return "".join(pieces)


def inspected_texts(source: str) -> frozenset[str]:
    """The constant texts that the template compares with or hands to a string method."""
    places: list[nodes.Node] = []
    tree = _ENVIRONMENT.parse(source)
    places += tree.find_all(nodes.Compare)
    places += (call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr))
    constants = (constant for place in places for constant in place.find_all(nodes.Const))
    return frozenset(text.value for text in constants if isinstance(text.value, str))


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (as the library types it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without the operators that make much out of little.

    What the sandbox forbids is an error here; by itself it would be an undefined value.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to `{attribute}` of a {type(obj).__name__} is not allowed")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "*" and not numbers:
            size = max(_size(left), _size(right)) * max(_count(left), _count(right))
            if size > MAX_CHARACTERS:
                raise SecurityError("a repetition is too long")
        if operator == "**" and not (numbers and abs(left) < 2**32 and abs(right) < 64):
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a text format is too wide")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 1


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read: no HTML escapes, characters as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    del environment.globals["lipsum"]
    return environment


_ENVIRONMENT = _environment()
